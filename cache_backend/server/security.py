"""Who may speak to the server: the bind rule, certificates, the token."""

from __future__ import annotations

import hmac
import ipaddress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.flight as fl

if TYPE_CHECKING:
    from cache_backend.server.metrics import Metrics
    from cache_backend.server.options import Options

__all__ = ["check_bind_rule", "is_loopback", "tls_arguments", "token_middleware"]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server bound to ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name: where it leads is not ours to know
        return False


def check_bind_rule(options: Options) -> None:
    """
    Raises:
        ValueError: anyone on the network could read and change the tables.
    """
    protected = options.token_file is not None or options.tls_cert is not None
    if not (is_loopback(options.host) or protected or options.insecure):
        raise ValueError(
            f"--listen {options.listen} is reachable from other machines, and nothing says who may use it: give "
            f"--token-file, or --tls-cert and --tls-key (with --tls-client-ca for client certificates), or listen on "
            f"127.0.0.1; on a network where everyone may read and change the tables, --insecure"
        )


def tls_arguments(options: Options) -> dict[str, Any]:
    """What FlightServerBase wants to know of certificates."""
    if options.tls_cert is None or options.tls_key is None:
        return {}
    arguments: dict[str, Any] = {"tls_certificates": [(options.tls_cert.read_bytes(), options.tls_key.read_bytes())]}
    if options.tls_client_ca is not None:
        arguments |= {"verify_client": True, "root_certificates": options.tls_client_ca.read_bytes()}
    return arguments


def read_token(file: Path) -> bytes:
    token = file.read_bytes().strip()
    if not token:
        raise ValueError(f"--token-file {file} is empty; it holds the token that clients must present")
    return token


class _Accepted(fl.ServerMiddleware):
    """The call goes on; nothing to add."""


class _TokenCheck(fl.ServerMiddlewareFactory):
    """Turns a call away, before any handler runs, unless it bears the token."""

    def __init__(self, token: bytes, metrics: Metrics) -> None:
        self._expected = b"Bearer " + token
        self._metrics = metrics

    def start_call(self, info: fl.CallInfo, headers: dict[str, list[str | bytes]]) -> fl.ServerMiddleware:
        for value in headers.get("authorization", []):
            given = value.encode() if isinstance(value, str) else value
            if hmac.compare_digest(given, self._expected):
                return _Accepted()
        self._metrics.error("unauthenticated")
        raise fl.FlightUnauthenticatedError(
            "this server wants a token: set store.token_file to the file that hetrec-ps was given with --token-file"
        )


def token_middleware(options: Options, metrics: Metrics) -> dict[str, fl.ServerMiddlewareFactory]:
    if options.token_file is None:
        return {}
    return {"token": _TokenCheck(read_token(options.token_file), metrics)}
