"""Store over the control line, in which the process groups of a later generation meet.

The keys live in the generation's leader; the other members ask for them by frames of kind "store".

    request | store: prefix, id, operation, keys, values, number |   member -> leader
    answer  | store: prefix, answer: id, values, number          |   leader -> member
    cancel  | store: prefix, cancel: id                          |   the member waits no longer

The leader answers a request of operation "wait" once all its keys are there. Values are base64.
"""

from __future__ import annotations

import itertools
import threading
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self

from torch.distributed import DistStoreError

from paceline.cluster.membership.control_line.frames import JSON
from paceline.cluster.membership.control_line.line import ControlLine
from paceline.cluster.stores.polled_store import PolledStore, as_bytes

STORE = "store"
"""The kind of the frames."""

# Members enter a generation one after another, and the first ask before the leader has opened the
# store. More than these are none of a world that can form.
_MAX_EARLY = 4096


@dataclass(frozen=True, kw_only=True)
class _Request:
    """Request for keys; what it returns is the values of `keys` and a number."""

    operation: str
    keys: Sequence[str]
    values: Sequence[bytes] = ()
    number: int = 0


@dataclass(frozen=True)
class _Answer:
    values: list[bytes | None] = field(default_factory=list)
    number: int = 0


class ControlStore(PolledStore):
    """Store of one generation: served by its leader, used by all members.

    Args:
        leader: the leader's name on the line.
        own: whether this process is the leader.
        prefix: distinguishes the store from those of other generations.
        timeout: the limit of each operation.
    """

    def __init__(
        self, line: ControlLine, leader: str, own: bool, prefix: str, timeout: timedelta
    ) -> None:
        super().__init__(leader, prefix, timeout)
        self._line = line
        self._leader = leader
        self._own = own
        self._numbers = itertools.count()
        self._changed = threading.Condition()  # guards all that follows
        self._failure = ""
        self._table: dict[str, bytes] = {}  # the leader's
        self._waiting: dict[tuple[str, int], Sequence[str]] = {}  # requests to the leader
        self._answers: dict[int, _Answer | None] = {}  # of a member's requests; None: not yet

    def received(self, peer: str, body: Mapping[str, Any], bulk: bytes | bytearray = b"") -> None:
        """Handle a frame of this store; on the line's thread."""
        with self._changed:
            if "answer" in body:
                if body["answer"] in self._answers:
                    self._answers[body["answer"]] = _Answer(_decode(body["values"]), body["number"])
                    self._changed.notify_all()
            elif "cancel" in body:
                self._waiting.pop((peer, body["cancel"]), None)
            elif self._own and not self._failure:
                self._serve(peer, body)

    def lost(self, peer: str) -> None:
        """Handle the loss of a member; that of the leader ends all operations with an error."""
        with self._changed:
            for request in [request for request in self._waiting if request[0] == peer]:
                del self._waiting[request]
        if peer == self._leader and not self._own:
            self._fail(f"the connection to the generation's leader {peer} has ended")

    def close(self) -> None:
        """End all operations, also those that wait, with an error."""
        self._fail("this process has closed the store")

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        return self._ask(_Request(operation="read", keys=keys)).values

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = self._ask(_Request(operation="wait", keys=keys)).values
        return [value for value in values if value is not None]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit = None if timeout is None else timeout.total_seconds()
        self._ask(_Request(operation="wait", keys=keys), limit)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(_Request(operation="set", keys=[key], values=[as_bytes(value)]))

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(_Request(operation="append", keys=[key], values=[as_bytes(value)]))

    def add(self, key: str, value: int) -> int:
        return self._ask(_Request(operation="add", keys=[key], number=value)).number

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        values = as_bytes(expected_value), as_bytes(desired_value)
        answer = self._ask(_Request(operation="compare_set", keys=[key], values=values))
        return answer.values[0] or b""

    def delete_key(self, key: str) -> bool:
        return self._ask(_Request(operation="delete", keys=[key])).number > 0

    def num_keys(self) -> int:
        return self._ask(_Request(operation="count", keys=[])).number

    def getNumKeys(self) -> int:
        """Count the keys; the name by which C++ calls `num_keys`."""
        return self.num_keys()

    def clone(self) -> Self:
        return self

    def _ask(self, request: _Request, limit: float | None = None) -> _Answer:
        """Have the leader carry out a request, within `limit` seconds (default: the store's)."""
        limit = self.limit if limit is None else limit
        number = next(self._numbers)
        with self._changed:
            self._check_open()
            # The leader's own calls need no frame: they would wait on the thread that serves them.
            if self._own:
                return self._carry_out(request, limit)
            self._answers[number] = None
        try:
            if not self._line.send(self._leader, STORE, _to_body(self.space, number, request)):
                raise DistStoreError(
                    f"The generation's leader {self._leader}, which holds the store, is not "
                    "connected."
                )
            with self._changed:
                self._changed.wait_for(lambda: self._answers[number] or self._failure, limit)
                answer = self._answers[number]
                if answer is not None:
                    return answer
                self._check_open()
        finally:
            with self._changed:
                del self._answers[number]
        # Otherwise the leader would answer a request whose caller is gone, and keep it until then.
        self._line.send(self._leader, STORE, {"store": self.space, "cancel": number})
        raise _timed_out(limit, request.keys)

    def _carry_out(self, request: _Request, limit: float) -> _Answer:
        """Carry out a request of the leader's own; under the lock, which a wait releases."""
        if request.operation == "wait":
            self._changed.wait_for(lambda: self._failure or self._has(request.keys), limit)
            self._check_open()
            if not self._has(request.keys):
                raise _timed_out(limit, request.keys)
        return self._apply(request)

    def _serve(self, peer: str, body: Mapping[str, Any]) -> None:
        values = [value for value in _decode(body["values"]) if value is not None]
        keys = body["keys"]
        operation = body["operation"]
        if operation == "wait":
            self._waiting[peer, body["id"]] = keys
            self._answer_waiting()
            return
        request = _Request(operation=operation, keys=keys, values=values, number=body["number"])
        self._answer(peer, body["id"], self._apply(request))

    def _apply(self, request: _Request) -> _Answer:
        """Read or change the table; under the lock."""
        operation = request.operation
        keys = request.keys
        table = self._table
        if operation in ("read", "wait"):
            return _Answer([table.get(key) for key in keys])
        if operation == "count":
            return _Answer(number=len(table))
        key = keys[0]
        answer = _Answer()
        old = table.get(key)
        if operation == "set":
            table[key] = request.values[0]
        elif operation == "append":
            table[key] = (old or b"") + request.values[0]
        elif operation == "add":
            answer = _Answer(number=int(old or b"0") + request.number)
            table[key] = str(answer.number).encode()
        elif operation == "compare_set":
            expected, desired = request.values
            if (old or b"") == expected:
                table[key] = desired
            answer = _Answer([table.get(key, expected)])
        else:
            assert operation == "delete"
            answer = _Answer(number=int(table.pop(key, None) is not None))
        self._changed.notify_all()
        self._answer_waiting()
        return answer

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self._table for key in keys)

    def _answer_waiting(self) -> None:
        ready = [(request, keys) for request, keys in self._waiting.items() if self._has(keys)]
        for (peer, number), keys in ready:
            del self._waiting[peer, number]
            self._answer(peer, number, _Answer([self._table[key] for key in keys]))

    def _answer(self, peer: str, number: int, answer: _Answer) -> None:
        values = _encode(answer.values)
        body: dict[str, JSON] = {"store": self.space, "answer": number, "values": values}
        body["number"] = answer.number
        self._line.send(peer, STORE, body)

    def _fail(self, reason: str) -> None:
        with self._changed:
            self._failure = self._failure or reason
            self._waiting.clear()
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self._failure:
            raise DistStoreError(f"The store {self.space} can't be used: {self._failure}.")


