"""The Flight service: what travels, and as which error. What it means is in ``shard.py``."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl

from cache_backend.flight import EXCHANGE, FRAME_SCHEMA, PROTOCOL_VERSION, batch_of, frame_of
from cache_backend.rounds import RoundIncomplete
from cache_backend.row_batches import batch_of_rows, rows_of_batch, rows_schema
from cache_backend.server.errors import LogFailed, Unavailable, WrongGeneration
from cache_backend.server.limits import Streams
from cache_backend.server.metrics import Metrics
from cache_backend.server.options import Options
from cache_backend.server.security import tls_arguments, token_middleware
from cache_backend.server.shard import Shard, SharePart
from cache_backend.store import StoredRows, TableSchema

__all__ = ["Service"]

_MAX_DIM = 1 << 20
_ACTIONS = {
    "hello": "Names the protocol; answers which shard this is",
    "open": "Declares tables; answers their ids",
    "schemas": "All tables",
    "stats": "Rows and memory held",
    "health": "Whether the server is serving",
    "snapshot": "Writes this shard's part of a snapshot into a folder",
    "restore": "Replaces all rows by this shard's part of a snapshot",
    "erase": "Forgets every row of tables",
}


class Service(fl.FlightServerBase):
    """Serves one shard from the moment it is made."""

    def __init__(self, options: Options, shard: Shard, streams: Streams, metrics: Metrics, release: str) -> None:
        self._shard = shard
        self._streams = streams
        self._metrics = metrics
        self._release = release
        self._max_message_bytes = options.max_message_bytes
        super().__init__(options.listen, middleware=token_middleware(options, metrics), **tls_arguments(options))

    def do_exchange(
        self,
        context: fl.ServerCallContext,
        descriptor: fl.FlightDescriptor,
        reader: fl.MetadataRecordBatchReader,
        writer: fl.MetadataRecordBatchWriter,
    ) -> None:
        with self._reported(), self._streams.call(context.peer()):
            if descriptor.command != EXCHANGE.command:
                raise ValueError(f"unknown exchange {descriptor.command!r}; there is {EXCHANGE.command!r}")
            begun = False
            parts: list[SharePart] = []
            for chunk in reader:
                start = time.perf_counter()
                frame = self._frame(chunk.data)
                with self._streams.work():
                    done = self._shard.exchange(frame, parts)
                    if not begun:
                        writer.begin(FRAME_SCHEMA)
                        begun = True
                    _write(writer, batch_of(done.reply))
                self._metrics.exchanged(done, frame.nbytes, time.perf_counter() - start)

    def do_get(self, context: fl.ServerCallContext, ticket: fl.Ticket) -> fl.FlightDataStream:
        with self._reported():
            self._metrics.request("export")
            wanted = self._arguments(ticket.ticket)
            rows = self._shard.export(**wanted)
            return fl.GeneratorStream(
                rows_schema(wanted["dim"] + wanted["state_dim"]), self._exported(context.peer(), rows)
            )

    def _exported(self, peer: str, rows: Iterator[StoredRows]) -> Iterator[pa.RecordBatch]:
        with self._reported(), self._streams.call(peer):
            while True:
                with self._streams.work():
                    piece = next(rows, None)
                if piece is None:
                    return
                yield batch_of_rows(piece)

    def do_put(
        self,
        context: fl.ServerCallContext,
        descriptor: fl.FlightDescriptor,
        reader: fl.MetadataRecordBatchReader,
        writer: fl.FlightMetadataWriter,
    ) -> None:
        with self._reported(), self._streams.call(context.peer()):
            self._metrics.request("assign")
            if descriptor.command is None:
                raise ValueError("rows come with a command that says of which format, not with a path")
            given = self._arguments(descriptor.command)
            dim, state_dim, first = given.pop("dim"), given.pop("state_dim"), given.pop("sequence")
            for i, chunk in enumerate(reader):
                if chunk.data is None:
                    raise ValueError("a message holds rows, this one holds metadata alone")
                chunk.data.validate(full=True)
                self._check_size(chunk.data.nbytes)
                with self._streams.work():
                    self._shard.assign(rows_of_batch(chunk.data, dim, state_dim), sequence=first + i, **given)

    def _frame(self, batch: pa.RecordBatch | None) -> np.ndarray:
        if batch is None:
            raise ValueError("a message of an exchange holds a frame, this one holds metadata alone")
        batch.validate(full=True)  # offsets are as trustworthy as who sent them
        frame = frame_of(batch)
        self._check_size(frame.nbytes)
        return frame

    def _check_size(self, size: int) -> None:
        if size > self._max_message_bytes:
            raise ValueError(
                f"a message of {size} bytes, the limit is {self._max_message_bytes}; split it, or raise "
                f"--max-message-bytes"
            )

    def list_actions(self, context: fl.ServerCallContext) -> list[tuple[str, str]]:
        return list(_ACTIONS.items())

    def do_action(self, context: fl.ServerCallContext, action: fl.Action) -> Iterator[bytes]:
        with self._reported(), self._streams.call(context.peer()):
            if action.type not in _ACTIONS:
                raise ValueError(f"unknown action {action.type!r}; there are {', '.join(_ACTIONS)}")
            self._metrics.request(action.type)
            arguments = self._arguments(action.body.to_pybytes() or b"{}")
            if action.type == "health":
                result = self._health()
            else:
                with self._streams.work():
                    result = getattr(self, f"_{action.type}")(**arguments)
            return iter([json.dumps(result).encode()])

    def _arguments(self, text: bytes) -> dict[str, Any]:
        """What a JSON object says, for a server of the generation it names."""
        self._check_size(len(text))
        arguments = json.loads(text)
        if not isinstance(arguments, dict):
            raise ValueError(f"a call takes a JSON object, got {type(arguments).__name__}")
        self._shard.check_generation(arguments.pop("generation", 0))
        return arguments

    def _health(self) -> dict[str, Any]:
        return {"status": "stopping" if self._streams.stopping else "serving"}

    def _hello(self, protocol: int) -> dict[str, Any]:
        if protocol != PROTOCOL_VERSION:
            raise ValueError(
                f"protocol version {protocol!r}, this server speaks {PROTOCOL_VERSION} (hetrec {self._release}); run "
                f"the same release of hetrec on both sides"
            )
        shard = self._shard
        return {
            "protocol": PROTOCOL_VERSION,
            "shard": shard.index,
            "shards": shard.count,
            "generation": shard.generation,
            "clock": shard.clock,
            "release": self._release,
        }

    def _open(self, tables: list[dict[str, Any]], ids: list[int] | None = None) -> dict[str, Any]:
        return {"ids": self._shard.open([_schema(table) for table in tables], ids)}

    def _schemas(self) -> list[dict[str, Any]]:
        return self._shard.table_schemas()

    def _stats(self) -> dict[str, Any]:
        return self._shard.stats()

    def _snapshot(self, folder: str, prefix: str) -> dict[str, Any]:
        if not prefix or Path(prefix).name != prefix:
            raise ValueError(f"{prefix!r} cannot begin the name of a file")
        return {"files": self._shard.snapshot(Path(folder), prefix)}

    def _restore(self, folder: str) -> dict[str, Any]:
        return {"rows": self._shard.restore(Path(folder))}

    def _erase(self, tables: list[int], worker: int, session: int, sequence: int) -> dict[str, Any]:
        self._shard.erase(tables, worker, session, sequence)
        return {}

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Errors in the kinds that clients tell apart (PROTOCOL.md)."""
        try:
            yield
        except LogFailed as error:
            self._metrics.error("log")
            raise fl.FlightUnavailableError(str(error)) from None
        except Unavailable as error:
            self._metrics.error("unavailable")
            raise fl.FlightUnavailableError(str(error)) from None
        except RoundIncomplete as error:
            self._metrics.error("round")
            raise fl.FlightTimedOutError(str(error), extra_info=b"round") from None
        except WrongGeneration as error:
            self._metrics.error("generation")
            raise fl.FlightServerError(str(error), extra_info=b"generation") from None
        except (ValueError, IndexError, TypeError, KeyError, AttributeError) as error:
            # pa.ArrowInvalid, WireError and SnapshotError are ValueErrors; from TypeError on: a body of another shape.
            self._metrics.error("invalid")
            raise pa.ArrowInvalid(_told(error)) from None
        except OSError as error:
            self._metrics.error("files")
            raise fl.FlightServerError(_told(error)) from None
        except fl.FlightCancelledError:
            self._metrics.error("cancelled")
            raise
        except Exception as error:
            self._metrics.error("internal")
            traceback.print_exc(file=sys.stderr)
            raise fl.FlightServerError(f"{type(error).__name__}: {error}") from None


def _write(writer: fl.MetadataRecordBatchWriter, batch: pa.RecordBatch) -> None:
    try:
        writer.write_batch(batch)
    except fl.FlightInternalError as error:
        raise fl.FlightCancelledError(str(error)) from None  # by a client that did not wait for the answer


def _told(error: Exception) -> str:
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)


def _schema(table: dict[str, Any]) -> TableSchema:
    schema = TableSchema(**table)
    if type(schema.dim) is not int or not 1 <= schema.dim <= _MAX_DIM or schema.state_dim > _MAX_DIM:
        raise ValueError(
            f"table {schema.name!r} has dim {schema.dim!r} with optimizer {schema.optimizer}; weights and optimizer "
            f"values of a row are whole numbers up to {_MAX_DIM}"
        )
    if not isinstance(schema.name, str) or type(schema.seed) is not int or not 0 <= schema.seed < 1 << 64:
        raise ValueError(f"a table needs a name and a seed from 0 to 2^64 - 1, got {schema.name!r} and {schema.seed!r}")
    for number in (schema.init_low, schema.init_high, schema.init_state):
        if type(number) not in (int, float):
            raise ValueError(f"table {schema.name!r}: rows begin with numbers, got {number!r}")
    return schema
