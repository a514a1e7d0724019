"""The remote store: tables on one or more ``hetrec-ps`` shards, one round trip per shard and step (``PROTOCOL.md``)."""

from __future__ import annotations

import json
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl

from cache_backend import _table
from cache_backend._table import BUCKETS
from cache_backend.flight import PROTOCOL_VERSION
from cache_backend.groups import Format, tables_by_format
from cache_backend.row_batches import batch_of_rows, rows_of_batch
from cache_backend.snapshot import new_snapshot, write_manifest
from cache_backend.store import (
    Check,
    ExchangeReply,
    ExchangeRequest,
    Fetch,
    Push,
    StoredRows,
    StoreError,
    StoreStats,
    TableSchema,
)
from cache_backend.stored import bucket_range
from cache_backend.stores.pieces import Answer, Piece, Pieces
from cache_backend.stores.residuals import Residuals
from cache_backend.stores.stream import ExchangeStream

__all__ = ["RemoteStore", "RowCodec"]

RowCodec = Literal["fp32", "fp16", "bf16", "int8"]
CODECS = {"fp32": 0, "fp16": 1, "bf16": 2, "int8": 3}
T = TypeVar("T")

# Rows whose rounding errors are kept; with more of them all are sent exactly.
_MOST_RESIDUALS = 1_000_000

# What a network or a restarting server causes; anything else would only fail again.
_TRANSIENT = (fl.FlightUnavailableError, fl.FlightTimedOutError, fl.FlightCancelledError, fl.FlightInternalError)
_ROWS_AT_A_TIME = 1 << 16  # rows that are exported or assigned
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0


