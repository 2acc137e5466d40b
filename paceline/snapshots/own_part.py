"""Own part of a snapshot: what one rank alone has (shards, residuals, unsummed values)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from paceline.errors import CommError
from paceline.replica.state_parts import POSITION, RANK, parts_of
from paceline.state.state_bytes import pack_state, unpack_state


@dataclass(frozen=True, kw_only=True)
class OwnPart:
    """What a snapshot has of one rank alone.

    Attributes:
        state: the rank's own state, besides model and optimizer (`RankState.local`).
        sent: the rank's values of the steps before the snapshot that weren't summed yet.
    """

    state: Mapping[str, Any]
    sent: Mapping[int, Tensor]

    @classmethod
    def of(cls, state: Mapping[str, Mapping[Any, Any]], pairs: int) -> Self:
        """Return the own part of a held snapshot, whose memory it shares.

        Args:
            state: the snapshot's parts.
            pairs: the number of pairs of a model and an optimizer.
        """
        own = {str(pair): parts_of(state, pair)[RANK] for pair in range(pairs)}
        return cls(state=own if pairs > 1 else own["0"], sent=state[POSITION]["sent"])

    def pack(self) -> list[memoryview]:
        """Return the part as chunks of bytes to be joined, which share its tensors' memory."""
        return pack_state({"state": self.state, "sent": self.sent})

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> Self:
        """Return the part that such bytes contain; its tensors are views of them.

        Raises:
            CommError: the bytes are something else.
        """
        tree = unpack_state(data)
        if not isinstance(tree, dict) or tree.keys() != {"state", "sent"}:
            raise CommError("A copy of another rank's state has other entries than a part has.")
        return cls(state=tree["state"], sent=tree["sent"])
