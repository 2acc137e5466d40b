"""What NIXL does for a window: writes into peers' registered memory, and notifications.

NIXL (https://github.com/ai-dynamo/nixl) moves bytes by UCX: RDMA where there is such a network, TCP
elsewhere. Its own thread would poll without a pause, so there is none: whoever calls `arrived` or
`done` moves the bytes. One thread makes all calls.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from paceline.comm.nixl.memory_registration import RegisteredMemory
from paceline.errors import CommError, ConfigError

# Not the ways between processes of one machine: by them a sender writes at an address, whatever is
# there by then (process_vm_writev). Windows in shared memory are for that.
_TRANSPORTS = "TLS=^sm"
# UCX ends the process if it is closed with something left for a peer that is dead; it drops that
# when it is looked into.
_LAST_LOOKS = 100


def require_nixl() -> None:
    """Look whether NIXL is installed.

    Raises:
        ConfigError: it isn't.
    """
    if find_spec("nixl") is None:
        raise ConfigError(
            "windows by NIXL need its package, which isn't installed; run "
            "pip install 'paceline[nixl]'."
        )


class NixlAgent:
    """This process's end of NIXL.

    Args:
        name: what it is; made unique here.

    Raises:
        ConfigError: NIXL isn't installed.
        CommError: it can't be started.
    """

    def __init__(self, name: str) -> None:
        require_nixl()
        api = _quiet(import_module, "nixl._api")
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._peers: list[str] = []
        self._open: list[Any] = []  # transfers
        self._registered = RegisteredMemory(self._register, self._deregister)
        self._agent: Any = _quiet(api.nixl_agent, f"{name} {secrets.token_hex(8)}", config)
        try:
            _quiet(self._agent.create_backend, "UCX", {"engine_config": _TRANSPORTS})
        except Exception as error:  # NIXL's have no base of their own
            raise CommError(f"NIXL can't start UCX: {error}.") from error

    def take(self, memory: Tensor) -> None:
        """Let NIXL read and write (bytes,) of uint8."""
        self._registered.take(memory.data_ptr(), memory.numel())

    def give_back(self, memory: Tensor) -> None:
        """Say that NIXL needs it no longer."""
        self._registered.give_back(memory.data_ptr(), memory.numel())

    def card(self) -> bytes:
        """Return what a peer needs to know to write here."""
        card: bytes = self._agent.get_agent_metadata()
        return card

    def meet(self, card: bytes) -> str:
        """Connect to a peer; return its name.

        Raises:
            CommError: it can't be reached.
        """
        try:
            name = self._agent.add_remote_agent(card)
        except Exception as error:  # NIXL's have no base of their own
            raise CommError(f"{error}") from error
        self._peers.append(name if isinstance(name, str) else name.decode())
        return self._peers[-1]

    def write(
        self, name: str, pieces: Sequence[tuple[int, int]], target: int, message: bytes
    ) -> Any:
        """Start to write registered bytes into a peer's memory, and to tell it then.

        Args:
            name: the peer's.
            pieces: the addresses and the numbers of the bytes.
            target: the address there, where they land one behind another.
            message: what the peer's `arrived` returns when they are there; empty: nothing.

        Returns:
            what `done` takes.
        """
        here, there = [], []
        for address, size in pieces:
            here.append((address, size, 0))
            there.append((target, size, 0))
            target += size
        lies = [self._agent.get_xfer_descs(each, "DRAM") for each in (here, there)]
        transfer = self._agent.initialize_xfer("WRITE", *lies, name, message)
        self._open.append(transfer)
        self._agent.transfer(transfer)
        return transfer

    def done(self, transfer: Any) -> bool:
        """Tell whether the bytes have left their memory, and let go of the transfer then.

        Raises:
            CommError: they can't arrive.
        """
        state = self._agent.check_xfer_state(transfer)
        if state == "ERR":
            raise CommError("a transfer failed")
        if state == "DONE":
            transfer.release()
            self._open.remove(transfer)
        return bool(state == "DONE")

    def tell(self, name: str, message: bytes) -> None:
        """Send a peer a message without bytes."""
        self._agent.send_notif(name, message)

    def arrived(self) -> list[tuple[str, bytes]]:
        """Return who has told what since the last call; the bytes before it are there."""
        told = self._agent.get_new_notifs()
        return [(name, message) for name, messages in told.items() for message in messages]

    def close(self) -> None:
        """Let go of what isn't done, of peers and of memory: nobody writes here any more.

        In this order, and not when Python collects its garbage: a transfer that is released after
        its peer ends the process.
        """
        for transfer in self._open:
            self._release(transfer)
        self._open.clear()
        for _ in range(_LAST_LOOKS):
            self.arrived()
        for name in self._peers:
            with suppress(Exception):
                self._agent.remove_remote_agent(name)
        self._registered.close()
        self._agent = None

    def _release(self, transfer: Any) -> None:
        for _ in range(_LAST_LOOKS):
            with suppress(Exception):  # it can't be stopped now, but perhaps soon
                transfer.release()
                return
            self.arrived()
        transfer._released = True  # keeps `__del__` from trying once more

    def _register(self, address: int, size: int) -> Any:
        return self._agent.register_memory([(address, size, 0, "")], "DRAM")

    def _deregister(self, registration: Any) -> None:
        self._agent.deregister_memory(registration)


def _quiet(call: Any, *arguments: Any) -> Any:
    """Call NIXL without its announcements on the terminal."""
    logger = logging.getLogger("nixl")
    result = call(*arguments)
    logger.setLevel(max(logger.level, logging.WARNING))
    return result
