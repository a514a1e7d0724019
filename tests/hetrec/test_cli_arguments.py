"""The shorthand of the command line, as words in and words out."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetrec.arguments import expand
from hetrec.errors import UserError


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    for name in ("model/dcn", "model/deepfm", "model/wdl", "data/criteo", "cache/small", "store/local", "experiment/x"):
        path = tmp_path / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.touch()
    return tmp_path


def file(configs: Path, name: str) -> str:
    return str(configs / f"{name}.yaml")


def test_groups_become_files_and_options_become_flags(configs: Path) -> None:
    words = ["model=deepfm", "data=criteo", "cache=small", "store=local", "data.path=a/b.tsv", "trainer.max_epochs=2"]
    assert expand(words, configs) == [
        "fit",
        f"--model={file(configs, 'model/deepfm')}",
        f"--data={file(configs, 'data/criteo')}",
        f"--cache={file(configs, 'cache/small')}",
        f"--store={file(configs, 'store/local')}",
        "--data.path=a/b.tsv",
        "--trainer.max_epochs=2",
    ]


@pytest.mark.parametrize("subcommand", ["fit", "validate", "test", "predict"])
def test_a_named_subcommand_comes_first(configs: Path, subcommand: str) -> None:
    assert expand([subcommand, "model=wdl", "data=criteo"], configs)[0] == subcommand


def test_files_come_before_groups_and_groups_before_options_whatever_their_order(configs: Path) -> None:
    own = configs / "own.yaml"
    own.touch()
    words = ["data.batch_size=7", "model=dcn", f"--config={own}", "--model.layers", "4", "data=criteo", "experiment=x"]
    assert expand(words, configs) == [
        "fit",
        f"--config={own}",
        f"--config={file(configs, 'experiment/x')}",
        f"--model={file(configs, 'model/dcn')}",
        f"--data={file(configs, 'data/criteo')}",
        "--data.batch_size=7",
        "--model.layers=4",
    ]


def test_within_a_kind_the_order_stays(configs: Path) -> None:
    words = ["experiment=x", f"--config={file(configs, 'model/dcn')}", "a.b=1", "a.b=2"]
    assert expand(words, configs) == [
        "fit",
        f"--config={file(configs, 'experiment/x')}",
        f"--config={file(configs, 'model/dcn')}",
        "--a.b=1",
        "--a.b=2",
    ]


def test_the_plain_form_passes_through(configs: Path) -> None:
    words = ["test", "--model", "models.dcn.DCN", "--data=my.Data", "--ckpt_path", "x=1.ckpt", "--trainer.callbacks+=A"]
    assert expand(words, configs) == [
        "test",
        "--model=models.dcn.DCN",
        "--data=my.Data",
        "--ckpt_path=x=1.ckpt",
        "--trainer.callbacks+=A",
    ]


def test_optimizers_are_those_of_torch(configs: Path) -> None:
    words = ["model=dcn", "data=criteo", "optimizer=Adam", "lr_scheduler=StepLR", "optimizer=my.Adam"]
    assert expand(words, configs)[3:] == [
        "--optimizer=torch.optim.Adam",
        "--lr_scheduler=torch.optim.lr_scheduler.StepLR",
        "--optimizer=my.Adam",
    ]
    assert expand(["model=dcn", "data=criteo", "lr_scheduler=null"], configs)[3:] == ["--lr_scheduler=null"]


def test_negative_and_nested_values_stay_whole(configs: Path) -> None:
    words = ["model=dcn", "data=criteo", "--x", "-1", "a=[1, 2]", 'b={"c": "d=e"}', "c="]
    assert expand(words, configs)[3:] == ["--x=-1", "--a=[1, 2]", '--b={"c": "d=e"}', "--c="]


def test_flags_take_no_value(configs: Path) -> None:
    assert expand(["--print_config", "model=dcn", "data=criteo"], configs)[3:] == ["--print_config"]


def test_a_group_file_of_ones_own(configs: Path) -> None:
    own = configs / "mine.yaml"
    own.touch()
    assert f"--model={own}" in expand([f"model={own}", "data=criteo"], configs)
    with pytest.raises(UserError, match=r"no file 'absent\.yaml', which model= names"):
        expand(["model=absent.yaml", "data=criteo"], configs)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "model=deepfn data=criteo",
            "unknown model 'deepfn', did you mean 'deepfm'? configs/model has: dcn, deepfm, wdl",
        ),
        ("model=zzz data=criteo", "unknown model 'zzz'; configs/model has: dcn, deepfm, wdl"),
        ("model=dcn data=criteo cache=", "unknown cache ''; configs/cache has: small"),
        ("experiment=y", "unknown experiment 'y'; configs/experiment has: x"),
        ("data=criteo", "no model given: add model=NAME; configs/model has: dcn, deepfm, wdl"),
        ("validate model=dcn", "no data given: add data=NAME; configs/data has: criteo"),
        ("", "no model given: add model=NAME; configs/model has: dcn, deepfm, wdl"),
        ("fti model=dcn", "unknown subcommand 'fti', did you mean 'fit'? there are: fit, validate, test, predict"),
        ("model=dcn fit", "unexpected 'fit': write group=name (model=deepfm), option=value or --option value"),
        ("--config nowhere.yaml", "no file 'nowhere.yaml', which --config names"),
    ],
)
def test_mistakes_are_named_with_what_there_is(configs: Path, words: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        expand(words.split(), configs)
    assert str(caught.value) == message


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["fit", "--help"], ["--data.help", "my.Data"]])
def test_help_needs_neither_model_nor_data(configs: Path, words: list[str]) -> None:
    assert any("help" in word or word == "-h" for word in expand(words, configs))
