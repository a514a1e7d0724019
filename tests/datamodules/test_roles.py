"""What each column is: profiles against numpy and scikit-learn, roles found and set, and what is said about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import roc_auc_score

from datamodules.columns import SparseColumn
from datamodules.errors import DataError
from datamodules.files import ParquetFiles
from datamodules.labels import LabelRule
from datamodules.parquet import ParquetDataModule
from datamodules.profile import TableProfile
from hetrec.cli import main

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
ROWS = 2000


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = np.random.default_rng(0)
    click = generator.integers(0, 2, ROWS)
    user = generator.integers(0, 50, ROWS)
    columns: dict[str, Any] = {
        "label": click,
        "row": [f"r{i}" for i in range(ROWS)],
        "user": pa.array(np.where(user == 0, None, user), pa.int64()),
        "price": np.where(user < 10, np.nan, generator.normal(size=ROWS) + click),
        "country": ["de"] * ROWS,
        "zero": np.zeros(ROWS),
        "flag": [True if u == 3 else None for u in user],
        "tags": [[1, 2]] * ROWS,
        "paid": click * 9.5,
        "basket": np.where(click == 1, "full", "empty"),
        "when": pa.array(1_700_000_000 + np.arange(ROWS) // 100),
        "day": pa.array((np.arange(ROWS) // 100).astype(np.int32), pa.date32()),
    }
    path = tmp_path_factory.mktemp("clicks") / "clicks.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=300)
    return path


def counts(column: list[Any]) -> tuple[int, int]:
    """Distinct and missing values."""
    present = [value for value in column if value is not None and value == value]
    return len(set(present)), len(column) - len(present)


def test_a_profile_counts_and_judges_single_columns(clicks: Path) -> None:
    table = pq.read_table(clicks).to_pydict()
    profile = TableProfile(ParquetFiles.open(clicks))
    for name in ("user", "country", "basket"):
        found = profile.sparse(SparseColumn(name))
        assert (found.distinct, found.missing) == counts(table[name])
    price = profile.dense("price")
    assert (price.distinct, price.missing) == counts(table["price"])
    assert [profile.sparse(SparseColumn(n)).identifier for n in ("row", "user", "when")] == [True, False, False]
    assert [profile.sparse(SparseColumn(n)).constant for n in ("country", "flag", "user")] == [True, False, False]
    assert [profile.dense(n).constant for n in ("zero", "price")] == [True, False]
    rule, labels = LabelRule(), table["label"]
    lowest = np.nan_to_num(np.array(table["price"]), nan=-1e9)
    assert profile.auc("price", "label", rule) == pytest.approx(roc_auc_score(labels, lowest))
    assert profile.auc(SparseColumn("basket"), "label", rule) == 1
    assert profile.auc(SparseColumn("row"), "label", rule) == 0.5  # not 1: no key of one half is in the other
    learned: dict[int | None, list[int]] = {user: [] for user in table["user"]}
    for user, label in zip(table["user"][::2], labels[::2], strict=True):
        learned[user].append(label)
    base = sum(labels[::2]) / len(labels[::2])
    scores = [(sum(learned[user]) + base) / (len(learned[user]) + 1) for user in table["user"][1::2]]
    auc = roc_auc_score(labels[1::2], scores)
    assert profile.auc(SparseColumn("user"), "label", rule) == pytest.approx(max(auc, 1 - auc))


def test_what_a_sample_makes_likely_is_checked_on_all_rows(tmp_path: Path) -> None:
    """The first 300 rows have a user each and one country; later rows bring the users back, and a second country."""
    path = tmp_path / "rows.parquet"
    once, again = np.arange(3000), np.arange(3000) % 300
    columns = {"row": once, "user": again, "country": ["de"] * 2999 + ["fr"], "planet": ["earth"] * 3000}
    pq.write_table(pa.table({"label": again % 2, **columns}), path, row_group_size=100)
    profile = TableProfile(ParquetFiles.open(path), sample=300)
    found = {name: profile.sparse(SparseColumn(name)) for name in columns}
    assert {name: (p.identifier, p.constant) for name, p in found.items()} == {
        "row": (True, False),
        "user": (False, False),
        "country": (False, False),
        "planet": (False, True),
    }


def test_columns_that_tell_nothing_are_left_out_unless_named(clicks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = ParquetDataModule(str(clicks)).spec
    assert found.sparse_names == ["user", "flag", "tags", "basket", "when"]
    assert found.dense == ("price", "paid")
    lines = capsys.readouterr().err
    assert (
        "left out: row: nearly every row has a value of its own, so none can be learned. To use one all the same, name "
        "the columns: data.sparse=[user,flag,tags,basket,when,row]\n" in lines
    )
    assert "left out: zero, country: one value in every row. " in lines

    def sparse(**options: Any) -> list[str]:
        return ParquetDataModule(str(clicks), **options).spec.sparse_names

    assert sparse(sparse=["row", "country"]) == ["row", "country"]
    assert sparse(tables={"row": "user"}) == ["row", "user", "flag", "tags", "basket", "when"]
    assert sparse(ignore=["basket", "when", "paid", "row"]) == ["user", "flag", "tags"]
    with pytest.raises(DataError, match=r"data\.ignore names nothing; .* has: label, row"):
        sparse(ignore=["nothing"])
    with pytest.raises(DataError, match=r"data\.ignore names user, and so does data\.label"):
        sparse(ignore=["user"], sparse=["user"])


def test_where_nothing_else_is_left_columns_stay(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"label": np.arange(500) % 2, "id": np.arange(500)}), path)
    assert ParquetDataModule(str(path)).spec.sparse_names == ["id"]


@pytest.mark.parametrize(("name", "suggested"), [("Click", "Click"), ("is_attributed", "is_attributed"), ("x", None)])
def test_a_label_of_another_name_is_suggested(tmp_path: Path, name: str, suggested: str | None) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"user": [1, 2], "rating": [3, 4], name: [0, 1]}), path)
    with pytest.raises(DataError, match="has no label column 'label'") as error:
        ParquetDataModule(str(path)).setup("fit")
    assert str(error.value).endswith(f"It may be data.label={suggested or 'rating'}")


def test_a_run_says_what_its_columns_are_and_keeps_them(
    clicks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    words = ("model=deepfm", "data=parquet", "model.mlp_sizes=[8]", "trainer.enable_progress_bar=false")
    assert main(CONFIGS, [*words, f"data.path={clicks}", "data.ignore=[tags]"]) == 0
    said = capsys.readouterr().err
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said.splitlines() if line.startswith("│")]
    assert "columns, from all 2,000 rows" in said
    prices, users = ([f"{n:,}" for n in counts(pq.read_table(clicks)[name].to_pylist())] for name in ("price", "user"))
    assert [c for c in cells if c[0] in ("label", "row", "user", "price", "country", "tags", "day")] == [
        ["label", "int64", "label", "2", "0", ""],
        ["row", "string", "ignored", "2,000", "0", "identifier"],
        ["user", "int64", "categorical", *users, "integers"],
        ["price", "double", "dense", *prices, "numbers"],
        ["country", "string", "ignored", "1", "0", "constant"],
        ["tags", "list<element: int64>", "ignored", "2", "0", "data.ignore"],
        ["day", "date32[day]", "ignored", "", "", "no feature has this type"],
    ]
    for name in ("paid", "basket"):
        assert f"{name} alone tells clicks apart (AUC 1.0000): is it known before the click?" in said
    assert said.count("alone tells") == 2
    for name in ("when", "day"):
        assert f"{name} is a time: a model is best judged on rows later than those it learned from" in said
    assert said.count("is a time") == 2

    # In these rows every user and flag is new, and nothing is left of what the model was trained with.
    new = tmp_path / "new.parquet"
    pq.write_table(pq.read_table(clicks).slice(0, 300).drop_columns(["label"]), new)
    table = pq.read_table(new)
    table = table.set_column(table.schema.get_field_index("user"), "user", pa.array(range(300)))
    pq.write_table(table, new)
    (run,) = Path("runs").iterdir()
    checkpoint = run / "checkpoints" / "last.ckpt"
    assert main(CONFIGS, ["predict", *words, f"data.path={new}", f"ckpt_path={checkpoint}"]) == 0
    (predicted,) = Path("runs").glob("*predict*")
    assert pq.read_table(predicted / "predictions.parquet").num_rows == 300
    assert "columns, from" not in capsys.readouterr().err


def test_without_a_trainer_nothing_is_printed(clicks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ParquetDataModule(str(clicks), sparse=["user"], dense=["price"])
    data.prepare_data()
    data.setup("fit")
    assert capsys.readouterr().err == ""
