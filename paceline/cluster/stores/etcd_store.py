"""A `torch.distributed.Store` on an etcd cluster.

    key of the store        <space>//<key>
    last write of a client  <space>/client/<id of the client>

All keys of a space have one lease, whose id is a digest of the space: any process's write renews
it, and what a killed run leaves behind is gone an hour later. Each write is one transaction that
compares the key's revision and sets the second key to a tag of its own. A write whose answer was
lost is sent again, to the next endpoint; if it has been executed, the comparison fails and the tag
is found. So each write is executed once. The tags are removed with the last key.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError

from paceline.cluster.stores.etcd_address import EtcdAddress
from paceline.cluster.stores.etcd_cluster import EtcdCluster, EtcdRefusal
from paceline.cluster.stores.polled_store import CompareAndSetStore, as_bytes

_TIME_TO_LIVE_S = 3600
"""How long the keys outlive the last write."""

_RENEW_S = 60.0
"""A client's writes renew the lease at most this often."""

_RANGES = 100
"""Keys that one transaction reads; a server's own limit is 128."""

_NO_LEASE = "lease not found"
_LEASE_EXISTS = "lease already exists"


class EtcdStore(CompareAndSetStore):
    """Key-value store in the keys of an etcd cluster that begin with the space's name.

    Args:
        address: `EtcdAddress.text`.
        space: prefix of all keys, as a path of names.
        timeout: seconds that `get` waits; also the default timeout of `wait`.
        make: unused: the first write makes the space.

    Raises:
        ConfigError: the address can't be read, or the cluster refuses the user or the password.
        CommError: the cluster can't be reached.
    """

    def __init__(self, address: str, space: str, timeout: timedelta, *, make: bool = False) -> None:
        super().__init__(address, space, timeout)
        self._cluster = EtcdCluster(EtcdAddress.of(address))
        # A positive number of 63 bits, as etcd wants it,
        # that all processes of the space find by themselves.
        self._lease = int.from_bytes(hashlib.sha256(space.encode()).digest()[:8], "big") >> 1 or 1
        self._client = _text(f"{space}/client/{secrets.token_hex(8)}".encode())
        self._writing = threading.Lock()  # one write of this client at a time: it has one tag
        self._renew_at = 0.0
        self.server_id()  # raises where the cluster can't be used

    @property
    def host(self) -> str:
        endpoints = EtcdAddress.of(self.address).endpoints
        return endpoints[0].rpartition(":")[0].strip("[]") if len(endpoints) == 1 else ""

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        found: list[bytes | None] = []
        for start in range(0, len(keys), _RANGES):
            found += [value for _, value in self._ranges(keys[start : start + _RANGES])]
        return found

    def read_version(self, key: str) -> tuple[int, bytes | None]:
        """Return the revision at which a key was written last, 0 for no key, and its value."""
        return self._ranges([key])[0]

    def replace(self, key: str, version: int, value: bytes) -> bool:
        put = {"key": self._name(key), "value": _text(value), "lease": self._lease}
        return self._write(key, version, {"request_put": put})

    def set(self, key: str, value: str | bytes) -> None:
        data = as_bytes(value)
        self.update(key, lambda old: data)

    def delete_key(self, key: str) -> bool:
        deadline = time.monotonic() + self.limit
        while True:
            version, value = self.read_version(key)
            if value is None:
                return False
            if self._write(key, version, {"request_delete_range": {"key": self._name(key)}}):
                self._sweep()
                return True
            if time.monotonic() > deadline:
                raise DistStoreError(
                    f"{key} couldn't be deleted within {self.limit:g} s: other processes kept "
                    "changing it."
                )

    def erase(self) -> None:
        """Remove all keys: they end with their lease."""
        self._ask_lease("lease/revoke", {"ID": self._lease}, _NO_LEASE)
        self._renew_at = 0.0

    def server_id(self) -> str:
        """Return the cluster's id.

        Restarts keep it, because etcd answers a write when most members have it on their disks.
        """
        answer = self._cluster.ask("kv/range", {"key": self._client, "count_only": True})
        return str(answer["header"]["cluster_id"])

    def close(self) -> None:
        self._cluster.close()

    def _ranges(self, keys: Sequence[str]) -> list[tuple[int, bytes | None]]:
        ranges = [{"request_range": {"key": self._name(key)}} for key in keys]
        responses = self._cluster.ask("kv/txn", {"success": ranges}).get("responses", [])
        return [_found(response) for response in responses]

    def _write(self, key: str, version: int, operation: dict[str, Any]) -> bool:
        """Write a key if its revision is still `version`; return whether this call did."""
        # A request that no endpoint answered is sent again, and may have been executed: this
        # client's tag in the store then shows that the first one won.
        tag = secrets.token_bytes(8)
        mark = {"key": self._client, "value": _text(tag), "lease": self._lease}
        same = {"key": self._name(key), "target": "MOD", "result": "EQUAL", "mod_revision": version}
        transaction = {
            "compare": [same],
            "success": [operation, {"request_put": mark}],
            "failure": [{"request_range": {"key": self._client}}],
        }
        with self._writing:
            self._renew_lease()
            try:
                answer = self._cluster.ask("kv/txn", transaction)
            except EtcdRefusal as error:
                if _NO_LEASE not in str(error):
                    raise
                self._renew_at = 0.0  # the lease has ended, and with it the keys
                self._renew_lease()
                answer = self._cluster.ask("kv/txn", transaction)
        return bool(answer.get("succeeded")) or _found(answer["responses"][0])[1] == tag

    def _sweep(self) -> None:
        """Remove the tags of all clients if no key of the store is left."""
        keys, clients = (_prefix(f"{self.space}{part}") for part in ("//", "/client/"))
        none = {**keys, "target": "CREATE", "result": "EQUAL", "create_revision": 0}
        remove = {"request_delete_range": clients}
        self._cluster.ask("kv/txn", {"compare": [none], "success": [remove]})

    def _renew_lease(self) -> None:
        now = time.monotonic()
        if now < self._renew_at:
            return
        answer = self._cluster.ask("lease/keepalive", {"ID": self._lease})
        if "TTL" not in answer.get("result", {}):
            grant = {"ID": self._lease, "TTL": _TIME_TO_LIVE_S}
            self._ask_lease("lease/grant", grant, _LEASE_EXISTS)
        self._renew_at = now + _RENEW_S

    def _ask_lease(self, path: str, request: dict[str, Any], already: str) -> None:
        """Change the lease, unless another process has done so `already`."""
        try:
            self._cluster.ask(path, request)
        except EtcdRefusal as error:
            if already not in str(error):
                raise

    def _name(self, key: str) -> str:
        return _text(f"{self.space}//{key}".encode())


def _found(response: dict[str, Any]) -> tuple[int, bytes | None]:
    """Return the revision and the value in the answer to the range of one key."""
    found = response["response_range"].get("kvs", [])
    if not found:
        return 0, None
    return int(found[0]["mod_revision"]), b64decode(found[0].get("value", ""))


def _prefix(text: str) -> dict[str, str]:
    """Return the range of the keys that begin with a text."""
    first = text.encode()
    return {"key": _text(first), "range_end": _text(first[:-1] + bytes([first[-1] + 1]))}


def _text(data: bytes) -> str:
    """Write bytes as the JSON gateway wants them."""
    return b64encode(data).decode()
