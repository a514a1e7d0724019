"""The command line of ``hetrec-ps``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

__all__ = ["Options", "parse"]


@dataclass(frozen=True)
class Options:
    """How to serve one shard; the help texts below say what each means."""

    shard: int
    shards: int
    listen: str
    host: str
    port: int
    data: Path | None
    durability: str
    compact_bytes: int
    snapshot_on_exit: bool
    clock: str
    metrics_port: int | None
    max_rows: int
    max_message_bytes: int
    max_streams: int
    max_streams_per_client: int
    tls_cert: Path | None
    tls_key: Path | None
    tls_client_ca: Path | None
    token_file: Path | None
    insecure: bool
    exit_with_stdin: bool


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Options of a command line; ends the program with a message where they make no sense."""
    parser = _parser()
    given = vars(parser.parse_args(arguments))
    shard, shards = given.pop("shard")
    scheme, host, port = given.pop("listen")
    if (given["tls_cert"] is None) != (given["tls_key"] is None):
        parser.error("--tls-cert and --tls-key belong together; give both or none")
    if given["tls_client_ca"] is not None and given["tls_cert"] is None:
        parser.error("--tls-client-ca asks clients for certificates, which needs --tls-cert and --tls-key as well")
    if scheme == "grpc+tls" and given["tls_cert"] is None:
        parser.error("--listen grpc+tls:// needs --tls-cert and --tls-key")
    if given["data"] is None and given["durability"] == "log":
        parser.error("--durability log needs --data, the folder for the log")
    if given["data"] is None and given["snapshot_on_exit"]:
        parser.error("--snapshot-on-exit needs --data, the folder for the snapshot")
    scheme = "grpc" if given["tls_cert"] is None else "grpc+tls"
    bound = f"[{host}]" if ":" in host else host
    return Options(shard=shard, shards=shards, listen=f"{scheme}://{bound}:{port}", host=host, port=port, **given)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hetrec-ps", description="Serve one shard of the embedding tables.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--shard", type=_shard, default=(0, 1), metavar="I/N", help="which shard of how many (default: 0/1)")
    add(
        "--listen",
        type=_address,
        default="grpc://127.0.0.1:7070",
        metavar="URL",
        help="grpc://HOST:PORT or grpc+tls://HOST:PORT; port 0 takes a free one (default: %(default)s)",
    )
    add("--data", type=Path, metavar="DIR", help="folder for the log and for snapshots on exit")
    add(
        "--durability",
        choices=("none", "log"),
        default="none",
        help="log: a push is acknowledged once it is on the disk, and a restart loses none. none: rows live in memory "
        "(default)",
    )
    add(
        "--compact-bytes",
        type=_positive,
        default=1 << 30,
        metavar="N",
        help="log size at which it is replaced by a snapshot (default: 1 GiB)",
    )
    add(
        "--snapshot-on-exit",
        action="store_true",
        help="write all rows to --data when told to stop, and start from them",
    )
    add("--clock", choices=("lamport", "sum"), default="lamport", help="how a push merges into a row's clock")
    add(
        "--metrics-port",
        type=_port,
        metavar="N",
        help="serve Prometheus metrics over HTTP on this port (0: a free one)",
    )
    add("--max-rows", type=_positive, default=1 << 20, metavar="N", help="rows a request may be about (default: 2^20)")
    add(
        "--max-message-bytes",
        type=_positive,
        default=256 << 20,
        metavar="N",
        help="size of a request, and of the rows in a reply (default: 256 MiB)",
    )
    add("--max-streams", type=_positive, default=1024, metavar="N", help="calls under way at once (default: 1024)")
    add(
        "--max-streams-per-client",
        type=_positive,
        default=256,
        metavar="N",
        help="of these, from one host (default: 256)",
    )
    add("--tls-cert", type=_file, metavar="PEM", help="certificate of this server")
    add("--tls-key", type=_file, metavar="PEM", help="its key")
    add("--tls-client-ca", type=_file, metavar="PEM", help="authority of the certificates that clients must show")
    add("--token-file", type=_file, metavar="FILE", help="file with the token that clients must present")
    add("--insecure", action="store_true", help="listen beyond this machine with neither TLS nor token")
    add("--exit-with-stdin", action="store_true", help="stop when standard input closes or the parent process ends")
    return parser


def _shard(text: str) -> tuple[int, int]:
    shard, slash, shards = text.partition("/")
    if not (slash and shard.isdecimal() and shards.isdecimal() and int(shard) < int(shards) <= 255):
        raise argparse.ArgumentTypeError(f"{text!r} is not a shard; give I/N with 0 <= I < N <= 255, such as 0/2")
    return int(shard), int(shards)


def _address(text: str) -> tuple[str, str, int]:
    wrong = argparse.ArgumentTypeError(
        f"{text!r} is not an address; give grpc://HOST:PORT, such as grpc://0.0.0.0:7070"
    )
    try:
        url = urlsplit(text)
        host, port = url.hostname, url.port
    except ValueError:
        raise wrong from None
    if url.scheme not in ("grpc", "grpc+tls") or not host or port is None:
        raise wrong
    return url.scheme, host, port


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; give 0 to 65535")
    return int(text)


def _file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text!r}")
    return path