class RemoteStore:
    """Tables on parameter servers. Nothing connects before the first call.

    Args:
        addresses: one per shard, in the order of the shards: ``grpc://host:port``, or ``grpc+tls://host:port``.
        push_codec: how pending deltas travel: ``fp32``, ``fp16``, ``bf16``, or ``int8`` with a scale a row. What a
            lossy codec rounds off is kept and sent with the row's next push. Gradients of synchronous steps travel as
            ``fp32``.
        fetch_codec: how rows travel back. Evaluation always reads ``fp32``.
        timeout_s: how long one call may take.
        retry_s: how long a shard that does not answer is tried again before the run ends with an error.
        token_file: a file with the token that the servers ask for.
        tls_ca: certificate authority (PEM) of the servers' certificates.
        tls_cert, tls_key: this client's certificate and key (PEM), where servers ask for one.
        max_message_bytes: larger exchanges are split.

    Raises:
        ValueError: no address or one that is none, an unknown codec, a file that is absent, or half of a certificate.
    """

    exclusive = False

    def __init__(
        self,
        addresses: list[str],
        push_codec: RowCodec = "fp32",
        fetch_codec: RowCodec = "fp32",
        timeout_s: float = 30.0,
        retry_s: float = 60.0,
        token_file: str | None = None,
        tls_ca: str | None = None,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        max_message_bytes: int = 64 << 20,
    ) -> None:
        self._arguments = {name: value for name, value in locals().items() if name != "self"}
        if not addresses:
            raise ValueError("store.addresses is empty; give one address per shard: store.addresses=[grpc://host:7070]")
        for address in addresses:
            if not address.startswith(("grpc://", "grpc+tls://")):
                raise ValueError(f"store.addresses: {address!r} is not grpc://HOST:PORT or grpc+tls://HOST:PORT")
        for what, codec in (("push_codec", push_codec), ("fetch_codec", fetch_codec)):
            if codec not in CODECS:
                raise ValueError(f"unknown store.{what} {codec!r}; available: {', '.join(CODECS)}")
        files = {"token_file": token_file, "tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key}
        for what, file in files.items():
            if file is not None and not Path(file).is_file():
                raise ValueError(f"store.{what}: there is no file {file!r}")
        if (tls_cert is None) != (tls_key is None):
            raise ValueError("store.tls_cert and store.tls_key belong together; give both or none")
        if max_message_bytes < 1 << 12:
            raise ValueError(f"store.max_message_bytes must be at least 4096, got {max_message_bytes}")
        self._codecs = CODECS[push_codec], CODECS[fetch_codec]
        self._max_message_bytes = max_message_bytes
        connection = _Connection(timeout_s, retry_s, token_file, tls_ca, tls_cert, tls_key)
        # Sessions tell servers which requests they have seen: random, so that no two clients share one.
        worker, session = secrets.randbits(63), secrets.randbits(63)
        self._shards = [
            _Shard(i, len(addresses), address, connection, worker, session, CODECS[push_codec])
            for i, address in enumerate(addresses)
        ]
        self._pool = ThreadPoolExecutor(len(addresses), thread_name_prefix="hetrec-shard")
        self._unsent: list[ExchangeRequest] = []  # kept rounding errors on their way

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process is another client: it gets the settings, and a session of its own.
        return partial(RemoteStore, **self._arguments), ()

    def open(self, schemas: Sequence[TableSchema]) -> list[int]:
        tables = [asdict(schema) for schema in schemas]
        first, *others = self._shards
        ids: list[int] = first.action("open", {"tables": tables, "ids": None})["ids"]
        for shard in others:  # the first shard numbers the tables, the others follow
            shard.action("open", {"tables": tables, "ids": ids})
        return ids

    def schemas(self) -> list[TableSchema]:
        # By id; a number that no table has would be a gap, which the servers never leave.
        found = sorted(self._shards[0].action("schemas", {}), key=lambda table: table["id"])
        return [TableSchema(**{k: v for k, v in table.items() if k != "id"}) for table in found]

    def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        reply = self._exchange(request, *self._codecs)
        if sum(len(shard.residuals) for shard in self._shards) > _MOST_RESIDUALS:
            self.flush()
        return reply

    def read(self, dim: int, state_dim: int, rows: Fetch) -> tuple[np.ndarray, np.ndarray]:
        request = ExchangeRequest(dim, state_dim, Push.nothing(dim + state_dim), Check(), rows)
        reply = self._exchange(request, CODECS["fp32"], CODECS["fp32"], counted=False)
        return reply.rows, reply.fresh

    def flush(self) -> None:
        for shard in self._shards:
            self._unsent += shard.residuals.drain()
        while self._unsent:  # should one fail, it stays, to be sent again
            self._exchange(self._unsent[0], CODECS["fp32"], CODECS["fp32"])
            del self._unsent[0]

    def snapshot(self, path: Path) -> None:
        """The servers write the files, so ``path`` must be a folder that they and this process share."""
        self.flush()
        n = len(self._shards)
        with new_snapshot(Path(path).absolute()) as folder:
            files: dict[str, Any] = {}
            replies = self._on_every_shard(
                lambda shard: shard.action(
                    "snapshot", {"folder": str(folder), "prefix": f"shard-{shard.number:05d}-of-{n:05d}"}, patient=True
                )
            )
            for shard, reply in zip(self._shards, replies, strict=True):
                files.update(reply["files"])
                absent = [name for name in reply["files"] if not (folder / name).exists()]
                if absent:
                    raise StoreError(
                        f"{shard.address} wrote {', '.join(absent)} to a {folder} that is not this host's: "
                        "snapshots need a folder that servers and trainer share (a network file system)"
                    )
            write_manifest(folder, self.schemas(), files)

    def restore(self, path: Path) -> None:
        self._unsent.clear()
        for shard in self._shards:
            shard.residuals.clear()
        self._on_every_shard(
            lambda shard: shard.action("restore", {"folder": str(Path(path).absolute())}, patient=True)
        )

    def export(self, tables: Sequence[int], part: int = 0, parts: int = 1) -> Iterator[StoredRows]:
        by_format = self._by_format(tables)
        bucket_range(part, parts)
        held = self.stats().rows
        return (
            rows
            for row_format, ids in by_format.items()
            for call in _calls(part, parts, held, self._rows_at_a_time(*row_format))
            for shard in self._shards_of(*call)
            for rows in shard.export(*row_format, ids, *call)
        )

    def _shards_of(self, part: int, parts: int) -> list[_Shard]:
        first, last = bucket_range(part, parts)
        n = len(self._shards)
        return self._shards[first * n // BUCKETS : (last - 1) * n // BUCKETS + 1]

    def assign(self, rows: StoredRows) -> None:
        rows.check()
        if set(self._by_format(np.unique(rows.tables).tolist())) - {(rows.dim, rows.state_dim)}:
            raise ValueError(
                f"rows of {rows.dim} weights and {rows.state_dim} optimizer values are for tables of others"
            )
        self.flush()  # what lossy pushes rounded off belongs to the rows that were
        most = self._rows_at_a_time(rows.dim, rows.state_dim)
        of = _table.shards(rows.tables, rows.keys, len(self._shards))

        def on_shard(shard: _Shard) -> None:
            mine = np.flatnonzero(of == shard.number)
            for start in range(0, len(mine), most):
                i = mine[start : start + most]
                shard.assign(
                    StoredRows(rows.dim, rows.state_dim, rows.tables[i], rows.keys[i], rows.clocks[i], rows.rows[i])
                )

        self._on_every_shard(on_shard)

    def erase(self, tables: Sequence[int]) -> None:
        self._by_format(tables)
        self.flush()
        self._on_every_shard(lambda shard: shard.erase(list(tables)))

    def _by_format(self, tables: Sequence[int]) -> dict[Format, list[int]]:
        """Refuses a table that there is not before the first of several shards does something."""
        return tables_by_format(dict(enumerate(self.schemas())), tables)

    def _rows_at_a_time(self, dim: int, state_dim: int) -> int:
        return max(1, min(_ROWS_AT_A_TIME, self._max_message_bytes // (4 * (dim + state_dim) + 20)))

    def stats(self) -> StoreStats:
        found = [shard.action("stats", {}) for shard in self._shards]
        return StoreStats(sum(s["rows"] for s in found), sum(s["memory_bytes"] for s in found))

    def close(self) -> None:
        self._pool.shutdown()
        for shard in self._shards:
            shard.close()

    def _on_every_shard(self, call: Callable[[_Shard], T]) -> list[T]:
        if len(self._shards) == 1:
            return [call(self._shards[0])]
        return list(self._pool.map(call, self._shards))

    def _exchange(
        self, request: ExchangeRequest, push_codec: int, fetch_codec: int, counted: bool = True
    ) -> ExchangeReply:
        if request.prepared is None:
            row_bytes = _row_bytes(push_codec, request) + _row_bytes(fetch_codec, request)
            request.prepared = Pieces(request, len(self._shards), row_bytes, self._max_message_bytes)
        pieces: Pieces = request.prepared
        self._on_every_shard(lambda shard: shard.exchange(pieces, push_codec, fetch_codec, counted))
        return pieces.reply()


def _row_bytes(codec: int, request: ExchangeRequest) -> int:
    return _table.encoded_row_bytes(codec, request.dim, request.state_dim)


@dataclass(frozen=True)
class _Connection:
    """How to reach servers."""

    timeout_s: float
    retry_s: float
    token_file: str | None
    tls_ca: str | None
    tls_cert: str | None
    tls_key: str | None

    def client(self, address: str) -> fl.FlightClient:
        options: dict[str, Any] = {}
        if self.tls_ca is not None:
            options["tls_root_certs"] = Path(self.tls_ca).read_bytes()
        if self.tls_cert is not None and self.tls_key is not None:
            options["cert_chain"] = Path(self.tls_cert).read_bytes()
            options["private_key"] = Path(self.tls_key).read_bytes()
        return fl.FlightClient(address, **options)

    def call_options(self, timeout_s: float) -> fl.FlightCallOptions:
        headers = []
        if self.token_file is not None:
            headers.append((b"authorization", b"Bearer " + Path(self.token_file).read_bytes().strip()))
        return fl.FlightCallOptions(timeout=timeout_s, headers=headers)


class _Shard:
    """One server: its connection, the numbers of its requests, retries, what pushes to it rounded off."""

    def __init__(
        self,
        number: int,
        shards: int,
        address: str,
        connection: _Connection,
        worker: int,
        session: int,
        push_codec: int,
    ) -> None:
        self.residuals = Residuals(push_codec)
        self.number = number
        self.address = address
        self._shards = shards
        self._connection = connection
        self._worker, self._session, self._sequence = worker, session, 0
        self._generation = 0
        self._client: fl.FlightClient | None = None
        self._stream: ExchangeStream | None = None
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="hetrec-send")
        self._lock = threading.RLock()  # one request at a time: sequences leave in order

    def exchange(self, pieces: Pieces, push_codec: int, fetch_codec: int, counted: bool) -> None:
        """Send the pieces that were not answered yet, and take their answers."""
        with self._lock:
            for some in pieces.left(self.number):
                self._connected()
                encode = partial(self._encode, pieces, push_codec=push_codec, fetch_codec=fetch_codec, counted=counted)
                self._patiently(partial(self._converse, some, encode, partial(self._take, pieces)))

    def _encode(self, pieces: Pieces, piece: Piece, push_codec: int, fetch_codec: int, counted: bool) -> np.ndarray:
        """The piece's frame. When it is tried again, be it hours later, it keeps its number, by which the server knows
        what was applied, and its bytes, which hold what its rows had rounded off."""
        if piece.frame is not None:
            return piece.frame
        if counted and piece.sequence == 0:
            self._sequence += 1
            piece.sequence = self._sequence
        request = pieces.request
        header: dict[str, Any] = {
            "worker": self._worker,
            "session": self._session,
            "sequence": piece.sequence,
            "generation": self._generation,
            "fetch_codec": fetch_codec,
        }
        if piece.share is not None:
            # The server ends the wait before the call's deadline does, so that it can say which rank it waits for.
            wait_ms = int(1000 * self._connection.timeout_s / 2)
            piece.frame = pieces.encode_share(piece, **header, push_codec=CODECS["fp32"], wait_ms=wait_ms)
            return piece.frame
        lossy = push_codec != CODECS["fp32"] and len(request.push.keys) > 0
        residuals = self.residuals.of(request.dim, request.state_dim) if lossy else None
        piece.frame = pieces.encode(piece, **header, push_codec=push_codec, residuals=residuals)
        return piece.frame

    def _take(self, pieces: Pieces, piece: Piece, reply: np.ndarray) -> None:
        generation, answered, rows, clocks, fresh, lags, stale, stale_rows, stale_clocks = _table.decode_reply(reply)
        if answered != piece.sequence or generation != self._generation:
            raise StoreError(f"{self.address} answered request {answered} instead of {piece.sequence}")
        sent = sum(each.frame.nbytes for each in (*piece.before, piece) if each.frame is not None)
        answer = Answer(rows, clocks, fresh, lags, stale, stale_rows, stale_clocks, sent, reply.nbytes)
        pieces.take(piece, answer)

    def _converse(
        self,
        pieces: list[Piece],
        encode: Callable[[Piece], np.ndarray],
        take: Callable[[Piece, np.ndarray], None],
        client: fl.FlightClient,
        options: fl.FlightCallOptions,
    ) -> None:
        """Send frames and take their replies; of several pieces, both at once."""
        left = [piece for piece in pieces if not piece.answered]
        if self._stream is not None and not self._stream.young:
            self._end_stream()
        if self._stream is None:
            self._stream = ExchangeStream(client, options, self._connection.timeout_s)
        stream = self._stream
        try:
            if len(left) == 1:
                _send(stream, left, encode)
                take(left[0], stream.receive())
                return
            sending = self._sender.submit(_send, stream, left, encode)
            try:
                for piece in left:
                    take(piece, stream.receive())
            except BaseException:
                stream.cancel()  # for the sender
                if (problem := sending.exception()) is not None:
                    raise problem from None
                raise
            sending.result()
        except BaseException:
            stream.cancel()
            self._end_stream()
            raise

    def _end_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def export(self, dim: int, state_dim: int, tables: list[int], part: int, parts: int) -> list[StoredRows]:
        with self._lock:
            self._connected()
            ticket = {"dim": dim, "state_dim": state_dim, "tables": tables, "part": part, "parts": parts}
            batches = self._patiently(partial(_get, ticket=ticket | {"generation": self._generation}))
        return [rows_of_batch(batch, dim, state_dim) for batch in batches]

    def assign(self, rows: StoredRows) -> None:
        """Set rows, few enough for one message."""
        with self._lock:
            self._connected()
            command = {"generation": self._generation, "dim": rows.dim, "state_dim": rows.state_dim, **self._numbered()}
            self._patiently(partial(_put, command=command, batch=batch_of_rows(rows)))

    def erase(self, tables: list[int]) -> None:
        with self._lock:
            self.action("erase", {"tables": tables, **self._numbered()}, patient=True)

    def _numbered(self) -> dict[str, int]:
        self._sequence += 1
        return {"worker": self._worker, "session": self._session, "sequence": self._sequence}

    def action(self, name: str, body: Any, patient: bool = False) -> Any:
        """Call an action. ``patient``: it may take as long as it needs (snapshots)."""
        with self._lock:
            self._connected()
            # Servers refuse it when they have lost their rows: a snapshot of none must not pass for one.
            body = body | {"generation": self._generation}
            return self._patiently(lambda client, options: _action(client, options, name, body), patient)

    def close(self) -> None:
        self._disconnect()
        self._sender.shutdown()

    def _disconnect(self) -> None:
        self._end_stream()
        if self._client is not None:
            self._client.close()
            self._client = None

    def _connected(self) -> None:
        if self._generation == 0:
            self._generation = self._patiently(self._hello)["generation"]

    def _hello(self, client: fl.FlightClient, options: fl.FlightCallOptions) -> dict[str, Any]:
        answer: dict[str, Any] = _action(client, options, "hello", {"protocol": PROTOCOL_VERSION})
        if (answer["shard"], answer["shards"]) != (self.number, self._shards):
            raise StoreError(
                f"{self.address} is shard {answer['shard']}/{answer['shards']}, but stands at place {self.number} of "
                f"{self._shards} in store.addresses: list every shard once, in order"
            )
        return answer

    def _patiently(self, call: Callable[[fl.FlightClient, fl.FlightCallOptions], T], no_deadline: bool = False) -> T:
        """Run a call, again after failures that pass, with growing pauses, until ``retry_s`` is over."""
        give_up = time.monotonic() + self._connection.retry_s
        for pause in _pauses():
            try:
                if self._client is None:
                    self._client = self._connection.client(self.address)
                timeout = 24 * 3600.0 if no_deadline else self._connection.timeout_s
                return call(self._client, self._connection.call_options(timeout))
            except _TRANSIENT as error:
                self._disconnect()  # a new connection next time: the address may lead to another process now
                if time.monotonic() + pause > give_up:
                    if error.extra_info == b"round":
                        raise StoreError(
                            f"shard {self.number} at {self.address}: {_first_line(error)}, for "
                            f"{self._connection.retry_s:g} s now: it ended, or takes longer than store.retry_s"
                        ) from error
                    raise StoreError(
                        f"shard {self.number} at {self.address} did not answer for {self._connection.retry_s:g} s: "
                        f"{_first_line(error)}. Start it again, or raise store.retry_s"
                    ) from error
                time.sleep(pause)
            except fl.FlightServerError as error:
                if error.extra_info == b"generation":
                    raise StoreError(
                        f"shard {self.number} at {self.address} lost its rows (it was restarted without them): go on "
                        "from the last checkpoint with ckpt_path=..., and run hetrec-ps with --durability log to "
                        "survive this"
                    ) from error
                raise StoreError(f"shard {self.number} at {self.address}: {_first_line(error)}") from error
            except (fl.FlightUnauthenticatedError, fl.FlightUnauthorizedError) as error:
                raise StoreError(
                    f"shard {self.number} at {self.address} turned this client away: {_first_line(error)}. Check "
                    "store.token_file"
                ) from error
            except (pa.ArrowInvalid, pa.ArrowKeyError) as error:
                raise StoreError(f"shard {self.number} at {self.address}: {_first_line(error)}") from error
        raise AssertionError("the pauses never end")


def _calls(part: int, parts: int, held: int, rows: int) -> Iterator[tuple[int, int]]:
    """A part of the buckets as parts of about so many rows, each for a call that can be repeated; ``held``: rows of all
    buckets."""
    calls = max(1, min(BUCKETS // parts, -(-held // (parts * rows))))
    for i in range(calls):
        yield part * calls + i, parts * calls


def _pauses() -> Iterator[float]:
    pause = _FIRST_PAUSE_S
    while True:
        yield pause * (0.5 + random.random())  # workers that failed together must not come back together
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def _first_line(error: Exception) -> str:
    # Flight and gRPC put words of their own around the server's.
    line = str(error).strip().splitlines()[0].split(". gRPC client debug context")[0]
    return line.split(" error, with message: ")[-1].split(" Detail: ")[0].rstrip(". ")


def _send(stream: ExchangeStream, pieces: list[Piece], encode: Callable[[Piece], np.ndarray]) -> None:
    try:
        for piece in pieces:
            stream.send(encode(piece))
    except (fl.FlightError, pa.ArrowException, OSError):
        pass  # the call has ended; why, its receiver is told
    except BaseException:
        stream.cancel()
        raise


def _get(client: fl.FlightClient, options: fl.FlightCallOptions, ticket: Any) -> list[pa.RecordBatch]:
    return [chunk.data for chunk in client.do_get(fl.Ticket(json.dumps(ticket)), options)]


def _put(client: fl.FlightClient, options: fl.FlightCallOptions, command: Any, batch: pa.RecordBatch) -> None:
    descriptor = fl.FlightDescriptor.for_command(json.dumps(command))
    writer, _ = client.do_put(descriptor, batch.schema, options)
    with writer:  # closing it waits for the server's answer
        writer.write_batch(batch)


def _action(client: fl.FlightClient, options: fl.FlightCallOptions, name: str, body: Any) -> Any:
    results = list(client.do_action(fl.Action(name, json.dumps(body).encode()), options))
    return json.loads(results[0].body.to_pybytes())
