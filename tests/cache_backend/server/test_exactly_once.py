"""Every push is applied exactly once, whatever the network repeats, reorders or runs at once."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
from frames import decode_reply
from running import Peer, Program


@pytest.fixture
def client(standing: Program, peer: Callable[..., Peer]) -> Peer:
    client = peer(standing.address, worker=random.getrandbits(60))
    client.open()
    return client


def fresh_keys(n: int) -> list[int]:
    start = random.getrandbits(60)
    return list(range(start, start + n))


def test_a_repeated_push_is_answered_and_not_applied(client: Peer) -> None:
    keys = fresh_keys(3)
    frame = client.frame(push=keys, check=keys, fetch=keys, sequence=1)
    first = decode_reply(client.send(frame)[0])
    again = decode_reply(client.send(frame)[0])
    assert [row for _, row in first.fetched] == [[1.0, 1.0, 1.0, 1.0]] * 3
    assert again.fetched == first.fetched
    assert again.stale == first.stale
    assert len(again.stale) == 3


def test_a_repeated_request_is_answered_with_what_holds_now(standing: Program, client: Peer, peer) -> None:
    keys = fresh_keys(2)
    frame = client.frame(push=keys, fetch=keys, sequence=1)
    client.send(frame)
    other = peer(standing.address, worker=random.getrandbits(60))
    other.push(keys, delta=10.0)
    assert [row[0] for _, row in decode_reply(client.send(frame)[0]).fetched] == [11.0, 11.0]


def test_frames_of_one_stream_are_answered_in_order(client: Peer) -> None:
    keys = fresh_keys(1)
    frames = [client.frame(push=keys, fetch=keys, sequence=s) for s in (1, 2, 2, 3, 1)]
    assert [decode_reply(r).fetched[0][1][0] for r in client.send(*frames)] == [1.0, 2.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize("seed", range(3))
def test_reordered_and_repeated(client: Peer, seed: int) -> None:
    shuffle = random.Random(seed)
    keys = fresh_keys(4)
    # Each number moves by less than the window, and half of them come twice.
    order = sorted(range(1, 201), key=lambda s: s + shuffle.random() * 25)
    sent = []
    for sequence in order:
        sent.append(sequence)
        if shuffle.random() < 0.5:
            sent.append(shuffle.choice(sent[-20:]))
    client.send(*(client.frame(push=keys, sequence=s) for s in sent))
    assert client.read(keys) == [200.0] * 4


def test_what_is_too_old_to_know_is_refused(client: Peer) -> None:
    keys = fresh_keys(1)
    client.send(client.frame(push=keys, sequence=100))
    client.send(client.frame(push=keys, sequence=36))  # the oldest that is known
    with pytest.raises(pa.ArrowInvalid, match=r"request 35 .* is older than the 64"):
        client.send(client.frame(push=keys, sequence=35))
    assert client.read(keys) == [2.0]


def test_a_push_without_a_number_is_refused(client: Peer) -> None:
    keys = fresh_keys(1)
    with pytest.raises(pa.ArrowInvalid, match="sequence number"):
        client.send(client.frame(push=keys, sequence=0))
    assert client.read(keys) == [0.0]


def test_a_refused_request_can_be_corrected_under_its_number(client: Peer) -> None:
    """Nothing of a request that names an unknown table is applied, not even its valid pushes."""
    keys = fresh_keys(1)
    pushing, asking = client.frame(push=keys, sequence=1), client.frame(fetch=keys, table=9)
    for frame in (client.frame(push=keys, sequence=1, table=9), asking):
        with pytest.raises(pa.ArrowInvalid, match="was not opened"):
            client.send(frame)
    assert client.read(keys) == [0.0]
    client.send(pushing)
    assert client.read(keys) == [1.0]


def test_reading_changes_nothing(client: Peer) -> None:
    keys = fresh_keys(5)
    rows = client.act("stats")["rows"]
    assert client.read(keys) == [0.0] * 5
    stats = client.act("stats")
    assert stats["rows"] == rows


def test_the_same_request_from_many_threads_at_once(standing: Program, client: Peer) -> None:
    """A client whose deadline was too short repeats while its first attempt is still being served."""
    keys = fresh_keys(500)
    peers = [Peer(standing.address, worker=client.worker) for _ in range(6)]
    barrier = threading.Barrier(6)

    def repeat(which: Peer) -> None:
        for sequence in range(1, 21):
            barrier.wait()
            which.send(which.frame(push=keys, sequence=sequence))

    run_all([lambda p=p: repeat(p) for p in peers])
    assert client.read(keys) == [20.0] * 500


def test_several_workers_at_once_each_with_repeats(standing: Program, client: Peer) -> None:
    shared, workers, steps = fresh_keys(200), 5, 40

    def work(number: int) -> None:
        chance = random.Random(number)
        peer = Peer(standing.address, worker=client.worker + 1 + number)
        for sequence in range(1, steps + 1):
            frame = peer.frame(push=shared, delta=float(2**number), sequence=sequence)
            for _ in range(1 + chance.randrange(3)):
                peer.send(frame)
        peer.close()

    run_all([lambda n=n: work(n) for n in range(workers)])
    expected = steps * float(2**workers - 1)  # whole numbers: exact in any order
    assert np.array_equal(client.read(shared), [expected] * 200)


def run_all(work: list[Callable[[], None]]) -> None:
    failures: list[BaseException] = []

    def guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(call,)) for call in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
