"""The program interrupted or out of room, at any moment: its exit code, what it says, what it leaves."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from hetrec.cli import main

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = REPOSITORY / "configs"
PATIENCE_S = 120
MODEL = ("model=deepfm", "model.mlp_sizes=[8, 8]", "model.embedding_dim=4", "trainer.accelerator=cpu")
QUIET = ("trainer.enable_progress_bar=false", "trainer.logger=false")
MARKS = """
import time
from pathlib import Path
from pytorch_lightning import Callback

class Marks(Callback):
    def on_train_batch_start(self, trainer, *args):
        Path("training").touch()
        time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    path = tmp_path_factory.mktemp("rows")
    return ("data=synthetic", f"data.path={path}", "data.rows=400", "data.scale=0.0001", "data.batch_size=32")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "marks.py").write_text(MARKS)


def has_members(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def interrupted(number: int, when: Callable[[], object], *words: str, times: int = 1) -> tuple[int, str]:
    """Runs a command line, sends it a signal, and returns the exit code and what it said on standard error."""
    process = subprocess.Popen(
        [sys.executable, str(REPOSITORY / "train.py"), *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "."},
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not when():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for _ in range(times):
            process.send_signal(number)
            time.sleep(0.02)
        _, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    while has_members(process.pid):  # none of its processes stays
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process.returncode, err


def test_ctrl_c_while_libraries_load() -> None:
    start = time.monotonic()
    code, err = interrupted(signal.SIGINT, lambda: time.monotonic() > start + 1, "fit", times=2)
    assert (code, err) == (130, "")


def test_ctrl_c_twice_while_text_converts(tmp_path: Path) -> None:
    """The part of a compressed file that is under way may be all of it: it is not waited for."""
    row = "\t".join(["1", *["3"] * 13, *["68fd1e64"] * 26]) + "\n"
    days = tmp_path / "days"
    days.mkdir()
    (days / "day_0.gz").write_bytes(gzip.compress((row * 200_000).encode(), 1))
    (days / "day_1").write_bytes(row.encode() * 280_000)  # enough for several processes
    work = tmp_path / ".days.parquet.partial"
    code, err = interrupted(
        signal.SIGINT, lambda: list(work.glob(".part*")), *MODEL, *QUIET, "data=criteo", "data.path=days", times=2
    )
    assert code == 130
    assert "Traceback" not in err
    assert not (tmp_path / "days.parquet").exists()
    assert not list(work.glob(".part*"))


def test_sigterm_ends_all_ranks_after_one_step_and_a_checkpoint_is_kept(rows: tuple[str, ...]) -> None:
    words = ("fit", *MODEL, *rows, *QUIET, "trainer.devices=2", "trainer.max_epochs=100000", "data.test_fraction=0")
    more = ("trainer.callbacks+=marks.Marks", "checkpoint.save_on_exception=true")
    code, err = interrupted(signal.SIGTERM, Path("training").exists, *words, *more)
    assert code == 143, err
    assert "Traceback" not in err
    assert "error" not in err
    (last,) = Path("runs").glob("*/checkpoints/last.ckpt")
    assert torch.load(last, weights_only=True)["global_step"] > 0
    assert main(CONFIGS, ["test", *MODEL, *rows, *QUIET, f"ckpt_path={last}"]) == 0


def test_a_disk_that_is_full_when_a_checkpoint_is_written(
    rows: tuple[str, ...], small_disk: Callable[[int], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    """There is room for one and not for two: the first stays, and can be gone on from."""
    large = ("model=deepfm", *rows, *QUIET, "data.val_fraction=0", "data.test_fraction=0")
    assert main(CONFIGS, [*large]) == 0
    pair = sum(p.stat().st_size for p in Path("runs").rglob("last*/**/*") if p.is_file())
    pair += sum(p.stat().st_size for p in Path("runs").rglob("last.ckpt"))
    disk = small_disk(pair + pair // 2)
    capfd.readouterr()
    assert main(CONFIGS, [*large, "trainer.max_epochs=3", f"trainer.default_root_dir={disk}"]) == 1
    error = capfd.readouterr().err.splitlines()[-1]
    (folder,) = disk.glob("*/checkpoints")
    assert error.startswith(f"error: cannot write {folder}/last.ckpt: No space left on device; what was saved before")
    assert {p.name for p in folder.iterdir()} == {"last.ckpt", "last.embeddings"}
    assert len(list((folder / "last.embeddings").iterdir())) == 1
    assert main(CONFIGS, [*large, "trainer.max_epochs=2", f"ckpt_path={folder / 'last.ckpt'}"]) == 0


def test_a_disk_that_is_full_when_predictions_are_written(
    rows: tuple[str, ...], small_disk: Callable[[int], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    words = (*MODEL, *rows, *QUIET)
    assert main(CONFIGS, ["fit", *words, "trainer.max_steps=1", "data.val_fraction=0", "data.test_fraction=0"]) == 0
    (last,) = Path("runs").glob("*/checkpoints/last.ckpt")
    disk = small_disk(8192)  # config.yaml takes a page
    predict = ["predict", *words, f"ckpt_path={last}"]
    assert main(CONFIGS, [*predict, f"trainer.default_root_dir={disk}"]) == 1
    error = capfd.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: cannot write {disk}/")
    assert "predictions.parquet: No space left on device; make room" in error
    assert not [p for p in disk.rglob("*") if "predictions" in p.name]
    assert main(CONFIGS, predict) == 0
    (written,) = Path("runs").glob("*/predictions.parquet")
    assert pq.read_metadata(written).num_rows == 400
