"""How `paceline ledger` shows a proof: a row an epoch, a sentence, and what isn't exact.

Epochs and steps count from 1 for people, positions in an epoch from 0 as in the event files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple
from itertools import groupby

from rich.console import Console, ConsoleRenderable
from rich.table import Table
from rich.text import Text

from paceline.observe.ledger import EpochAccount, Fault, Proof

_ROWS = 12  # epochs that are shown one by one; of more, like ones share a row
_FAULTS = 5  # that are told


def print_proof(proof: Proof, console: Console) -> None:
    """Print what a run's event files prove."""
    if proof.accounts:
        console.print(_table(proof))
    for line in [verdict(proof), *_faults(proof)]:
        console.print(Text(line), soft_wrap=True)


def verdict(proof: Proof) -> str:
    """Sum a proof up in a sentence or two."""
    if not proof.exact:
        lost = sum(account.lost for account in proof.accounts)
        twice = sum(account.twice for account in proof.accounts)
        return f"Not exact: {lost:,} samples lost, {twice:,} twice or out of place."
    done, committed = proof.done - proof.base, proof.committed - proof.base
    of_all = "" if proof.extent.epochs is None else f" of {proof.extent.total:,}"
    parts = [f"Exact: each sample was trained once, in {done:,}{of_all} steps"]
    parts.append("all committed" if committed == done else f"{committed:,} of them committed")
    if proof.begun > proof.done:
        parts.append(f"{proof.begun - proof.done:,} more under way")
    if proof.base:
        parts.append(f"the first {proof.base:,} came with another run's checkpoint")
    skipped = sum(account.skipped for account in proof.accounts)
    if skipped:
        parts.append(f"unreadable ones left out: {skipped:,}")
    return ", ".join(parts) + "."


def _table(proof: Proof) -> ConsoleRenderable:
    table = Table(pad_edge=False)
    skipped = any(account.skipped for account in proof.accounts)
    names = ("epoch", "samples", "once", *(["left out"] if skipped else []), "lost", "twice")
    for name in (*names, "committed"):
        table.add_column(name, justify="right")
    for accounts in _rows(proof.accounts):
        first, last = accounts[0], accounts[-1]
        numbers = [first.owed, first.once, *([first.skipped] if skipped else [])]
        numbers += [first.lost, first.twice, first.committed]
        epochs = f"{first.epoch + 1}" + (f"–{last.epoch + 1}" if last is not first else "")
        wrong = first.lost or first.twice
        table.add_row(
            f"{epochs}{_of(proof)}",
            *(f"{number:,}" for number in numbers),
            style="red" if wrong else None,
        )
    return table


def _rows(accounts: Sequence[EpochAccount]) -> Iterator[list[EpochAccount]]:
    """Yield the epochs of each row: one, or consecutive like ones where there are many."""
    few = len(accounts) <= _ROWS
    for _, group in groupby(accounts, lambda a: (a.epoch if few else -1, *astuple(a)[1:])):
        yield list(group)


def _faults(proof: Proof) -> Iterator[str]:
    for fault in proof.faults[:_FAULTS]:
        yield f"  {_where(proof, fault)}: {fault.text}"
    if proof.fault_count > _FAULTS:
        yield f"  … and {proof.fault_count - _FAULTS:,} more."


def _where(proof: Proof, fault: Fault) -> str:
    """Name a fault's place, as the console counts and as the event files do."""
    if fault.step is None:
        return f"generation {fault.generation}"
    extent = proof.extent
    epoch, step = divmod(fault.step, extent.steps)
    more = f" and the {fault.steps - 1:,} after it" if fault.steps > 1 else ""
    return (
        f"epoch {epoch + 1}{_of(proof)}, step {step + 1}/{extent.steps}{more} "
        f'(generation {fault.generation}, "step": {fault.step})'
    )


def _of(proof: Proof) -> str:
    """Tell of how many epochs one is, where that is known."""
    epochs = proof.extent.epochs
    return "" if epochs is None else f"/{epochs}"
