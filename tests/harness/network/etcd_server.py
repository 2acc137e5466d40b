"""Real etcd servers on free ports, from the system's package etcd-server."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import urllib.request
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.harness.network.ports import free_port

ALL_KEYS = {name: b64encode(b"\0").decode() for name in ("key", "range_end")}
USER, PASSWORD = "runs", "open/sesame@"


class EtcdMember:
    """One server of a cluster.

    Args:
        folder: where it keeps its data.
        name: its name in the cluster.
        ports: of clients and of peers, for each member by name.
        files: TLS files of `certificates`; none for plain connections.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        ports: dict[str, tuple[int, int]],
        files: dict[str, Path] | None = None,
    ) -> None:
        client, peer = ports[name]
        self.endpoint = f"127.0.0.1:{client}"
        self.process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None  # of the log, whose pipe would fill
        scheme = "https" if files else "http"
        cluster = ",".join(f"{n}=http://127.0.0.1:{p}" for n, (_, p) in ports.items())
        self._command = ["etcd", "--name", name, "--data-dir", str(folder / name)]
        self._command += ["--listen-client-urls", f"{scheme}://{self.endpoint}"]
        self._command += ["--advertise-client-urls", f"{scheme}://{self.endpoint}"]
        self._command += ["--listen-peer-urls", f"http://127.0.0.1:{peer}"]
        self._command += ["--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}"]
        self._command += ["--initial-cluster", cluster, "--log-outputs", "stderr"]
        if len(ports) == 1:  # elects itself sooner
            self._command += ["--heartbeat-interval", "10", "--election-timeout", "100"]
        if files:
            self._command += ["--cert-file", str(files["server"])]
            self._command += ["--key-file", str(files["server_key"]), "--client-cert-auth"]
            self._command += ["--trusted-ca-file", str(files["authority"])]

    def start(self) -> None:
        """Start the server; `await_ready` returns when it answers."""
        self.process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)

    def await_ready(self) -> None:
        assert self.process is not None
        assert self.process.stderr is not None
        said: list[str] = []
        for line in self.process.stderr:
            said.append(line)
            if "serving" in line and "client" in line and self.endpoint in line:
                self._reader = threading.Thread(target=self.process.stderr.read)
                self._reader.start()
                return
        raise AssertionError("".join(said))

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            if self._reader is not None:
                self._reader.join()
            assert self.process.stderr is not None
            self.process.stderr.close()
            self.process = self._reader = None


@contextmanager
def etcd_members(
    folder: Path, count: int = 1, files: dict[str, Path] | None = None
) -> Iterator[list[EtcdMember]]:
    """Run a cluster inside the block; the test is skipped where etcd isn't installed."""
    pytest.importorskip("etcd3gw", reason="etcd3gw is not installed: pip install 'paceline[etcd]'")
    if shutil.which("etcd") is None:
        pytest.skip("no etcd here: apt-get install etcd-server")
    ports = {f"m{number}": (free_port(), free_port()) for number in range(count)}
    members = [EtcdMember(folder / "etcd", name, ports, files) for name in ports]
    (folder / "etcd").mkdir()
    try:
        for member in members:
            member.start()
        for member in members:
            member.await_ready()
        yield members
    finally:
        for member in members:
            member.kill()


@contextmanager
def etcd_server(folder: Path) -> Iterator[str]:
    """Run one server inside the block; yields its endpoint."""
    with etcd_members(folder) as (member,):
        yield member.endpoint


def ask(endpoint: str, path: str, **request: object) -> dict[str, Any]:
    """Ask a server by HTTP, apart from the code under test."""
    url, body = f"http://{endpoint}/v3/{path}", json.dumps(request).encode()
    with urllib.request.urlopen(url, body, timeout=10) as answer:
        return dict(json.load(answer))


def require_password(endpoint: str) -> None:
    """Let only root, and USER below the prefix paceline-, use the server."""
    text = b64encode(b"paceline-").decode(), b64encode(b"paceline.").decode()
    permission = {"permType": "READWRITE", "key": text[0], "range_end": text[1]}
    for user, role in (("root", "root"), (USER, "runs")):
        ask(endpoint, "auth/user/add", name=user, password=PASSWORD)
        ask(endpoint, "auth/role/add", name=role)
        ask(endpoint, "auth/user/grant", user=user, role=role)
    ask(endpoint, "auth/role/grant", name="runs", perm=permission)
    ask(endpoint, "auth/enable")


def certificates(folder: Path) -> dict[str, Path]:
    """Make an authority, and certificates that it signed for a server and a client."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here, which makes the test's certificates")
    files = {"authority": folder / "authority.pem", "authority_key": folder / "authority.key"}
    _openssl(
        *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=authority", "-days", "2"),
        *("-keyout", str(files["authority_key"]), "-out", str(files["authority"])),
    )
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    for name in ("server", "client"):
        files[name], files[f"{name}_key"] = folder / f"{name}.pem", folder / f"{name}.key"
        request = folder / f"{name}.csr"
        _openssl(
            *("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}"),
            *("-keyout", str(files[f"{name}_key"]), "-out", str(request)),
        )
        _openssl(
            *("x509", "-req", "-in", str(request), "-days", "2", "-CAcreateserial"),
            *("-CA", str(files["authority"]), "-CAkey", str(files["authority_key"])),
            *("-extfile", str(folder / "names"), "-out", str(files[name])),
        )
    return files


def _openssl(*words: str) -> None:
    command: Sequence[str] = ["openssl", *words]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
