"""Wrapper of NIXL: writes into peers' registered memory, and notifications.

NIXL (https://github.com/ai-dynamo/nixl) moves bytes by UCX: RDMA where there is such a network, TCP
elsewhere. Its own thread would poll without a pause, so there is none: calls of `arrived` and
`done` move the bytes. One thread makes all calls.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from paceline.comm.nixl.memory_registration import RegisteredMemory
from paceline.errors import CommError, ConfigError, Message

# UCX's shared-memory transports are disabled: with them a sender writes at an address, whatever is
# mapped there by then (process_vm_writev). Inside a machine, windows share memory themselves.
_TRANSPORTS = "TLS=^sm"
# UCX aborts the process if it is closed with something left for a dead peer; it drops that when it
# is polled.
_LAST_POLLS = 100


def require_nixl() -> None:
    """Require that NIXL is installed.

    Raises:
        ConfigError: it is not.
    """
    if find_spec("nixl") is None:
        raise ConfigError(
            Message(
                "{--transport} nixl needs the NIXL package, which is not installed; run pip "
                "install 'paceline[nixl]'."
            )
        )


class NixlAgent:
    """Wrapper of this process's NIXL agent.

    Args:
        name: prefix of the agent's name; the constructor makes the name unique.

    Attributes:
        memory: registrations of the memory that NIXL may read and write.

    Raises:
        ConfigError: NIXL is not installed.
        CommError: NIXL cannot start.
    """

    def __init__(self, name: str) -> None:
        require_nixl()
        api = _quiet(import_module, "nixl._api")
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._peers: list[str] = []
        self._open: list[Any] = []  # transfers
        self._agent: Any = _quiet(api.nixl_agent, f"{name} {secrets.token_hex(8)}", config)
        self.memory = RegisteredMemory(self._agent)
        try:
            _quiet(self._agent.create_backend, "UCX", {"engine_config": _TRANSPORTS})
        except Exception as error:  # NIXL's have no base of their own
            raise CommError(f"NIXL cannot start UCX: {error}.") from error

    def metadata(self) -> bytes:
        """Return what a peer needs to write into this process."""
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def connect(self, metadata: bytes) -> str:
        """Connect to a peer; return its name.

        Raises:
            CommError: it cannot be reached.
        """
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:  # NIXL's have no base of their own
            raise CommError(f"{error}") from error
        self._peers.append(name if isinstance(name, str) else name.decode())
        return self._peers[-1]

    def write(
        self, name: str, pieces: Sequence[tuple[int, int]], target: int, message: bytes
    ) -> Any:
        """Start to write registered bytes into a peer's memory, and then to notify it.

        Args:
            name: the peer's.
            pieces: the addresses and the numbers of the bytes.
            target: the address there, where they land one behind another.
            message: what the peer's `arrived` returns when they are there; empty: nothing.

        Returns:
            what `done` takes.
        """
        here = []
        there = []
        for address, size in pieces:
            here.append((address, size, 0))
            there.append((target, size, 0))
            target += size
        descriptors = [self._agent.get_xfer_descs(each, "DRAM") for each in (here, there)]
        transfer = self._agent.initialize_xfer("WRITE", *descriptors, name, message)
        self._open.append(transfer)
        self._agent.transfer(transfer)
        return transfer

    def done(self, transfer: Any) -> bool:
        """Return whether the bytes have been sent, and release the transfer then.

        Raises:
            CommError: they cannot arrive.
        """
        state = self._agent.check_xfer_state(transfer)
        if state == "ERR":
            raise CommError("a transfer failed")
        if state == "DONE":
            transfer.release()
            self._open.remove(transfer)
        return bool(state == "DONE")

    def notify(self, name: str, message: bytes) -> None:
        """Send a peer a message without bytes."""
        self._agent.send_notif(name, message)

    def arrived(self) -> list[tuple[str, bytes]]:
        """Return the messages since the last call, by peer; the bytes before each have landed."""
        arrived = self._agent.get_new_notifs()
        return [(name, message) for name, messages in arrived.items() for message in messages]

    def close(self) -> None:
        """Release unfinished transfers, peers and memory: no peer writes here any more.

        In this order, and not when Python collects its garbage: releasing a transfer after its
        peer aborts the process.
        """
        for transfer in self._open:
            self._release(transfer)
        self._open.clear()
        for _ in range(_LAST_POLLS):
            self.arrived()
        for name in self._peers:
            with suppress(Exception):
                self._agent.remove_remote_agent(name)
        self.memory.close()
        self._agent = None

    def _release(self, transfer: Any) -> None:
        for _ in range(_LAST_POLLS):
            with suppress(Exception):  # it may be possible after another poll
                transfer.release()
                return
            self.arrived()
        transfer._released = True  # keeps `__del__` from trying once more


def _quiet(call: Any, *arguments: Any) -> Any:
    """Call NIXL without its announcements on the terminal."""
    logger = logging.getLogger("nixl")
    result = call(*arguments)
    logger.setLevel(max(logger.level, logging.WARNING))
    return result
