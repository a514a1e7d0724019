"""The log and its recovery, file by file: torn tails, damage, compaction while pushes go on."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from running import DIM, STATE, TABLE, Peer

from cache_backend.server.errors import LogError, StorageError
from cache_backend.server.log import Segment
from cache_backend.server.shard import Shard
from cache_backend.server.storage import LogStorage
from cache_backend.store import TableSchema

SCHEMA = TableSchema(**TABLE)
KEYS = list(range(40))


class Client(Peer):
    """Makes frames; the shard is in this process."""

    def __init__(self, worker: int = 1) -> None:
        self.worker, self.session, self.sequence = worker, 1, 0


def new_shard() -> Shard:
    return Shard(0, 1, "lamport", 77, max_rows=1 << 20, max_message_bytes=1 << 28)


def fail(error: OSError) -> None:
    raise AssertionError(error)


@contextmanager
def recovered(folder: Path, compact_bytes: int = 1 << 40) -> Iterator[tuple[Shard, LogStorage]]:
    shard = new_shard()
    storage = LogStorage(folder, shard, compact_bytes, lambda seconds, written: None, fail)
    yield shard, storage
    storage.close(compact=False)


def rows_of(shard: Shard, keys: int = 50) -> dict[int, tuple[int, bytes]]:
    """key -> clock and the row's very bits, of keys below ``keys``, which must be all there are."""
    table = shard.groups.get((DIM, STATE))
    if table is None:
        return {}
    rows, clocks, fresh = np.empty((keys, DIM + STATE), np.float32), np.empty(keys, np.int64), np.empty(keys, np.uint8)
    table.fetch(np.zeros(keys, np.int32), np.arange(keys), rows, clocks, fresh)
    assert len(table) == keys - fresh.sum()
    return {key: (int(clocks[key]), rows[key].tobytes()) for key in np.flatnonzero(fresh == 0).tolist()}


@pytest.fixture
def history(tmp_path: Path) -> tuple[Path, list[dict[int, tuple[int, bytes]]]]:
    """A folder with eight pushes, each acknowledged before the next, and the rows before, between and after them."""
    folder = tmp_path / "data"
    client = Client()
    states: list[dict[int, tuple[int, bytes]]] = []
    with recovered(folder) as (shard, _):
        shard.open([SCHEMA], None)
        states.append(rows_of(shard))
        for sequence in range(1, 9):
            keys = KEYS[sequence : 3 * sequence]
            shard.exchange(client.frame(push=keys, delta=sequence / 7, sequence=sequence, clock=sequence))
            states.append(rows_of(shard))
    return folder, states


def test_everything_comes_back(history: tuple[Path, list[object]]) -> None:
    folder, states = history
    with recovered(folder) as (shard, _):
        assert rows_of(shard) == states[-1]
        assert shard.generation == 77
        assert [t["name"] for t in shard.table_schemas()] == ["t"]
        # and so does the knowledge of what was applied
        assert shard.exchange(Client().frame(push=KEYS, sequence=8)).duplicate
        assert rows_of(shard) == states[-1]
        shard.exchange(Client().frame(push=KEYS, sequence=9))
        after = rows_of(shard)
    with recovered(folder) as (shard, _):
        assert rows_of(shard) == after


def test_a_tail_cut_anywhere_leaves_a_whole_prefix(history: tuple[Path, list[object]], tmp_path: Path) -> None:
    folder, states = history
    (segment,) = folder.glob("log-*")
    reached = set()
    for length in range(0, segment.stat().st_size, 31):
        copy = shutil.copytree(folder, tmp_path / "copy")
        with open(copy / segment.name, "r+b") as f:
            f.truncate(length)
        with recovered(copy) as (shard, _):
            found = rows_of(shard)
            reached.add(states.index(found))
            # Writing goes on after the cut.
            if not shard.schemas:
                shard.open([SCHEMA], None)
            shard.exchange(Client(worker=2).frame(push=KEYS, sequence=1))
            after = rows_of(shard)
        with recovered(copy) as (shard, _):
            assert rows_of(shard) == after
        shutil.rmtree(copy)
    assert reached == set(range(8))


