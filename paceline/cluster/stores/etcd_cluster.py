"""Requests to an etcd cluster: the endpoint that answers, the user's token, errors as sentences.

Requests are those of etcd's JSON gateway (etcd 3.4 or newer), which the package etcd3gw sends. A
request that an endpoint doesn't answer is sent to the next one, so it may be executed twice: the
caller makes that harmless. The endpoint that answered last is asked first.
"""

from __future__ import annotations

import json
import ssl
import time
from typing import Any

from paceline.cluster.stores.etcd_address import EtcdAddress
from paceline.errors import CommError, ConfigError

_CONNECT_S = 2.0
_ANSWER_S = 10.0
_ANSWER_OF_SEVERAL_S = 3.0
"""Limit of an endpoint's answer where there is another endpoint to ask."""

_ELECTION_S = 10.0
"""How long a cluster that answers may have no leader."""

_PAUSE_S = 0.1
_TOKEN_ERRORS = ("user name is empty", "invalid auth token", "revision of auth store is old")
_REFUSALS = (*_TOKEN_ERRORS, "authentication failed", "permission denied")


class EtcdRefusal(CommError):
    """Error that the cluster reports: it has read the request, and not executed it."""


class EtcdCluster:
    """Client of an etcd cluster.

    Raises:
        ConfigError: etcd3gw isn't installed, or a file of the address can't be read.
    """

    def __init__(self, address: EtcdAddress) -> None:
        try:
            import etcd3gw
        except ImportError:
            raise ConfigError(
                flag="etcd",
                rule="needs the package etcd3gw, which isn't installed",
                remedy="run pip install 'paceline[etcd]'",
            ) from None
        address.check_files()
        self._address = address
        self._errors: type[Exception] = etcd3gw.exceptions.Etcd3Exception
        several = len(address.endpoints) > 1
        limits: Any = (_CONNECT_S, _ANSWER_OF_SEVERAL_S if several else _ANSWER_S)
        self._clients: list[Any] = []
        for endpoint in address.endpoints:
            host, _, port = endpoint.rpartition(":")
            client = etcd3gw.client(
                host=host.strip("[]"),
                port=int(port),
                protocol="https" if address.tls else "http",
                cert_cert=address.cert or None,
                cert_key=address.key or None,
                timeout=limits,
                api_path="/v3/",
            )
            client.session.trust_env = False  # no proxy, and no password of a netrc file
            # requests brings authorities of its own, which
            # lack those that an administrator has added here.
            client.session.verify = address.cacert or _system_authorities()
            self._clients.append(client)
        self._first = 0  # index of the client that answered last

    def ask(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request; return the answer.

        Args:
            path: the method's path below /v3/, such as "kv/txn".
            request: the request's fields.

        Raises:
            EtcdRefusal: the cluster reports an error.
            ConfigError: the cluster refuses the user, the password or the certificate.
            CommError: no endpoint answers in time.
        """
        deadline = time.monotonic() + _ELECTION_S
        while True:
            reasons: dict[str, str] = {}
            answers = False  # whether an endpoint reports that its cluster isn't ready
            for number in self._order():
                try:
                    answer = self._ask_one(self._clients[number], path, request)
                except (OSError, ValueError, self._errors) as error:
                    status, reason = _reported(error)
                    if status == _REPORTED:
                        raise self._refusal(reason) from None
                    answers = answers or status == _NOT_READY
                    reasons[self._address.endpoints[number]] = reason
                else:
                    self._first = number
                    return answer
            if not answers or time.monotonic() > deadline:
                raise self._unreachable(reasons)
            time.sleep(_PAUSE_S)

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients:
            client.session.close()

    def _order(self) -> list[int]:
        count = len(self._clients)
        first = self._first
        return [(first + step) % count for step in range(count)]

    def _ask_one(self, client: Any, path: str, request: dict[str, Any]) -> dict[str, Any]:
        """Ask one endpoint, with a new token where it wants one."""
        try:
            return _post(client, path, request)
        except self._errors as error:
            wants_token = _reported(error)[1] in _TOKEN_ERRORS
            if not (wants_token and self._address.user):
                raise
            self._log_in(client)
            return _post(client, path, request)

    def _log_in(self, client: Any) -> None:
        client.session.headers.pop("Authorization", None)
        login = {"name": self._address.user, "password": self._address.password}
        token = _post(client, "auth/authenticate", login).get("token", "")
        client.session.headers["Authorization"] = token

    def _refusal(self, reason: str) -> ConfigError | EtcdRefusal:
        hosts = ",".join(self._address.endpoints)
        if reason.startswith(_REFUSALS):
            return ConfigError(
                f"The etcd cluster at {hosts} refused the user or the password ({reason}): give "
                "them as --etcd http://USER:PASSWORD@HOST:PORT, or https:// for TLS, of a user "
                "that may read and write the keys that begin with paceline-."
            )
        return EtcdRefusal(f"The etcd cluster at {hosts} reported an error: {reason}.")

    def _unreachable(self, reasons: dict[str, str]) -> CommError:
        if len(reasons) == 1:
            ((host, reason),) = reasons.items()
            return CommError(
                f"The etcd server at {host} can't be reached ({reason}): check that it runs there "
                "and that this machine may connect."
            )
        each = "; ".join(f"{host}: {reason}" for host, reason in reasons.items())
        return CommError(
            f"No endpoint of the etcd cluster can be reached ({each}): check that most of its "
            "members run and that this machine may connect."
        )


def _post(client: Any, path: str, request: dict[str, Any]) -> dict[str, Any]:
    answer = client.post(client.get_url(path), json=request)
    if not isinstance(answer, dict) or not answer.keys() & {"header", "result"}:
        raise ValueError("another kind of server answers")
    return answer


_REPORTED = "reported"
_NOT_READY = "not ready"
_NO_ANSWER = "no answer"


def _reported(error: Exception) -> tuple[str, str]:
    """Return what an error of a request means, and its reason."""
    detail = getattr(error, "detail_text", None) or ""
    try:
        report = json.loads(detail)
        if isinstance(report.get("error"), dict):  # of a stream, such as lease/keepalive
            report = {"code": report["error"]["grpc_code"], **report["error"]}
        reason = str(report["message"]).removeprefix("etcdserver: ")
        code = int(report["code"])
    except (ValueError, KeyError, TypeError, AttributeError):
        cause = _first_cause(error)
        if cause is error or not isinstance(cause, OSError):
            return _NO_ANSWER, "it doesn't answer as etcd 3.4 or newer does"
        return _NO_ANSWER, str(cause.strerror or cause).rstrip(".")
    return (_NOT_READY if code in _NOT_READY_CODES else _REPORTED), reason


_NOT_READY_CODES = frozenset({1, 2, 4, 13, 14})
"""gRPC's codes cancelled, unknown, deadline exceeded, internal and unavailable."""


def _first_cause(error: BaseException) -> BaseException:
    """Return the system's error inside those of requests and urllib3, whose text holds a URL."""
    inside = (getattr(error, "reason", None), *error.args, error.__cause__, error.__context__)
    inner = next((each for each in inside if isinstance(each, BaseException)), None)
    return error if inner is None else _first_cause(inner)


def _system_authorities() -> str | bool:
    paths = ssl.get_default_verify_paths()
    return paths.cafile or paths.capath or True