class ControlStores:
    """Stores of this process by prefix; frames for a store that is not open yet wait for it.

    A member that learns of a generation before its leader does asks the leader early.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all that follows
        self._stores: dict[str, ControlStore] = {}
        self._closed: set[str] = set()
        self._early: deque[tuple[str, Mapping[str, Any]]] = deque(maxlen=_MAX_EARLY)

    def add(self, store: ControlStore) -> None:
        """Hand a store its frames, also those that came before it."""
        with self._lock:
            self._stores[store.space] = store
            mine = [frame for frame in self._early if frame[1].get("store") == store.space]
            for frame in mine:
                self._early.remove(frame)
            for peer, body in mine:
                store.received(peer, body)

    def remove(self, store: ControlStore) -> None:
        """Close a store, and drop frames for it from now on."""
        store.close()
        with self._lock:
            self._stores.pop(store.space, None)
            # A late request of a generation that ended would wait among the early ones for ever.
            self._closed.add(store.space)

    def received(self, peer: str, body: Mapping[str, Any]) -> None:
        """Handle a frame of kind "store"; on the line's thread."""
        prefix = body.get("store")
        with self._lock:
            store = self._stores.get(str(prefix))
            if store is None and prefix not in self._closed and "answer" not in body:
                self._early.append((peer, body))
        if store is not None:
            store.received(peer, body)

    def lost(self, peer: str) -> None:
        """Handle the loss of a peer."""
        with self._lock:
            stores = list(self._stores.values())
            kept = [frame for frame in self._early if frame[0] != peer]
            self._early = deque(kept, maxlen=_MAX_EARLY)
        for store in stores:
            store.lost(peer)


def _to_body(prefix: str, number: int, request: _Request) -> dict[str, JSON]:
    return {
        "store": prefix,
        "id": number,
        "operation": request.operation,
        "keys": list(request.keys),
        "values": _encode(request.values),
        "number": request.number,
    }


def _encode(values: Sequence[bytes | None]) -> list[JSON]:
    return [None if value is None else b64encode(value).decode() for value in values]


def _decode(values: Sequence[str | None]) -> list[bytes | None]:
    return [None if value is None else b64decode(value) for value in values]


def _timed_out(limit: float, keys: Sequence[str]) -> DistStoreError:
    return DistStoreError(f"wait timeout after {limit:g} s, keys: {', '.join(keys)}")
