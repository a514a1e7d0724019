"""A real ``hetrec-ps`` in a process of its own, and a client that says exactly what it is told to."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl
from frames import Reply, decode_reply

from cache_backend._table import encode_request
from cache_backend.flight import EXCHANGE, FRAME_SCHEMA, batch_of, frame_of

DIM, STATE = 3, 1
TABLE = {
    "name": "t", "dim": DIM, "optimizer": "rowwise_adagrad", "seed": 5, "init_low": 0.0, "init_high": 0.0,
    "init_state": 0.0,
}  # fmt: skip


class Program:
    """The server process; without ``address`` it did not serve but ended. ``within``: a command that runs it."""

    def __init__(self, *options: str, listen: str = "grpc://127.0.0.1:0", within: Sequence[str] = ()) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        command = [sys.executable, "-m", "cache_backend.server", "--listen", listen, "--exit-with-stdin", *options]
        self.process = subprocess.Popen(
            [*within, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self.lines: list[str] = []
        self.address = ""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not self.address:
            if not select.select([self.process.stdout], [], [], 0.2)[0]:
                continue
            line = self.process.stdout.readline().decode()
            if not line:
                self.process.wait(10)
                return
            self.lines.append(line.rstrip("\n"))
            if " serving on " in line:
                self.address = line.split()[-1]

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode()

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Signal it and wait; the exit status."""
        self.process.send_signal(how)
        return self.process.wait(30)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        self.process.stdin.close()
        self.process.stdout.close()
        self._errors.close()


class Peer:
    """One client process as the server sees it: a worker and a session. Numbers its pushes unless told otherwise."""

    def __init__(self, address: str, worker: int = 1, session: int = 1, token: str | None = None, **tls: Any) -> None:
        headers = [] if token is None else [(b"authorization", token.encode())]
        self.options = fl.FlightCallOptions(timeout=20, headers=headers)
        self.client = fl.FlightClient(address, **tls)
        self.worker, self.session = worker, session
        self.sequence = 0

    def close(self) -> None:
        self.client.close()

    def act(self, action: str, **body: Any) -> Any:
        (result,) = self.client.do_action(fl.Action(action, json.dumps(body).encode()), self.options)
        return json.loads(result.body.to_pybytes())

    def open(self, *tables: dict[str, Any]) -> list[int]:
        return self.act("open", tables=list(tables) or [TABLE], ids=None)["ids"]

    def send(self, *frames: bytes | np.ndarray) -> list[bytes]:
        """Frames in one stream, one after the other; their replies."""
        writer, reader = self.client.do_exchange(EXCHANGE, self.options)
        replies = []
        with writer:
            writer.begin(FRAME_SCHEMA)
            for frame in frames:
                writer.write_batch(batch_of(np.frombuffer(frame, np.uint8)))
                replies.append(bytes(frame_of(reader.read_chunk().data)))
            writer.done_writing()
        return replies

    def send_batch(self, batch: pa.RecordBatch) -> None:
        writer, reader = self.client.do_exchange(EXCHANGE, self.options)
        with writer:
            writer.begin(batch.schema)
            writer.write_batch(batch)
            writer.done_writing()
            reader.read_chunk()

    def frame(
        self,
        push: Sequence[int] = (),
        check: Sequence[int] = (),
        fetch: Sequence[int] = (),
        delta: float | np.ndarray = 1.0,
        sequence: int = 0,
        generation: int = 0,
        table: int = 0,
        clock: int = 1,
        staleness: int = 0,
    ) -> np.ndarray:
        """A request of the table's format; every push is of one update, every check has clock 0."""
        push_keys, check_keys, fetch_keys = (np.asarray(keys, np.int64) for keys in (push, check, fetch))
        tables = [np.full(len(keys), table, np.int32) for keys in (push_keys, check_keys, fetch_keys)]
        return encode_request(
            worker=self.worker,
            session=self.session,
            sequence=sequence,
            generation=generation,
            dim=DIM,
            state_dim=STATE,
            push_codec=0,
            fetch_codec=0,
            push_tables=tables[0],
            push_keys=push_keys,
            push_starts=np.full(len(push_keys), clock - 1, np.int64),
            push_clocks=np.full(len(push_keys), clock, np.int64),
            deltas=np.array(np.broadcast_to(delta, (len(push_keys), DIM + STATE)), np.float32),
            check_tables=tables[1],
            check_keys=check_keys,
            check_clocks=np.zeros(len(check_keys), np.int64),
            check_staleness=np.full(len(check_keys), staleness, np.int64),
            fetch_tables=tables[2],
            fetch_keys=fetch_keys,
        )

    def push(self, keys: Sequence[int], delta: float | np.ndarray = 1.0, sequence: int | None = None) -> Reply:
        if sequence is None:
            self.sequence += 1
            sequence = self.sequence
        (reply,) = self.send(self.frame(push=keys, delta=delta, sequence=sequence))
        return decode_reply(reply)

    def read(self, keys: Sequence[int]) -> list[float]:
        """First weight of each row; 0 where nobody wrote it (that is where the tests' tables begin)."""
        (reply,) = self.send(self.frame(fetch=keys))
        return [0.0 if row is None else row[1][0] for row in decode_reply(reply).fetched]
