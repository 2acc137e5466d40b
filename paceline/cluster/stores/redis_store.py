"""A `torch.distributed.Store` on a Redis server.

All keys of a store are fields of one Redis hash, so that one command removes them and one time to
live, renewed by each write, ends them: what a killed run leaves behind is gone an hour later.
Compare-and-set and append are scripts, which Redis runs whole. A command is never sent twice: an
`add` whose answer was lost may have counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Self
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from paceline.cluster.stores.polled_store import PolledStore, as_bytes
from paceline.config.world import WorldConfig
from paceline.errors import CommError, ConfigError

_KEEP = timedelta(hours=1)
_CONNECT_S = 3.0
_ANSWER_S = 10.0

_COMPARE_SET = """
local value = redis.call('HGET', KEYS[1], ARGV[1])
if value == ARGV[2] or (not value and ARGV[2] == '') then
    redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
    value = ARGV[3]
end
redis.call('EXPIRE', KEYS[1], ARGV[4])
return value or ARGV[2]
"""

_APPEND = """
local value = redis.call('HGET', KEYS[1], ARGV[1]) or ''
redis.call('HSET', KEYS[1], ARGV[1], value .. ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
"""


class RedisStore(PolledStore):
    """Keys and values in one hash of a Redis server.

    Args:
        url: redis://[:PASSWORD@]HOST:PORT/DATABASE, or rediss:// for TLS.
        prefix: the hash's name; stores of one prefix are one store.
        timeout: the limit of `get` and of a `wait` that gives none.
        keep: how long the keys outlive the last write.

    Raises:
        ConfigError: the URL can't be read, or the server refuses the password.
        CommError: the server can't be reached.
    """

    def __init__(
        self, url: str, prefix: str, timeout: timedelta, *, keep: timedelta = _KEEP
    ) -> None:
        super().__init__(timeout)
        self._url = url
        self._prefix = prefix
        self._keep = keep
        self._client = _connect(url)
        self._keep_s = int(keep.total_seconds())
        self._compare_set = self._client.register_script(_COMPARE_SET)
        self._append = self._client.register_script(_APPEND)
        with self._sentences():
            self._client.ping()

    @classmethod
    def address_of(cls, world: WorldConfig) -> str:
        host = f"redis://{world.redis_host}:{world.redis_port}/0" if world.redis_host else ""
        return world.redis_url or host

    @classmethod
    def at(cls, address: str, space: str, timeout: timedelta, *, make: bool) -> Self:
        return cls(address, space, timeout)

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        with self._sentences():
            values: Any = self._client.hmget(self._prefix, list(keys))
        return list(values)

    def set(self, key: str, value: str | bytes) -> None:
        with self._sentences(), self._client.pipeline() as both:
            both.hset(self._prefix, key, as_bytes(value))
            both.expire(self._prefix, self._keep)
            both.execute()

    def add(self, key: str, value: int) -> int:
        with self._sentences(), self._client.pipeline() as both:
            both.hincrby(self._prefix, key, value)
            both.expire(self._prefix, self._keep)
            total: int = both.execute()[0]
        return total

    def append(self, key: str, value: str | bytes) -> None:
        with self._sentences():
            self._append(keys=[self._prefix], args=[key, as_bytes(value), self._keep_s])

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        values = [as_bytes(expected_value), as_bytes(desired_value)]
        with self._sentences():
            result: Any = self._compare_set(keys=[self._prefix], args=[key, *values, self._keep_s])
        return bytes(result)

    def delete_key(self, key: str) -> bool:
        with self._sentences():
            return bool(self._client.hdel(self._prefix, key))

    def num_keys(self) -> int:
        with self._sentences():
            count: Any = self._client.hlen(self._prefix)
        return int(count)

    def clone(self) -> Self:
        timeout = timedelta(seconds=self.limit)
        return type(self)(self._url, self._prefix, timeout, keep=self._keep)

    def erase(self) -> None:
        """Remove all keys."""
        with self._sentences():
            self._client.delete(self._prefix)

    def close(self) -> None:
        self._client.close()

    @contextmanager
    def _sentences(self) -> Iterator[None]:
        # `from None`: redis-py's own errors may quote the URL, and with it the password.
        where = _where(self._url)
        try:
            yield
        except (redis.AuthenticationError, redis.exceptions.NoPermissionError):
            raise ConfigError(_refused(where)) from None
        except redis.ResponseError as error:
            if str(error).startswith(("NOAUTH", "WRONGPASS", "NOPERM")):
                raise ConfigError(_refused(where)) from None
            raise CommError(f"The Redis server at {where} answered: {error}.") from None
        except (redis.RedisError, OSError) as error:
            raise CommError(
                f"The Redis server at {where} can't be reached ({_reason(error)}): check that it "
                "runs there and that this machine may connect."
            ) from None


def _connect(url: str) -> redis.Redis:
    try:
        return redis.Redis.from_url(
            url,
            socket_connect_timeout=_CONNECT_S,
            socket_timeout=_ANSWER_S,
            retry=Retry(NoBackoff(), 0),
        )
    except ValueError:
        raise ConfigError(
            "--redis_url can't be read: give redis://:PASSWORD@HOST:PORT/0, or rediss:// for TLS."
        ) from None


def _where(url: str) -> str:
    address = urlsplit(url)
    return f"{address.hostname}:{address.port or 6379}"


def _refused(where: str) -> str:
    return (
        f"The Redis server at {where} refused the user or the password: give them as "
        "--redis_url redis://USER:PASSWORD@HOST:PORT/0 (the user may be empty)."
    )


def _reason(error: Exception) -> str:
    return type(error).__name__ if not str(error) else str(error).rstrip(".")
