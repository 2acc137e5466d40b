"""The address of an etcd cluster: `--etcd`, read.

    [http://|https://][USER:PASSWORD@]HOST:PORT[,HOST:PORT…][?cacert=FILE&cert=FILE&key=FILE]

The settings after the question mark have the names of etcdctl's flags. A user, a password or a file
with one of the characters "@,:/?&%" has it percent-encoded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from urllib.parse import parse_qsl, quote, unquote

from paceline.config.world import without_password
from paceline.errors import ConfigError

_SCHEMES = {"http": False, "https": True}
_FILES = ("cacert", "cert", "key")


@dataclass(frozen=True, kw_only=True)
class EtcdAddress:
    """Address of an etcd cluster.

    Attributes:
        endpoints: HOST:PORT of members of the cluster.
        tls: whether connections are encrypted.
        user: the user's name; "" for none.
        password: the user's password.
        cacert: file with the certificates of authorities that may sign the servers'; "" for the
            system's.
        cert: file with the client's certificate; "" for none.
        key: file with the certificate's key.
    """

    endpoints: tuple[str, ...]
    tls: bool = False
    user: str = ""
    password: str = field(default="", repr=False)
    cacert: str = ""
    cert: str = ""
    key: str = ""

    @classmethod
    def of(cls, text: str) -> Self:
        """Read an address.

        Raises:
            ConfigError: it can't be read; the message has no password.
        """
        shown = without_password(text)
        scheme, separator, rest = text.partition("://")
        if not separator:
            scheme = "http"
            rest = text
        if scheme not in _SCHEMES:
            raise _wrong(shown, "must begin with HOST:PORT, http:// or https://")
        rest, _, settings = rest.partition("?")
        login, _, hosts = rest.rpartition("@")
        user, _, password = login.partition(":")
        files = dict(parse_qsl(settings, keep_blank_values=True))
        if not files.keys() <= set(_FILES) or "" in files.values():
            raise _wrong(shown, "the settings after the question mark are cacert, cert and key")
        if files and not _SCHEMES[scheme]:
            raise _wrong(shown, f"{next(iter(files))} needs https://")
        if ("cert" in files) != ("key" in files):
            raise _wrong(shown, "a client's certificate needs both cert and key")
        return cls(
            endpoints=tuple(_endpoint(host, scheme, shown) for host in hosts.split(",")),
            tls=_SCHEMES[scheme],
            user=unquote(user),
            password=unquote(password),
            **{name: str(Path(value).absolute()) for name, value in files.items()},
        )

    @property
    def text(self) -> str:
        """The address with its password, as `of` reads it; files have absolute paths."""
        login = f"{quote(self.user, safe='')}:{quote(self.password, safe='')}@" if self.user else ""
        files = {name: getattr(self, name) for name in _FILES}
        settings = "&".join(f"{name}={quote(path)}" for name, path in files.items() if path)
        scheme = "https" if self.tls else "http"
        return f"{scheme}://{login}{','.join(self.endpoints)}" + (settings and f"?{settings}")

    def check_files(self) -> None:
        """Require that the files can be read.

        Raises:
            ConfigError: one can't.
        """
        for name in _FILES:
            path = getattr(self, name)
            try:
                if path:
                    Path(path).read_bytes()
            except OSError as error:
                raise ConfigError(
                    flag="etcd",
                    value=f"…?{name}={path}",
                    rule=f"the file can't be read ({error.strerror})",
                    remedy="give the path of a PEM file on this machine",
                ) from None


def _endpoint(text: str, scheme: str, shown: str) -> str:
    """Return HOST:PORT; each endpoint may repeat the scheme, as in etcdctl's lists."""
    endpoint = text.removeprefix(f"{scheme}://")
    host, _, port = endpoint.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    bracketed = bare != host
    if not bare or set(bare) & set("/[]") or (":" in bare) != bracketed:
        raise _wrong(shown, "must be HOST:PORT, or several of them with commas between")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise _wrong(shown, "must be HOST:PORT, or several of them with commas between")
    return endpoint


def _wrong(shown: str, rule: str) -> ConfigError:
    return ConfigError(
        flag="etcd",
        value=shown,
        rule=rule,
        remedy="give it as HOST:PORT,HOST:PORT or "
        "https://USER:PASSWORD@HOST:PORT,HOST:PORT?cacert=FILE",
    )
