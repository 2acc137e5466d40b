"""The witness: one more acceptor of the vote on the next generation, whose record is in a store.

    value of the key    nonce | random tag of the write | record       a line each; the record is
                                                                       the caller's text
    nonce               random, and the id of the store's server

An answer replaces the value whole by compare-and-set. The value is created once for a start of the
run, and never again: where its nonce is missing (an emptied folder, a flushed server), or the
server has another id (it was restarted, and may have forgotten an answer), the witness is
a missing vote. The id is compared last, after the write: if it is the same then, so it was
at the write.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from torch._C._distributed_c10d import Store

from paceline.cluster.jitter import jitter
from paceline.cluster.stores.polled_store import PolledStore
from paceline.cluster.stores.store_spec import STORE_ERRORS, first_line
from paceline.errors import CommError

_T = TypeVar("_T")

_LIMIT_S = 3.0
_RANDOM_BYTES = 16


class WitnessUnreachable(CommError):
    """Error of an answer of the witness that is missing: it counts as a missing vote.

    The record may have been replaced: an answer that comes too late is lost.
    """


class Witness:
    """Witness of a generation.

    Args:
        store: the store that `create` was given, or another one of the same space.
        nonce: what `create` returned.
        key: the key that `create` was given.
        limit: seconds that an answer may take.
    """

    def __init__(
        self, store: Store, nonce: str, *, key: str = "witness", limit: float = _LIMIT_S
    ) -> None:
        assert isinstance(store, PolledStore)
        self._store = store
        self._nonce = nonce
        self._key = key
        self._limit = limit
        self._turn = threading.Lock()
        self._thread: threading.Thread | None = None  # of the last call

    @staticmethod
    def create(store: Store, *, key: str = "witness") -> str:
        """Create the witness, unless it is there; return its nonce.

        Args:
            store: the store of this start of the run.
            key: a key that nothing else uses.

        Returns:
            the nonce, the same one for each caller; "" where the store can be no witness, because
            a process of the run or its launcher serves it.

        Raises:
            ConfigError: the store can't be written.
            CommError: the store can't be reached.
        """
        # A store inside the run is lost with the machine that
        # serves it: it can't break a tie about that machine.
        if not isinstance(store, PolledStore) or store.served_by_run:
            return ""
        nonce = f"{secrets.token_hex(_RANDOM_BYTES)}-{store.server_id()}"
        value = store.compare_set(key, "", _value(nonce, ""))
        store.persist(key)
        return value.decode().partition("\n")[0]

    def answer(self, function: Callable[[str], tuple[str, _T]]) -> _T:
        """Replace the record.

        Args:
            function: returns the new record for the current one, and the answer. It is called
                again, in a thread of its own, where another process replaced the record first. The
                first record of all is "".

        Returns:
            the answer.

        Raises:
            WitnessUnreachable: the store can't be reached in time, or has lost the record.
        """
        deadline = time.monotonic() + self._limit
        return self._in_thread(lambda: self._replace(function, deadline), deadline)

    def keep_alive(self) -> None:
        """Renew the record's time to live in stores that have one: call it every few minutes.

        Raises:
            WitnessUnreachable: the store can't be reached in time.
        """
        deadline = time.monotonic() + self._limit
        self._in_thread(lambda: self._store.set(f"{self._key}/alive", ""), deadline)

    def _replace(self, function: Callable[[str], tuple[str, _T]], deadline: float) -> _T:
        while True:
            old = self._store.read([self._key])[0] or b""
            nonce, _, rest = old.decode(errors="replace").partition("\n")
            if nonce != self._nonce:
                raise self._missing("it has lost the record")
            text = rest.partition("\n")[2]
            new, result = function(text)
            if time.monotonic() > deadline:  # the caller has given up
                raise self._late()
            if new == text or self._compare_set(old, _value(nonce, new)):
                self._store.persist(self._key)
                # Compared last: a server that was restarted
                # before the write may have forgotten an answer.
                if self._store.server_id() != nonce.partition("-")[2]:
                    raise self._missing("its server was restarted")
                return result
            time.sleep(jitter(0, 0.002))

    def _compare_set(self, old: bytes, new: str) -> bool:
        """Replace the value; the tag in it tells whether this call did."""
        return self._store.compare_set(self._key, old, new) == new.encode()

    def _in_thread(self, call: Callable[[], _T], deadline: float) -> _T:
        """Call in a thread, which a folder whose server is gone may keep for ever."""
        # One call at a time: a second one could be answered first, by an older record.
        if not self._turn.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise self._late()
        try:
            if self._thread is not None:
                self._thread.join(max(0.0, deadline - time.monotonic()))
                if self._thread.is_alive():
                    raise self._late()
            outcome: Future[_T] = Future()
            self._thread = threading.Thread(
                target=_run, args=(call, outcome), name="witness", daemon=True
            )
            self._thread.start()
            return outcome.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise self._late() from None
        except STORE_ERRORS as error:
            if isinstance(error, WitnessUnreachable):
                raise
            raise self._missing(first_line(error)) from error
        finally:
            self._turn.release()

    def _late(self) -> WitnessUnreachable:
        return self._missing(f"no answer within {self._limit:g} s")

    def _missing(self, reason: str) -> WitnessUnreachable:
        return WitnessUnreachable(
            f"The witness in the store can't answer ({reason}): its vote is missing."
        )


def _run(call: Callable[[], _T], outcome: Future[_T]) -> None:
    try:
        outcome.set_result(call())
    except BaseException as error:
        outcome.set_exception(error)


def _value(nonce: str, record: str) -> str:
    return f"{nonce}\n{secrets.token_hex(_RANDOM_BYTES)}\n{record}"
