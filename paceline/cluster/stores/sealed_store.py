"""A store whose values only processes with the run's secret can read or write.

    keys of a run   scrypt(secret): a cipher key and a proof key, 32 bytes each
    stored value    magic | nonce (16 bytes) | proof (32 bytes) | encrypted value
    encrypted       value XOR SHAKE-256(cipher key, nonce)
    proof           HMAC-SHA256(proof key, name of the store's key, nonce, encrypted value)

So the job token never travels in the clear, and a registration or a failure report that a process
without the secret wrote, or moved from another key, is an error. A process that reaches the
server can still delete keys and so end a start; it can't make a run end well.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Self

from paceline.cluster.stores.polled_store import CompareAndSetStore, PolledStore, as_bytes
from paceline.errors import ConfigError

_MAGIC = b"\x00paceline sealed 1\n"
_NONCE = 16
_PROOF = 32


class SealedStore(CompareAndSetStore):
    """Store wrapper that encrypts and authenticates all values.

    Args:
        inner: the store that holds the encrypted values.
        secret: the run's secret.
    """

    def __init__(self, inner: PolledStore, secret: str) -> None:
        super().__init__(inner.address, inner.space, timedelta(seconds=inner.limit))
        self._inner = inner
        self._secret = secret
        self.served_by_run = inner.served_by_run
        self._cipher_key, self._proof_key = _split(_keys_of(secret), 32)

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        values = self._inner.read(keys)
        return [self._open(key, value) for key, value in zip(keys, values, strict=True)]

    def set(self, key: str, value: str | bytes) -> None:
        self._inner.set(key, self._seal(key, as_bytes(value)))

    def delete_key(self, key: str) -> bool:
        return self._inner.delete_key(key)

    @property
    def host(self) -> str:
        return self._inner.host

    def server_id(self) -> str:
        return self._inner.server_id()

    def persist(self, key: str) -> None:
        self._inner.persist(key)

    def clone(self) -> Self:
        return type(self)(self._inner.clone(), self._secret)

    def read_version(self, key: str) -> tuple[bytes | None, bytes | None]:
        """Return the sealed value, which is the version, and the value."""
        stored = self._inner.read([key])[0]
        return stored, self._open(key, stored)

    def replace(self, key: str, version: bytes | None, value: bytes) -> bool:
        sealed = self._seal(key, value)
        return self._inner.compare_set(key, version or b"", sealed) == sealed

    def _seal(self, key: str, value: bytes) -> bytes:
        nonce = secrets.token_bytes(_NONCE)
        encrypted = self._crypt(nonce, value)
        return _MAGIC + nonce + self._proof(key, nonce, encrypted) + encrypted

    def _open(self, key: str, stored: bytes | None) -> bytes | None:
        if stored is None:
            return None
        nonce, rest = _split(stored.removeprefix(_MAGIC), _NONCE)
        proof, encrypted = _split(rest, _PROOF)
        if not hmac.compare_digest(proof, self._proof(key, nonce, encrypted)):
            raise ConfigError(
                f"The entry {key!r} in the store was written without this run's secret: give all "
                "machines the same PACELINE_SECRET or --secret_file, and let no other "
                "processes reach the store."
            )
        return self._crypt(nonce, encrypted)

    def _proof(self, key: str, nonce: bytes, encrypted: bytes) -> bytes:
        # The proof covers the key's name, so that a value can't be moved to another key or run.
        name = f"{self.space}/{key}".encode()
        message = len(name).to_bytes(8, "big") + name + nonce + encrypted
        return hmac.digest(self._proof_key, message, "sha256")

    def _crypt(self, nonce: bytes, data: bytes) -> bytes:
        stream = hashlib.shake_256(self._cipher_key + nonce).digest(len(data))
        mixed = int.from_bytes(data, "big") ^ int.from_bytes(stream, "big")
        return mixed.to_bytes(len(data), "big")


def _split(data: bytes, size: int) -> tuple[bytes, bytes]:
    return data[:size], data[size:]


@lru_cache
def _keys_of(secret: str) -> bytes:
    return hashlib.scrypt(secret.encode(), salt=b"paceline store 1", n=2**14, r=8, p=1, dklen=64)
