"""The ledger: a proof, from the ranks' own event files, that a run trained each sample once.

It knows nothing of the loader: positions of an epoch are 0 to N - 1, and batch t of B samples is
[t * B, min((t + 1) * B, N)).

    lines ── history (packed) ── lineages ── periods (whose lines count) ── segments ── proof
"""

from paceline.observe.ledger.faults import Fault
from paceline.observe.ledger.proof import EpochAccount, GenerationAccount, Proof, prove

__all__ = ["EpochAccount", "Fault", "GenerationAccount", "Proof", "prove"]
