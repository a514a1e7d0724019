"""Reading: every row once, whatever the ranks and workers; bounded memory; positions; errors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from datamodules.columns import DenseColumn, SparseColumn
from datamodules.errors import DataError
from datamodules.files import ParquetFiles
from datamodules.loader import ParquetLoader
from datamodules.plan import EpochPlan, Rows, make_units
from datamodules.reader import Columns, WindowReader

REPOSITORY = Path(__file__).resolve().parents[2]
Fixture = Callable[..., Any]


@pytest.mark.parametrize("workers", [0, 2])
def test_two_ranks_read_each_row_exactly_once(
    id_files: Fixture, id_loader: Fixture, ids_of: Fixture, workers: int
) -> None:
    folder = id_files([90, 100, 110, 7], row_group=25)
    loaders = [id_loader(folder, rank, 2, workers) for rank in range(2)]
    epochs = []
    for _ in range(2):
        ranks = [ids_of(loader) for loader in loaders]
        assert Counter(i for batches in ranks for b in batches for i in b) == Counter(range(307))
        assert [len(batches) for batches in ranks] == [len(loader) for loader in loaders] == [16, 16]
        epochs.append(ranks)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("world", [1, 3])
def test_batches_do_not_depend_on_the_number_of_workers(
    id_files: Fixture, id_loader: Fixture, ids_of: Fixture, world: int
) -> None:
    folder = id_files([300, 20], row_group=64)
    first, *others = (id_loader(folder, world - 1, world, workers) for workers in (0, 1, 2))
    wanted = [ids_of(first), ids_of(first)]
    for loader in others:
        assert [ids_of(loader), ids_of(loader)] == wanted


def test_seeds_and_epochs_are_other_orders_and_the_same_ones_repeat(
    id_files: Fixture, id_loader: Fixture, ids_of: Fixture
) -> None:
    folder = id_files([200], row_group=50)
    one, again, other = id_loader(folder), id_loader(folder), id_loader(folder, seed=1)
    epochs = [ids_of(one) for _ in range(3)]
    assert len({str(e) for e in epochs}) == 3
    assert [ids_of(again) for _ in range(3)] == epochs
    assert ids_of(other) not in epochs
    again.set_epoch(1)
    assert ids_of(again) == epochs[1]
    unshuffled = id_loader(folder, shuffle=False)
    assert [i for b in ids_of(unshuffled) for i in b] == list(range(200))


def test_rows_are_mixed_across_the_whole_buffer(id_files: Fixture, id_loader: Fixture, ids_of: Fixture) -> None:
    folder = id_files([2000], row_group=2000)
    first = ids_of(id_loader(folder, window_rows=1000))[0]
    assert max(first) - min(first) > 500


def test_workers_outlive_an_epoch_and_an_epoch_that_was_left_early(
    id_files: Fixture, id_loader: Fixture, ids_of: Fixture
) -> None:
    folder = id_files([400])
    loader, reference = id_loader(folder, num_workers=2), id_loader(folder)
    assert ids_of(loader) == ids_of(reference)
    processes = {w.pid for w in loader._workers._loader._iterator._workers}
    left_early = iter(loader)
    assert next(left_early).sparse_features.values().tolist() == next(iter(reference)).sparse_features.values().tolist()
    left_early.close()
    assert ids_of(loader) == ids_of(reference)
    assert {w.pid for w in loader._workers._loader._iterator._workers} == processes


@pytest.mark.parametrize(("workers", "done"), [*((0, n) for n in (0, 1, 3, 4, 7, 10)), (2, 4), (2, 7)])
def test_reading_goes_on_where_it_stopped(
    id_files: Fixture, id_loader: Fixture, ids_of: Fixture, workers: int, done: int
) -> None:
    """Ten batches, four to a window: stopped within and between windows and at the end of the epoch."""
    folder = id_files([95], row_group=30)
    whole = id_loader(folder)
    epochs = [ids_of(whole) for _ in range(3)]
    loader = id_loader(folder)
    ids_of(loader)
    second = iter(loader)
    assert [next(second).sparse_features.values().tolist() for _ in range(done)] == epochs[1][:done]
    state = loader.state_dict() if done else {**loader.state_dict(), "epoch": 1, "batches": 0}
    assert (state["epoch"], state["batches"]) == (1, done)

    resumed = id_loader(folder, num_workers=workers)
    resumed.load_state_dict(state)
    if done < 10:
        resumed.set_epoch(1)  # what a trainer does: the same epoch again leaves the position alone
        assert ids_of(resumed) == epochs[1][done:]
    assert ids_of(resumed) == epochs[2]


def test_a_position_of_other_data_is_refused_by_name(id_files: Fixture, id_loader: Fixture, ids_of: Fixture) -> None:
    loader = id_loader(id_files([95]))
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(DataError, match="rows was 95, is 100"):
        id_loader(id_files([100])).load_state_dict(state)
    with pytest.raises(DataError, match="batch_size was 10, is 20"):
        id_loader(id_files([95]), batch_size=20).load_state_dict(state)
    other = id_loader(id_files([100]))
    other.load_state_dict({**state, "batches": 10})  # at the end of an epoch it does not matter
    assert len(ids_of(other)) == 10


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_a_worker_is_the_reader_s_own(id_files: Fixture, id_loader: Fixture, workers: int) -> None:
    folder = id_files([30, 30])
    pq.write_table(pa.table({"label": [0, None], "id": [1, 2]}), folder / "part-009.parquet")
    with pytest.raises(DataError) as caught:
        list(id_loader(folder, num_workers=workers, shuffle=False))
    assert "part-009.parquet" in str(caught.value)
    assert "'label' holds None; expected 0 or 1" in str(caught.value)
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "workers"),
    [("shorter", 0), ("longer", 0), ("garbage", 0), ("replaced", 0), ("replaced", 2), ("gone", 0)],
)
def test_a_file_that_changes_under_the_reader_is_named(
    id_files: Fixture, id_loader: Fixture, change: str, workers: int
) -> None:
    """Changed after the footers were read and, without workers, after the first of its batches too."""
    folder = id_files([30, 30_000])
    loader = id_loader(folder, shuffle=False, num_workers=workers)
    path = folder / "part-001.parquet"
    rows = pq.read_table(path)
    batches = iter(loader)
    for _ in range(0 if workers else 10):
        next(batches)
    if change == "shorter":
        pq.write_table(rows.slice(0, 990), path)
    elif change == "longer":
        pq.write_table(pa.concat_tables([rows, rows]), path, row_group_size=1000)
    elif change == "garbage":
        path.write_bytes(path.read_bytes()[:2000] + bytes(100) + b"PAR1")
    elif change == "replaced":  # by as many rows: the footers fit, the rows are others
        pq.write_table(rows, folder / "new", row_group_size=1000)
        (folder / "new").rename(path)
    else:
        path.unlink()
    message = "cannot be read: .* removed since the start" if change == "gone" else "was changed since the start"
    with pytest.raises(DataError, match=rf"part-001\.parquet {message}"):
        list(batches)


def test_ranks_without_a_row_take_empty_steps(id_files: Fixture, id_loader: Fixture) -> None:
    folder = id_files([1])
    batches = [list(id_loader(folder, rank, 3)) for rank in range(3)]
    assert [[b.batch_size for b in rank] for rank in batches] == [[0], [0], [1]]
    empty = batches[0][0]
    assert empty.dense_features.shape == (0, 0)
    assert empty.sparse_features.stride() == 0
    assert empty.sparse_features.keys() == ["id"]
    assert empty.sparse_features.values().shape == (0,)
    assert empty.labels.shape == (0,)


def reader_of(path: Path, columns: Columns, **options: Any) -> ParquetLoader:
    files = ParquetFiles.open(path)
    rows = Rows(0, files.rows)
    settings = {"batch_size": 4, "window_rows": 12, "shuffle": False, "seed": 0, "rank": 0, "world_size": 1, **options}
    plan = EpochPlan(tuple(make_units(files.group_rows, rows)), **settings)
    return ParquetLoader(WindowReader(files, rows, columns, plan), [c.name for c in columns.sparse])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_of_bags_hold_what_the_file_holds(tmp_path: Path, weighted: bool, shuffle: bool) -> None:
    """Feature-major values, lengths and weights; one feature is empty everywhere, one holds single keys."""
    random = np.random.default_rng(0)
    rows = []
    for i in range(50):
        bag = random.integers(0, 100, random.integers(0, 4)).tolist()
        rows.append({"label": i % 2, "d": i / 2, "one": i, "bag": bag, "w": [v / 4 for v in bag], "none": []})
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=20)
    sparse = (
        SparseColumn("none", ragged=True),
        SparseColumn("bag", ragged=True, weight="w" if weighted else None),
        SparseColumn("one"),
    )
    seen = []
    for batch in reader_of(path, Columns((DenseColumn("d"),), sparse, "label"), shuffle=shuffle):
        features = batch.sparse_features
        assert features.values().dtype == torch.int64
        assert features.lengths().dtype == torch.int32
        assert (features.weights_or_none() is not None) == weighted
        ids = features["one"].values().tolist()
        wanted = [rows[i] for i in ids]
        assert batch.labels.tolist() == [r["label"] for r in wanted]
        assert batch.dense_features[:, 0].tolist() == [r["d"] for r in wanted]
        assert features["bag"].lengths().tolist() == [len(r["bag"]) for r in wanted]
        assert features["bag"].values().tolist() == [v for r in wanted for v in r["bag"]]
        assert features["none"].lengths().tolist() == [0] * len(ids)
        assert features["none"].values().tolist() == []
        if weighted:
            assert features["bag"].weights().tolist() == [v for r in wanted for v in r["w"]]
            assert features["one"].weights().tolist() == [1.0] * len(ids)
        seen += ids
    assert sorted(seen) == list(range(50))
    assert (seen == list(range(50))) != shuffle


def test_a_batch_is_a_jagged_tensor_like_any_other(id_files: Fixture, id_loader: Fixture) -> None:
    batch = next(iter(id_loader(id_files([20]), shuffle=False)))
    assert batch.sparse_features.offsets().tolist() == list(range(11))
    assert batch.sparse_features["id"].to_dense()[3].tolist() == [3]
    batch.sparse_features.values()[0] = 5  # the arrays are the batch's own


MEMORY = """
import resource, sys
from datamodules.columns import SparseColumn
from datamodules.files import ParquetFiles
from datamodules.plan import EpochPlan, Rows, make_units
from datamodules.reader import Columns, WindowReader
import numpy, pyarrow.parquet
files = ParquetFiles.open(sys.argv[1])
names = [n for n in files.columns if n != "label"]
rows = Rows(0, files.rows)
plan = EpochPlan(tuple(make_units(files.group_rows, rows)), 512, 8192, True, 0, 0, 1)
reader = WindowReader(files, rows, Columns((), tuple(SparseColumn(n) for n in names), "label"), plan)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
read = sum(len(reader.read(0, w).labels) for w in range(plan.windows))
print(read, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("row_group", [1_500_000, 200])
def test_memory_does_not_grow_with_the_row_group_or_their_number(tmp_path: Path, row_group: int) -> None:
    """One row group of 1.5 million rows (108 MB), or thousands of 200 rows."""
    rows = 1_500_000 if row_group > 1_000_000 else 600_000
    random = np.random.default_rng(0)
    table = pa.table({"label": np.zeros(rows, np.int8)} | {f"c{i}": random.integers(0, 2**62, rows) for i in range(9)})
    pq.write_table(table, tmp_path / "big.parquet", row_group_size=row_group, use_dictionary=False)
    out = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    ).stdout.split()
    assert int(out[0]) == rows
    assert int(out[1]) < 40_000, f"{out[1]} kB more than before the first row was read"
