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
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from paceline.cluster.stores.polled_store import PolledStore, as_bytes
from paceline.errors import CommError, ConfigError

_TIME_TO_LIVE_S = 3600
"""How long the keys outlive the last write."""

_CONNECT_S = 3.0
_ANSWER_S = 10.0
_REFUSALS = (redis.AuthenticationError, redis.exceptions.NoPermissionError)

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
    """Key-value store in one hash of a Redis server.

    Args:
        address: redis://[:PASSWORD@]HOST:PORT/DATABASE, or rediss:// for TLS.
        space: the name of the hash.
        timeout: seconds that `get` waits; also the default timeout of `wait`.
        make: unused: Redis creates the hash at the first write.

    Raises:
        ConfigError: the URL can't be read, or the server refuses the password.
        CommError: the server can't be reached.
    """

    def __init__(self, address: str, space: str, timeout: timedelta, *, make: bool = False) -> None:
        super().__init__(address, space, timeout)
        try:
            self._client = redis.Redis.from_url(
                address,
                socket_connect_timeout=_CONNECT_S,
                socket_timeout=_ANSWER_S,
                # redis-py repeats a command whose answer is lost, by which `add` would count twice.
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError:
            raise ConfigError(
                "--redis_url can't be read: give redis://:PASSWORD@HOST:PORT/0, or rediss:// for "
                "TLS."
            ) from None
        self._compare_set = self._client.register_script(_COMPARE_SET)
        self._append = self._client.register_script(_APPEND)
        with self._translated_errors():
            self._client.ping()

    @property
    def host(self) -> str:
        return urlsplit(self.address).hostname or ""

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        with self._translated_errors():
            values: Any = self._client.hmget(self.space, list(keys))
        return list(values)

    def set(self, key: str, value: str | bytes) -> None:
        with self._translated_errors(), self._client.pipeline() as pipeline:
            pipeline.hset(self.space, key, as_bytes(value))
            pipeline.expire(self.space, _TIME_TO_LIVE_S)
            pipeline.execute()

    def add(self, key: str, value: int) -> int:
        with self._translated_errors(), self._client.pipeline() as pipeline:
            pipeline.hincrby(self.space, key, value)
            pipeline.expire(self.space, _TIME_TO_LIVE_S)
            total: int = pipeline.execute()[0]
        return total

    def append(self, key: str, value: str | bytes) -> None:
        with self._translated_errors():
            self._append(keys=[self.space], args=[key, as_bytes(value), _TIME_TO_LIVE_S])

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        values = [as_bytes(expected_value), as_bytes(desired_value)]
        with self._translated_errors():
            result: Any = self._compare_set(keys=[self.space], args=[key, *values, _TIME_TO_LIVE_S])
        return bytes(result)

    def delete_key(self, key: str) -> bool:
        with self._translated_errors():
            return bool(self._client.hdel(self.space, key))

    def erase(self) -> None:
        """Remove all keys."""
        with self._translated_errors():
            self._client.delete(self.space)

    def server_id(self) -> str:
        """Return the server's `run_id`, a new one at each of its starts."""
        with self._translated_errors():
            facts: Any = self._client.info("server")
        return str(facts["run_id"])

    def close(self) -> None:
        self._client.close()

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        # `from None`: redis-py's own errors may quote the URL, and with it the password.
        url = urlsplit(self.address)
        server = f"The Redis server at {url.hostname}:{url.port or 6379}"
        try:
            yield
        except (redis.RedisError, OSError) as error:
            reason = str(error).rstrip(".") or type(error).__name__
            if isinstance(error, _REFUSALS) or reason.startswith(("NOAUTH", "WRONGPASS", "NOPERM")):
                raise ConfigError(
                    f"{server} refused the user or the password: give them as "
                    "--redis_url redis://USER:PASSWORD@HOST:PORT/0 (the user may be empty)."
                ) from None
            if isinstance(error, redis.ResponseError):
                raise CommError(f"{server} reported an error: {error}.") from None
            raise CommError(
                f"{server} can't be reached ({reason}): check that it runs there and that this "
                "machine may connect."
            ) from None
