"""Who is turned away: no or wrong token, no or a foreign certificate, plain text; and what may be bound."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pyarrow.flight as fl
import pytest
from running import Peer, Program

from cache_backend.server.main import main

TOKEN = "correct horse battery staple"
# A connection that TLS refuses is, for gRPC, one that never came to be.
NO_CONNECTION = (fl.FlightUnavailableError, fl.FlightInternalError, fl.FlightTimedOutError)


class Authority:
    """A certificate authority of this test's own, with one server and one client certificate."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self._openssl("req", "-x509", "-nodes", *self._key("ca"), "-out", "ca.pem", "-subj", "/CN=test authority")
        for name in ("server", "client"):
            self._openssl("req", "-new", "-nodes", *self._key(name), "-out", f"{name}.csr", "-subj", f"/CN={name}")
            (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
            self._openssl(
                "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                "-days", "2", "-extfile", "names", "-out", f"{name}.pem",
            )  # fmt: skip

    def _key(self, name: str) -> list[str]:
        return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-keyout", f"{name}.key"]

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True)

    def __getitem__(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def server_options(self) -> list[str]:
        return ["--tls-cert", str(self.folder / "server.pem"), "--tls-key", str(self.folder / "server.key")]

    def trust(self) -> dict[str, bytes]:
        return {"tls_root_certs": self["ca.pem"]}

    def identity(self) -> dict[str, bytes]:
        return {"cert_chain": self["client.pem"], "private_key": self["client.key"]}


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Authority]:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make certificates with")
    folder = tmp_path_factory.mktemp("tls")
    return Authority(folder / "ours"), Authority(folder / "foreign")


def token_file(folder: Path) -> str:
    file = folder / "token"
    file.write_text(TOKEN + "\n")
    return str(file)


def use(client: Peer) -> None:
    client.open()
    client.push([1, 2])
    assert client.read([1, 2]) == [1.0, 1.0]


def test_a_token(program: Callable[..., Program], peer, tmp_path: Path) -> None:
    server = program("--token-file", token_file(tmp_path))
    use(peer(server.address, token=f"Bearer {TOKEN}"))
    for wrong in (
        None,
        "",
        TOKEN,
        f"Bearer {TOKEN[:-1]}",
        f"Bearer {TOKEN}x",
        "Bearer ",
        f"bearer{TOKEN}",
        f"Basic {TOKEN}",
    ):
        client = peer(server.address, token=wrong, worker=9)
        for call in (
            lambda c=client: c.push([1], sequence=1),
            lambda c=client: c.read([1]),
            lambda c=client: c.act("hello", protocol=2),
            lambda c=client: c.act("health"),
            lambda c=client: c.act("restore", folder="/tmp"),
            lambda c=client: list(c.client.list_actions(c.options)),
        ):
            with pytest.raises(fl.FlightUnauthenticatedError, match="wants a token"):
                call()
    assert peer(server.address, token=f"Bearer {TOKEN}").read([1, 2]) == [1.0, 1.0]
    assert TOKEN not in server.errors


def test_tls(program: Callable[..., Program], peer, authorities: tuple[Authority, Authority]) -> None:
    ours, foreign = authorities
    server = program(*ours.server_options())
    assert server.address.startswith("grpc+tls://127.0.0.1:")
    use(peer(server.address, **ours.trust()))
    plain = server.address.replace("grpc+tls", "grpc")
    for address, how in ((plain, {}), (server.address, foreign.trust()), (server.address, {})):
        with pytest.raises(NO_CONNECTION):
            peer(address, **how).act("hello", protocol=2)
    assert server.process.poll() is None


def test_mutual_tls(program: Callable[..., Program], peer, authorities: tuple[Authority, Authority]) -> None:
    ours, foreign = authorities
    server = program(*ours.server_options(), "--tls-client-ca", str(ours.folder / "ca.pem"))
    use(peer(server.address, **ours.trust(), **ours.identity()))
    for identity in ({}, foreign.identity()):
        client = peer(server.address, **ours.trust(), **identity)
        for call in (lambda c=client: c.act("hello", protocol=2), lambda c=client: c.push([1], sequence=1)):
            with pytest.raises(NO_CONNECTION):
                call()
    with pytest.raises(NO_CONNECTION):
        peer(server.address.replace("grpc+tls", "grpc")).act("hello", protocol=2)
    assert peer(server.address, **ours.trust(), **ours.identity()).read([1]) == [1.0]


def test_tls_and_token(
    program: Callable[..., Program], peer, authorities: tuple[Authority, Authority], tmp_path: Path
) -> None:
    ours, _ = authorities
    server = program(*ours.server_options(), "--token-file", token_file(tmp_path))
    use(peer(server.address, token=f"Bearer {TOKEN}", **ours.trust()))
    with pytest.raises(fl.FlightUnauthenticatedError):
        peer(server.address, **ours.trust()).act("hello", protocol=2)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "192.0.2.1", "ps0.example"])
def test_beyond_this_machine_only_with_a_reason(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--listen", f"grpc://{host}:0"]) == 1
    refusal = capsys.readouterr().err
    for remedy in ("--token-file", "--tls-cert", "127.0.0.1", "--insecure"):
        assert remedy in refusal


def test_beyond_this_machine_with_a_token_or_knowingly(program: Callable[..., Program], peer, tmp_path: Path) -> None:
    anywhere = "grpc://0.0.0.0:0"
    server = program("--insecure", listen=anywhere)
    assert server.address.startswith("grpc://0.0.0.0:")
    use(peer(f"grpc://127.0.0.1:{server.port}"))
    server = program("--token-file", token_file(tmp_path), listen=anywhere)
    use(peer(f"grpc://127.0.0.1:{server.port}", token=f"Bearer {TOKEN}"))


def test_beyond_this_machine_with_tls(
    program: Callable[..., Program], peer, authorities: tuple[Authority, Authority]
) -> None:
    ours, _ = authorities
    server = program(*ours.server_options(), listen="grpc+tls://0.0.0.0:0")
    use(peer(f"grpc+tls://127.0.0.1:{server.port}", **ours.trust()))


def test_an_empty_token_protects_nothing(program: Callable[..., Program], tmp_path: Path) -> None:
    (tmp_path / "token").write_text("\n")
    server = program("--token-file", str(tmp_path / "token"))
    assert server.process.wait(20) == 1
    assert "is empty" in server.errors
