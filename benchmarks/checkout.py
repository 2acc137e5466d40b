r"""Program that runs the ranks of another checkout by that checkout's own code, told by lines.

    parent    ◀── {"package": "/…/paceline", "methods": ["none", …], "models": ["gpt", …]}\n
              ──▶ {"machines": […], "work": {…}, "ranks": 2}\n           start ranks
              ◀── "ready"\n
              ──▶ {"row": "notified", "steps": 5}\n                      as often as wished
              ◀── 402.1\n                                                milliseconds a step
              ──▶ {}\n                                                   end the ranks
              ◀── "ended"\n

It ends with its input, or by SIGTERM, and its ranks with it.

The program imports nothing of the checkout that it stands in: with `python -P` and the other one's
folders in PYTHONPATH, all modules are the other one's, in its ranks as well. Of these modules it
needs what every checkout has had so far. Renaming one of them cuts older checkouts off:

    variants.py                                     the program that a rank runs
    variants.MAKERS                                 its keys are the methods that rows may name
    links.Machine(address, interface, enter)
    ranks.start(machines, program, work, ranks)     a context manager; gives what has `turn`
    .turn(row, steps)                               milliseconds a step, over all ranks
    work: rows, model, image_size, batch, dtype

What it may lack is `models.MODELS`, whose keys are the models that the zoo doesn't have.
"""

from __future__ import annotations

import json
import signal
import sys
from importlib import import_module
from pathlib import Path

import links
import ranks
import variants

import paceline


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the ranks
    package, methods = str(Path(paceline.__file__).parent), list(variants.MAKERS)
    _answer({"package": package, "methods": methods, "models": _models()})
    while line := sys.stdin.readline():
        told = json.loads(line)
        machines = [links.Machine(**machine) for machine in told["machines"]]
        program = Path(variants.__file__)
        with ranks.start(machines, program, told["work"], told["ranks"]) as started:
            _answer("ready")
            while told := json.loads(sys.stdin.readline() or "null"):
                _answer(started.turn(told["row"], told["steps"]))
        if told is None:  # the parent is gone
            return
        _answer("ended")


def _models() -> list[str]:
    try:
        return list(import_module("models").MODELS)
    except ModuleNotFoundError:
        return []


def _answer(value: object) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
