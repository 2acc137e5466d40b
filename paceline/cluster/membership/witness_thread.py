"""The witness's answers, asked for in a thread of their own: its store may not answer at all."""

from __future__ import annotations

import queue
import threading
from contextlib import suppress
from functools import partial
from typing import Protocol

from paceline.cluster.membership.voting.messages import Answer, Request
from paceline.cluster.membership.voting.witness_rules import WitnessRecord, answer
from paceline.cluster.membership.witness import Witness, WitnessUnreachable

# Redis and etcd forget a run's keys an hour after the last write.
_ALIVE_S = 120.0  # between renewals of the record's time to live
# A store that doesn't answer makes requests pile up; a proposer has sent a higher ballot since.
_WAITING = 4  # requests that wait for their answer; older ones are dropped


class WitnessClient(Protocol):
    """Protocol of what gets the witness's answers."""

    def post_answer(self, answer: Answer) -> None:
        """Take an answer, in the witness's thread."""


class WitnessThread:
    """Thread that asks the witness.

    Args:
        client: gets the answers.
    """

    def __init__(self, witness: Witness, client: WitnessClient) -> None:
        self._witness = witness
        self._client = client
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="witness", daemon=True)
        self._thread.start()

    def ask(self, request: Request) -> None:
        """Ask, without waiting; where the witness can't be reached there is no answer."""
        while self._requests.qsize() >= _WAITING:
            with suppress(queue.Empty):
                self._requests.get_nowait()
        self._requests.put(request)

    def close(self) -> None:
        """End the thread after the request that it is at; don't wait for it."""
        self._requests.put(None)

    def _run(self) -> None:
        while True:
            try:
                request = self._requests.get(timeout=_ALIVE_S)
            except queue.Empty:
                with suppress(WitnessUnreachable):
                    self._witness.keep_alive()
                continue
            if request is None:
                return
            with suppress(WitnessUnreachable):
                reply = self._witness.answer(partial(_reply, request))
                if reply is not None:
                    self._client.post_answer(reply)


def _reply(request: Request, text: str) -> tuple[str, Answer | None]:
    before = WitnessRecord.from_text(text) if text else None
    after, reply = answer(before, request)
    return ("" if after is None else after.to_text()), reply