def test_damage_to_what_was_acknowledged_is_an_error_and_to_the_tail_is_not(
    history: tuple[Path, list[object]], tmp_path: Path
) -> None:
    folder, states = history
    (segment,) = folder.glob("log-*")
    whole = segment.read_bytes()
    # The last push was acknowledged too, but no later write proves it.
    last_commit = whole.rindex(b"hetrec-commit")
    outcomes = set()
    for position in range(0, len(whole), 13):
        copy = shutil.copytree(folder, tmp_path / "copy")
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        (copy / segment.name).write_bytes(damaged)
        if position < last_commit - 9:
            with pytest.raises(LogError, match=re.escape(str(copy / segment.name)) + r": the record at byte \d+"):
                LogStorage(copy, new_shard(), 1 << 40, lambda seconds, written: None, fail)
            outcomes.add("error")
        else:
            with recovered(copy) as (shard, _):
                assert rows_of(shard) == states[-2]
            outcomes.add("cut")
        shutil.rmtree(copy)
    assert outcomes == {"error", "cut"}


@pytest.mark.parametrize(
    "tail", [bytes(5000), b"\x01\x00\x00\x00", b"\xff" * 300, b"P" * 77], ids=["zeros", "few", "ones", "text"]
)
def test_garbage_behind_the_end_is_cut_off(history: tuple[Path, list[object]], tail: bytes, capfd) -> None:
    folder, states = history
    (segment,) = folder.glob("log-*")
    size = segment.stat().st_size
    with open(segment, "ab") as f:
        f.write(tail)
    with recovered(folder) as (shard, _):
        assert rows_of(shard) == states[-1]
    assert segment.stat().st_size == size
    assert f"cut off {len(tail)} bytes" in capfd.readouterr().err


def test_compaction_keeps_everything_and_drops_the_log(history: tuple[Path, list[object]]) -> None:
    folder, states = history
    with recovered(folder) as (shard, storage):
        before = storage.log_bytes
        storage.compact()
        assert storage.log_bytes < before
    names = sorted(p.name for p in folder.iterdir())
    assert names == ["base-00000002", "current.json", "lock", "log-00000002"]
    with recovered(folder) as (shard, _):
        assert rows_of(shard) == states[-1]
        assert shard.exchange(Client().frame(push=KEYS, sequence=8)).duplicate
        shard.exchange(Client().frame(push=KEYS, sequence=9))
        after = rows_of(shard)
    with recovered(folder) as (shard, _):
        assert rows_of(shard) == after


def test_a_crash_between_the_steps_of_a_compaction(history: tuple[Path, list[object]], tmp_path: Path) -> None:
    """The folder as it was before, with what the compaction had made by then."""
    folder, states = history
    before, after = shutil.copytree(folder, tmp_path / "before"), folder
    with recovered(after) as (_, storage):
        storage.compact()
    moments = {
        "new segment torn": {"log-00000002": (after / "log-00000002").read_bytes()[:20]},
        "new segment empty": {"log-00000002": b""},
        "new segment": {"log-00000002": (after / "log-00000002").read_bytes()},
    }
    for extra in ({}, {".base-00000002.x.tmp": None}, {"base-00000002": None}):
        for files in moments.values():
            copy = shutil.copytree(before, tmp_path / "copy")
            for name, content in files.items():
                (copy / name).write_bytes(content)
            for name in extra:
                shutil.copytree(after / "base-00000002", copy / name)
            with recovered(copy) as (shard, storage):
                assert rows_of(shard) == states[-1]
                shard.exchange(Client().frame(push=KEYS, sequence=9))
                storage.compact()
                last = rows_of(shard)
            with recovered(copy) as (shard, _):
                assert rows_of(shard) == last
            shutil.rmtree(copy)
    # The description is new, and the old files are still there.
    for old in before.glob("log-*"):
        shutil.copy(old, after)
    shutil.copytree(after / "base-00000002", after / "base-00000001")
    with recovered(after) as (shard, _):
        assert rows_of(shard) == states[-1]
    assert not (after / "log-00000001").exists()
    assert not (after / "base-00000001").exists()


