"""Tables of `paceline ledger`: generations, epochs; the verdict in a sentence, faults and notes.

Epochs and steps are shown from 1; positions in an epoch are from 0, as in the event files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple
from itertools import groupby

from rich.console import Console, ConsoleRenderable
from rich.table import Table
from rich.text import Text

from paceline.errors import many
from paceline.observe.ledger import Fault, GenerationAccount, Proof

_ROWS = 12  # up to so many epochs have a row each; beyond, equal ones share a row
_NAMED = 8  # members of a generation
_SHOWN = 5  # faults, and notes, at most


def print_proof(proof: Proof, console: Console) -> None:
    """Print the verdict on a run."""
    for line in _generations(proof.generations):
        console.print(Text(line), soft_wrap=True)
    if proof.accounts:
        console.print(_table(proof))
    for line in [verdict(proof), *_few(_faults(proof), proof.fault_count), *_few(proof.notes)]:
        console.print(Text(line), soft_wrap=True)


def verdict(proof: Proof) -> str:
    """Return the verdict on a run as a sentence."""
    if not proof.exact:
        lost = sum(account.lost for account in proof.accounts)
        twice = sum(account.twice for account in proof.accounts)
        return f"Not exact: {lost:,} samples were lost, {twice:,} were duplicated or misplaced."
    done = proof.done - proof.base
    committed = proof.committed - proof.base
    of_all = "" if proof.extent.epochs is None else f" of {proof.extent.total:,}"
    each = "position in the sampler's order" if proof.extent.drawn else "sample"
    parts = [f"Exact: each {each} was trained exactly once, in {done:,}{of_all} steps"]
    parts.append("all committed" if committed == done else f"{committed:,} of them committed")
    if proof.begun > proof.done:
        parts.append(f"{proof.begun - proof.done:,} more in progress")
    if proof.base:
        parts.append(f"the first {proof.base:,} trained by the run of the loaded checkpoint")
    skipped = sum(account.skipped for account in proof.accounts)
    if skipped:
        parts.append(f"{skipped:,} unreadable samples skipped")
    substituted = sum(account.substituted for account in proof.accounts)
    if substituted:
        parts.append(
            f"{substituted:,} samples proved by other members' lines alone: inferred from the data "
            "order that these recorded"
        )
    return ", ".join(parts) + "."


def _generations(generations: Sequence[GenerationAccount]) -> Iterator[str]:
    """Yield a line on each generation; of many, on the first few and the last ones."""
    half = _ROWS // 2
    left_out = len(generations) - 2 * half
    for row, each in enumerate(generations):
        if left_out > 0 and half <= row < len(generations) - half:
            if row == half:
                yield f"… {left_out:,} more generations …"
            continue
        number = "" if each.number is None else f" {each.number}"
        id_ = f" {each.id}" if each.id else ""
        members = ", ".join(each.members[:_NAMED]) or "no event file"
        if len(each.members) > _NAMED:
            members += f" and {len(each.members) - _NAMED:,} more"
        if not each.in_lineage:
            counts = "void: it isn't an ancestor of the newest generation"
        elif each.first == each.end:
            counts = "no step counts"
        elif each.end - each.first == 1:
            counts = f"step {each.end:,} counts"
        else:
            counts = f"steps {each.first + 1:,} to {each.end:,} count"
        yield f"Generation{number}{id_}: after {many(each.start, 'step')}; {counts}; {members}"


def _table(proof: Proof) -> ConsoleRenderable:
    table = Table(pad_edge=False)
    skipped = any(account.skipped for account in proof.accounts)
    names = ("epoch", "samples", "once", *(["skipped"] if skipped else []), "lost", "twice")
    for name in (*names, "committed"):
        table.add_column(name, justify="right")
    few = len(proof.accounts) <= _ROWS  # otherwise consecutive equal epochs share a row
    for _, group in groupby(proof.accounts, lambda a: (a.epoch if few else -1, *astuple(a)[1:])):
        accounts = list(group)
        first = accounts[0]
        last = accounts[-1]
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


def _faults(proof: Proof) -> list[str]:
    return [f"{_where(proof, fault)}: {fault.text}" for fault in proof.faults]


def _few(sentences: Sequence[str], count: int | None = None) -> Iterator[str]:
    """Yield the first few of `count` sentences, by default of all."""
    yield from (f"  {sentence}" for sentence in sentences[:_SHOWN])
    more = (count or len(sentences)) - _SHOWN
    if more > 0:
        yield f"  … and {more:,} more."


def _where(proof: Proof, fault: Fault) -> str:
    """Return where a fault is, as the console counts and as the event files do."""
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
    """Return the number of epochs as a suffix, where it is known."""
    epochs = proof.extent.epochs
    return "" if epochs is None else f"/{epochs}"
