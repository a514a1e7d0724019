"""Several ranks through the program, each run in processes of its own.

They cost seconds apiece, most of them imports; so one run continues another, and evaluates what that one wrote.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from servers import Server, servers

from hetrec.cli import main

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = REPOSITORY / "configs"
RANKS = 2
ROWS, BATCH = 400, 32
MARK = "HETREC_TEST_RUN"  # in the environment of a run's processes, all of which inherit it
FOR_EVER = ("trainer.max_epochs=1000000", "data.test_fraction=0")
PATIENCE_S = 120


def processes(mark: str) -> dict[int, str]:
    """Command lines, by process id, of what runs with that mark in its environment."""
    found = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # not a process, another user's, or gone
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def until(condition: Callable[[], bool], within_s: float = PATIENCE_S) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


class Run:
    """One command line, in a process group of its own; its output goes to files of ``folder``."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        folder.mkdir(exist_ok=True)
        with open(folder / "out", "w") as out, open(folder / "err", "w") as err:
            self.process = subprocess.Popen(
                [sys.executable, str(REPOSITORY / "train.py"), *words],
                cwd=folder,
                stdout=out,
                stderr=err,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder), MARK: self.mark},
                start_new_session=True,
            )

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    @property
    def files(self) -> Path:
        (folder,) = (self.folder / "runs").iterdir()
        return folder

    def trains(self) -> bool:
        """Whether it has saved a checkpoint; it must not have ended."""
        assert self.process.poll() is None, self.err
        return bool(list(self.folder.glob("runs/*/checkpoints/last.ckpt")))

    def left(self) -> dict[int, str]:
        return processes(self.mark)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    rows = tmp_path_factory.mktemp("rows")
    data = ["data=synthetic", f"data.path={rows}", f"data.rows={ROWS}", "data.scale=0.0001", f"data.batch_size={BATCH}"]
    model = ["model=deepfm", "model.mlp_sizes=[8, 8]", "model.embedding_dim=4"]
    return [*data, *model, "trainer.accelerator=cpu", "trainer.enable_progress_bar=false"]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, words: list[str]) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(*more: str, files: dict[str, str] | None = None) -> Run:
        folder = tmp_path_factory.mktemp("run")
        for name, text in (files or {}).items():
            (folder / name).write_text(text)
        runs.append(Run(folder, *more[:1], *words, f"trainer.devices={RANKS}", *more[1:]))
        return runs[-1]

    yield start
    for run in runs:
        for pid in run.left():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.process.wait()


@pytest.fixture(scope="module")
def trained(start: Callable[..., Run]) -> Run:
    run = start("fit")
    run.wait()
    return run


@pytest.fixture(scope="module")
def resumed(start: Callable[..., Run], trained: Run) -> Run:
    """One more epoch, from the checkpoint of a run on one server, on two others."""
    with servers(2) as addresses:
        last = trained.files / "checkpoints" / "last.ckpt"
        remote = ("store=remote", f"store.addresses=[{','.join(addresses)}]")
        run = start("fit", *remote, f"ckpt_path={last}", "trainer.max_epochs=2")
        run.wait()
    return run


def test_ranks_that_share_servers_of_the_run_train_and_evaluate(trained: Run) -> None:
    assert trained.process.returncode == 0, trained.err
    summary = json.loads((trained.files / "summary.json").read_text())
    assert {"val_auc", "test_auc", "hit_rate"} <= summary.keys()
    assert (trained.files / "checkpoints" / "best.ckpt").is_file()
    # Each rank trains on half of about 80 % of the rows.
    assert summary["steps"] == pytest.approx(0.8 * ROWS / RANKS / BATCH, abs=1.5)
    assert trained.left() == {}


def test_several_ranks_print_what_one_would(trained: Run) -> None:
    said = trained.err.splitlines() + (trained.folder / "out").read_text().splitlines()
    said = [line for line in said if line.strip() and "below a baseline" not in line]  # so few rows teach no model
    assert len(said) == len(set(said))
    assert [line for line in said if "rank" in line] == ["2 ranks share 1 parameter server, started for this run"]
    assert not [line for line in said if "warning" in line or "distributed" in line or set(line) == {"-"}]


