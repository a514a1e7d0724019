"""Synchronous steps at a server: complete or not at all, once, whoever comes when, and whatever dies in between."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl
import pytest
from frames import Reply, Request, Round, decode_reply, decode_request, encode_request
from running import DIM, Peer, Program

from cache_backend import RemoteStore, _table

SGD = {
    "name": "t", "dim": DIM, "optimizer": "sgd", "seed": 5, "init_low": 0.0, "init_high": 0.0, "init_state": 0.0,
}  # fmt: skip
LR = 0.5  # of Round.step
PASSING = (fl.FlightUnavailableError, fl.FlightInternalError, fl.FlightCancelledError)


class Rank(Peer):
    """One rank of a group; every gradient is a whole number in all columns, so that sums do not round."""

    def __init__(self, address: str, rank: int, ranks: int, group: int) -> None:
        super().__init__(address, worker=rank + 1, session=group)
        self.round = Round(group=group, rank=rank, ranks=ranks, wait_ms=10_000)

    def frame_of(
        self, number: int, gradients: Sequence[tuple[int, float]], fetch: Sequence[int] = (), **header: int
    ) -> bytes:
        return encode_request(
            Request(
                DIM,
                0,
                self.worker,
                self.session,
                sequence=number,
                pushes=[(0, key) for key, _ in gradients],  # type: ignore[misc]
                deltas=[[value] * DIM for _, value in gradients],
                fetches=[(0, key) for key in fetch],
                round=replace(self.round, number=number, **header),
            )
        )

    def step(
        self, number: int, gradients: Sequence[tuple[int, float]], fetch: Sequence[int] = (), **header: int
    ) -> Reply:
        (reply,) = self.send(self.frame_of(number, gradients, fetch, **header))
        return decode_reply(reply)

    def weights(self, keys: Sequence[int]) -> list[tuple[int, float] | None]:
        """(clock, first weight) of each row; None where nobody stepped it."""
        (reply,) = self.send(encode_request(Request(DIM, 0, fetches=[(0, key) for key in keys])))
        return [None if row is None else (row[0], row[1][0]) for row in decode_reply(reply).fetched]


MakeGroup = Callable[[str, int], list[Rank]]


@pytest.fixture
def group() -> Iterator[MakeGroup]:
    """``group(address, ranks)``: the ranks of a new group."""
    made: list[Rank] = []

    def make(address: str, ranks: int) -> list[Rank]:
        number = 1000 + len(made) + int(time.monotonic_ns())
        new = [Rank(address, i, ranks, number) for i in range(ranks)]
        new[0].open(SGD)
        made.extend(new)
        return new

    yield make
    for rank in made:
        rank.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


def waiting(future: Future[Reply]) -> bool:
    """Not answered, and given the time to be."""
    time.sleep(0.3)
    return not future.done()


def again(step: Callable[..., Reply], *arguments: Any) -> Reply:
    """Repeat a request until it is answered, as clients do."""
    give_up = time.monotonic() + 30
    while True:
        try:
            return step(*arguments)
        except (fl.FlightTimedOutError, *PASSING):
            assert time.monotonic() < give_up
            time.sleep(0.05)


# Two rows of two weights and one optimizer value, of rank 1 of 3, in round 9.
GOLDEN = bytes.fromhex(
    "48455451d61fd23ff27a5bf4020000000200000001000000020000000000000001000000010000000000000000000000"
    "060000000000000007000000000000000800000000000000050000000000000078000000000000006000000000000000"
    "88776655443322110900000000000000010000000300000000000000d0070000"  # group, number, rank, ranks, more, wait
    "0000003f0000803e0000003e0000403f00000040000080400000004100000000"  # learning rate and settings
    "00000000000000000000000000000000"  # tables: 0, 0 in no bits
    "fdffffffffffffff0600000000000000c00a000000000000"  # keys: -3 + (0, 43) in 6 bits
    "0000003f000080bf0000000000000040"  # gradients
    "00000000000000000000000000000000"  # check tables, keys, clocks, staleness
    "00000000000000000000000000000000"
    "00000000000000000000000000000000"
    "00000000000000000000000000000000"
    "00000000000000000000000000000000"  # fetch tables, keys
    "28000000000000000000000000000000"
)
MEANING = Request(
    dim=2,
    state_dim=1,
    worker=7,
    session=8,
    sequence=5,
    generation=6,
    pushes=[(0, -3), (0, 40)],  # type: ignore[list-item]
    deltas=[[0.5, -1.0], [0.0, 2.0]],
    fetches=[(0, 40)],
    round=Round(0x1122334455667788, 9, 1, 3, 0, 2000, (0.5, 0.25, 0.125, 0.75, 2.0, 4.0, 8.0)),
)


def test_golden_share() -> None:
    assert encode_request(MEANING) == GOLDEN
    assert decode_request(GOLDEN) == MEANING
    nothing = np.empty(0, np.int64)
    native = _table.encode_share(
        worker=7, session=8, sequence=5, generation=6, dim=2, state_dim=1, push_codec=0, fetch_codec=0,
        group=0x1122334455667788, number=9, rank=1, ranks=3, more=False, wait_ms=2000,
        step=np.array(MEANING.round.step, np.float32),  # type: ignore[union-attr]
        push_tables=np.zeros(2, np.int32), push_keys=np.array([-3, 40]), gradients=np.array(MEANING.deltas, np.float32),
        check_tables=np.empty(0, np.int32), check_keys=nothing, check_clocks=nothing, check_staleness=nothing,
        fetch_tables=np.zeros(1, np.int32), fetch_keys=np.array([40]),
    )  # fmt: skip
    assert bytes(native) == GOLDEN
    read = _table.parse_request(np.frombuffer(GOLDEN, np.uint8), 10).round
    assert (read.group, read.number, read.rank, read.ranks, read.more, read.wait_ms) == (
        0x1122334455667788, 9, 1, 3, 0, 2000,
    )  # fmt: skip
    assert read.step.tolist() == [0.5, 0.25, 0.125, 0.75, 2.0, 4.0, 8.0]


@pytest.mark.parametrize(
    ("false", "message"),
    [
        ({"number": 0}, "numbered from 1"),
        ({"rank": 3}, "rank 3 of 3 is none"),
        ({"ranks": 0}, "is none"),
        ({"ranks": 65_537}, "there may be 65536"),
        ({"more": 2}, "2 frames follow"),
        ({"step": (-1.0, *[0.0] * 6)}, "learning rate or setting is -1"),
        ({"step": (float("nan"), *[0.0] * 6)}, "learning rate or setting is"),
        ({"step": (0.1, 0.0, 1.0, *[0.0] * 4)}, "beta is 1"),
    ],
    ids=str,
)
def test_shares_that_make_no_sense(false: dict[str, object], message: str) -> None:
    assert MEANING.round is not None
    frame = encode_request(replace(MEANING, round=replace(MEANING.round, **false)))  # type: ignore[arg-type]
    with pytest.raises(_table.WireError, match=message):
        _table.parse_request(np.frombuffer(frame, np.uint8), 10)
    kind = np.frombuffer(encode_request(MEANING, kind=2), np.uint8)
    with pytest.raises(_table.WireError, match="unknown kind 2"):
        _table.parse_request(kind, 10)


def test_a_round_waits_for_all_and_is_one_step(standing: Program, group: MakeGroup, pool: ThreadPoolExecutor) -> None:
    """Sums over ranks and within a share, clocks count ranks; nobody is answered before the last share; an empty share
    is one."""
    first, second, third = group(standing.address, 3)
    a = pool.submit(first.step, 1, [(1, 2.0), (2, 4.0), (1, 6.0)], [1, 2, 3, 9])
    b = pool.submit(second.step, 1, [], [3])
    assert waiting(a)
    assert waiting(b)
    assert third.weights([1, 2, 3]) == [None] * 3
    c = third.step(1, [(3, 8.0), (2, 2.0)], [2])
    assert a.result(10).fetched == [(1, [-4.0] * DIM), (2, [-3.0] * DIM), (1, [-4.0] * DIM), None]
    assert b.result(10).fetched == [(1, [-4.0] * DIM)]
    assert c.fetched == [(2, [-3.0] * DIM)]


def test_a_round_is_applied_once(standing: Program, group: MakeGroup, pool: ThreadPoolExecutor) -> None:
    first, second = group(standing.address, 2)
    tries = [pool.submit(first.step, 1, [(11, 2.0)], [11]) for _ in range(3)]  # the first replies were lost
    assert all(waiting(each) for each in tries)
    second.step(1, [(11, 4.0)])
    for each in tries:
        assert each.result(10).fetched == [(2, [-3.0] * DIM)]
    for rank in (first, second):  # so was that of the applied round
        assert rank.step(1, [(11, 100.0)], [11]).fetched == [(2, [-3.0] * DIM)]
    assert first.weights([11]) == [(2, -3.0)]


def test_a_rank_that_does_not_come_is_named(standing: Program, group: MakeGroup, pool: ThreadPoolExecutor) -> None:
    """Whoever waits is not missing, nor who gave up waiting."""
    first, second, third, fourth = group(standing.address, 4)
    with pytest.raises(fl.FlightTimedOutError, match=r"round 1 of 4 ranks waits for ranks 0, 1, 3\. Detail") as error:
        third.step(1, [(21, 1.0)], wait_ms=100)
    assert error.value.extra_info == b"round"
    waits = pool.submit(first.step, 1, [(21, 1.0)], wait_ms=5000)
    assert waiting(waits)
    for rank, missing in ((second, "rank 3"), (fourth, "ranks 1, 2")):  # the others have come, and one of them is there
        with pytest.raises(fl.FlightTimedOutError, match=rf"round 1 of 4 ranks waits for {missing}\. Detail"):
            rank.step(1, [(21, 1.0)], wait_ms=100)
    with pytest.raises(fl.FlightTimedOutError, match=r"waits for ranks 1, 2, 3\. Detail"):
        waits.result(10)
    assert first.weights([21]) == [None]


def test_a_share_that_was_given_up_does_not_count(
    standing: Program, group: MakeGroup, pool: ThreadPoolExecutor
) -> None:
    first, second = group(standing.address, 2)
    with pytest.raises(fl.FlightTimedOutError):
        first.step(1, [(31, 1.0)], wait_ms=100)
    later = pool.submit(second.step, 1, [(31, 2.0)])
    assert waiting(later)
    first.step(1, [(31, 4.0)])
    later.result(10)
    assert first.weights([31]) == [(2, -3.0)]


def test_ranks_that_do_not_agree_are_refused(standing: Program, group: MakeGroup, pool: ThreadPoolExecutor) -> None:
    first, second = group(standing.address, 2)
    waits = pool.submit(first.step, 1, [(41, 1.0)])
    assert waiting(waits)
    with pytest.raises(pa.ArrowInvalid, match=r"round 1 with learning rate 0.25 .* with learning rate 0.5"):
        second.step(1, [], step=(0.25, *[0.0] * 6))
    with pytest.raises(pa.ArrowInvalid, match=r"rank 1 of 3 steps round 1 .* another one of 2"):
        second.step(1, [], ranks=3)
    with pytest.raises(pa.ArrowInvalid, match=r"round 3 .* came after round 0"):
        second.step(3, [])
    with pytest.raises(pa.ArrowInvalid, match="table id 7 was not opened"):
        second.send(encode_request(Request(DIM, 0, pushes=[(7, 1)], deltas=[[1.0] * DIM], round=second.round)))  # type: ignore[list-item]
    second.step(1, [(41, 1.0)])
    waits.result(10)
    assert first.weights([41]) == [(2, -1.0)]


def test_a_share_in_several_frames(standing: Program, group: MakeGroup, pool: ThreadPoolExecutor) -> None:
    first, second = group(standing.address, 2)
    parts = [first.frame_of(1, [(51 + i, 2.0), (51, 2.0)], more=1) for i in range(3)]
    first.send(*parts)  # and then it died
    second_waits = pool.submit(second.step, 1, [(51, 2.0)])
    assert waiting(second_waits)
    with pytest.raises(pa.ArrowInvalid, match="of different rounds"):
        first.send(parts[0], first.frame_of(2, []))
    with pytest.raises(pa.ArrowInvalid, match="with the last frame"):
        first.send(first.frame_of(1, [], [51], more=1))
    *early, last = first.send(*parts, first.frame_of(1, [], [51, 53]))
    assert all(decode_reply(reply).fetched == [] for reply in early)
    assert decode_reply(last).fetched == [(2, [-5.0] * DIM), (1, [-1.0] * DIM)]
    second_waits.result(10)


def test_what_a_log_holds_of_a_round(
    program: Callable[..., Program], group: MakeGroup, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """Killed while a rank waits, and after a round: ranks that repeat what was not answered go on exactly."""
    options = ("--data", str(tmp_path), "--durability", "log")
    server = program(*options)
    first, second = group(server.address, 2)

    def restart() -> None:
        nonlocal server
        server.stop(signal.SIGKILL)
        server = program(*options, listen=server.address)

    waits = pool.submit(first.step, 1, [(1, 2.0)])
    assert waiting(waits)
    restart()
    with pytest.raises(PASSING):
        waits.result(10)
    waits = pool.submit(again, first.step, 1, [(1, 2.0)], [1])
    assert again(second.step, 1, [(1, 4.0)], [1]).fetched == waits.result(10).fetched == [(2, [-3.0] * DIM)]
    restart()
    assert again(first.step, 1, [(1, 2.0)], [1]).fetched == [(2, [-3.0] * DIM)]  # its reply was lost: not again
    waits = pool.submit(first.step, 2, [(1, 2.0)])
    again(second.step, 2, [])
    waits.result(10)
    assert first.weights([1]) == [(3, -4.0)]


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_any_moment_rounds_are_whole(
    program: Callable[..., Program], group: MakeGroup, pool: ThreadPoolExecutor, tmp_path: Path, seed: int
) -> None:
    """Compaction is made to run all the time, so that kills and rounds meet it."""
    options = ("--data", str(tmp_path), "--durability", "log", "--compact-bytes", "20000")
    server = program(*options)
    ranks, rounds, keys = group(server.address, 3), 200, range(40)
    done = threading.Event()

    def run(rank: Rank) -> None:
        noise = np.random.default_rng(rank.round.rank)
        for number in range(1, rounds + 1):
            some = noise.choice(len(keys), 10, replace=False).tolist()
            again(rank.step, number, [(key, 2.0) for key in some], some[:3])

    running = [pool.submit(run, rank) for rank in ranks]
    chance = np.random.default_rng(seed)
    for _ in range(4):
        done.wait(chance.uniform(0.05, 0.4))
        server.stop(signal.SIGKILL)
        server = program(*options, listen=server.address)
    for future in running:
        future.result(60)
    expected = np.zeros(len(keys))
    clocks = np.zeros(len(keys), int)
    for rank in range(3):
        noise = np.random.default_rng(rank)
        for _ in range(rounds):
            some = noise.choice(len(keys), 10, replace=False)
            expected[some] -= 2.0 * LR
            clocks[some] += 1
    assert ranks[0].weights(keys) == list(zip(clocks.tolist(), expected.tolist(), strict=True))
    assert list(tmp_path.glob("base-*"))  # it was compacted


def test_a_clean_stop_keeps_the_count_and_drops_what_waits(
    program: Callable[..., Program], group: MakeGroup, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    options = ("--data", str(tmp_path), "--snapshot-on-exit")
    server = program(*options)
    first, second = group(server.address, 2)
    waits = pool.submit(first.step, 1, [(1, 2.0)])
    second.step(1, [])
    waits.result(10)
    waits = pool.submit(first.step, 2, [(1, 2.0)])
    assert waiting(waits)
    assert server.stop() == 0  # without waiting for the round
    with pytest.raises((fl.FlightTimedOutError, *PASSING)):
        waits.result(10)
    program(*options, listen=server.address)
    assert again(first.step, 1, [(1, 2.0)], [1]).fetched == [(1, [-1.0] * DIM)]
    waits = pool.submit(first.step, 2, [(1, 2.0)])
    again(second.step, 2, [])
    waits.result(10)
    assert first.weights([1]) == [(2, -2.0)]


def test_a_restore_goes_on_with_the_next_round(
    program: Callable[..., Program], group: MakeGroup, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """A snapshot in the middle of a round holds nothing of it."""
    server = program()
    (alone,) = group(server.address, 1)
    alone.step(1, [(1, 2.0)])
    first, second = group(server.address, 2)
    waits = pool.submit(first.step, 1, [(1, 2.0)])
    assert waiting(waits)
    store = RemoteStore([server.address])
    store.snapshot(tmp_path / "snapshot")
    second.step(1, [(1, 2.0)])
    waits.result(10)
    alone.step(2, [(1, 2.0)])
    assert alone.weights([1]) == [(4, -4.0)]
    store.restore(tmp_path / "snapshot")
    assert alone.weights([1]) == [(1, -1.0)]
    alone.step(3, [(1, 2.0)])
    assert alone.weights([1]) == [(2, -2.0)]
    store.close()