@pytest.mark.parametrize("clock", [1, 3])
def test_compaction_while_pushes_go_on(tmp_path: Path, clock: int) -> None:
    """Recovery gives the rows bit by bit: a sum in another order, or a push missed or counted twice, would differ."""
    folder = tmp_path / "data"
    stop = threading.Event()
    with recovered(folder) as (shard, storage):
        shard.open([SCHEMA], None)

        def work(worker: int) -> None:
            client, random = Client(worker), np.random.default_rng(worker)
            sequence = 0
            while not stop.is_set():
                sequence += 1
                keys = random.integers(0, 20_000, 200)
                shard.exchange(client.frame(push=keys, delta=random.random(), sequence=sequence, clock=clock))

        threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in (1, 2)]
        for thread in threads:
            thread.start()
        for i in range(4):
            storage.compact()
            copy = shutil.copytree(folder, tmp_path / f"copy-{i}")  # the log goes on being written while this copies
            with recovered(copy):
                pass
            shard.open([TableSchema(**TABLE | {"name": f"other-{i}"})], None)
        stop.set()
        for thread in threads:
            thread.join()
        expected = rows_of(shard, 20_000)
        sessions = shard.sessions.dump()
    assert len(expected) > 1000
    with recovered(folder) as (shard, _):
        assert rows_of(shard, 20_000) == expected
        assert sorted(shard.sessions.dump()) == sorted(sessions)
        assert len(shard.table_schemas()) == 5


def test_a_full_log_is_compacted_by_itself(tmp_path: Path) -> None:
    folder, client = tmp_path / "data", Client()
    with recovered(folder, compact_bytes=20_000) as (shard, _):
        shard.open([SCHEMA], None)
        for sequence in range(1, 300):
            shard.exchange(client.frame(push=KEYS, sequence=sequence))
        expected = rows_of(shard)
    assert list(folder.glob("base-*"))
    assert (folder / "log-00000001").exists() is False
    with recovered(folder) as (shard, _):
        assert rows_of(shard) == expected


def test_records_of_one_wait_share_a_commit(tmp_path: Path) -> None:
    """Group commit: many requests, fewer writes."""
    writes: list[int] = []
    shard = new_shard()
    storage = LogStorage(tmp_path, shard, 1 << 40, lambda seconds, written: writes.append(written), fail)
    shard.open([SCHEMA], None)
    barrier = threading.Barrier(8)

    def work(worker: int) -> None:
        client = Client(worker)
        for sequence in range(1, 26):
            barrier.wait()
            shard.exchange(client.frame(push=KEYS, sequence=sequence))

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    storage.close(compact=False)
    (path,) = tmp_path.glob("log-*")
    records = [kind for kind, _, _ in Segment(path).records(is_last=True)]
    assert records.count(b"P") == 200
    assert len(writes) < 150


def test_a_folder_serves_one_server_and_one_shard(history: tuple[Path, list[object]]) -> None:
    folder, _ = history
    with recovered(folder), pytest.raises(StorageError, match=r"in use by another hetrec-ps \(process \d+\)"):
        LogStorage(folder, new_shard(), 1, lambda seconds, written: None, fail)
    for other, what in (
        (Shard(1, 2, "lamport", 1, 1, 1), "shard 0, this server has 1"),
        (Shard(0, 1, "sum", 1, 1, 1), "clock 'lamport', this server has 'sum'"),
    ):
        with pytest.raises(StorageError, match=what):
            LogStorage(folder, other, 1, lambda seconds, written: None, fail)


def test_missing_files_are_named(history: tuple[Path, list[object]]) -> None:
    folder, _ = history
    with recovered(folder) as (shard, storage):
        storage.compact()
        shard.exchange(Client().frame(push=KEYS, sequence=9))
    kept = (folder / "current.json").read_text()
    (folder / "current.json").unlink()
    with pytest.raises(StorageError, match=r"log-00000002 is a log, but .*current\.json is absent"):
        LogStorage(folder, new_shard(), 1, lambda seconds, written: None, fail)
    (folder / "current.json").write_text(kept)
    (folder / "log-00000002").rename(folder / "log-00000003")
    with pytest.raises(LogError, match="lacks segments"):
        LogStorage(folder, new_shard(), 1, lambda seconds, written: None, fail)