def test_ranks_go_on_from_a_checkpoint_on_other_servers(resumed: Run) -> None:
    assert resumed.process.returncode == 0, resumed.err
    checkpoint = torch.load(resumed.files / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["epoch"] == 1
    snapshots = list((resumed.files / "checkpoints" / "last.embeddings").glob("*/*.parquet"))
    assert {path.name.split(".")[0][:20] for path in snapshots} == {"shard-00000-of-00002", "shard-00001-of-00002"}
    assert resumed.left() == {}


def test_ranks_predict_what_one_rank_without_servers_predicts(
    start: Callable[..., Run], resumed: Run, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = f"ckpt_path={resumed.files / 'checkpoints' / 'last.ckpt'}"
    several = start("predict", best)
    assert several.wait() == 0, several.err
    files = [several.files / f"predictions-{rank}.parquet" for rank in range(RANKS)]
    assert (
        f"predictions are in {several.files / 'predictions-RANK.parquet'}".replace(f"{several.folder}/", "")
        in several.err
    )
    shares = [pq.read_table(file)["probability"].to_numpy() for file in files]
    assert all(len(share) for share in shares)

    monkeypatch.chdir(tmp_path)
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    assert main(CONFIGS, ["predict", *words, "trainer.devices=1", best]) == 0
    assert processes(mark) == {}  # this process had the mark after it had started
    (one,) = Path("runs").glob("*/predictions.parquet")
    np.testing.assert_allclose(
        np.concatenate(shares), pq.read_table(one)["probability"].to_numpy(), rtol=1e-5, atol=1e-7
    )


def test_ranks_train_in_step(start: Callable[..., Run]) -> None:
    run = start("fit", "cache=bsp", "cache.policy=lru", "embedding.name=adam", "store.shards=2")
    assert run.wait() == 0, run.err
    summary = json.loads((run.files / "summary.json").read_text())
    assert {"val_auc", "test_auc"} <= summary.keys()
    assert summary["rows_pushed"] > 0
    assert run.left() == {}


def test_a_server_that_dies_ends_the_run_with_one_line(start: Callable[..., Run]) -> None:
    server = Server()
    try:
        run = start("fit", "store=remote", f"store.addresses=[{server.address()}]", "store.retry_s=1", *FOR_EVER)
        assert until(run.trains)
        server.process.kill()
        assert run.wait() == 1
    finally:
        server.stop()
    errors = [line for line in run.err.splitlines() if "error" in line.lower()]
    assert len(errors) == 1
    assert errors[0].startswith("error: ")
    assert "shard 0 at grpc://127.0.0.1:" in errors[0]
    assert "did not answer for 1 s" in errors[0]
    assert "Traceback" not in run.err
    assert until(lambda: run.left() == {}, 20), run.left()


def test_nothing_outlives_a_first_rank_that_was_killed(start: Callable[..., Run]) -> None:
    run = start("fit", *FOR_EVER)
    assert until(run.trains)
    kinds = ["server" if "cache_backend.server" in command else "rank" for command in run.left().values()]
    assert sorted(kinds) == ["rank", "rank", "server"]
    run.process.kill()
    run.wait()
    assert until(lambda: run.left() == {}, 20), run.left()
    assert "Traceback" not in run.err


def test_ctrl_c_ends_every_rank_and_server(start: Callable[..., Run]) -> None:
    run = start("fit", *FOR_EVER)
    assert until(run.trains)
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.wait() == 130
    assert "Traceback" not in run.err
    assert until(lambda: run.left() == {}, 20), run.left()


def test_a_bug_in_one_rank_ends_all_and_is_shown_once(start: Callable[..., Run]) -> None:
    callback = """
from pytorch_lightning import Callback

class Breaks(Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_rank == 1 and trainer.global_step == 3:
            raise RuntimeError("broken on purpose")
"""
    run = start("fit", "trainer.callbacks+=breaks.Breaks", *FOR_EVER, files={"breaks.py": callback})
    assert run.wait() == 1
    assert run.err.count("Traceback") == 1
    assert run.err.count("RuntimeError: broken on purpose") == 1
    assert run.err.splitlines()[-1].startswith("error: rank 1 (process ")
    assert until(lambda: run.left() == {}, 20), run.left()
