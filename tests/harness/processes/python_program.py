"""A Python program, as a command names it: read from the command, and run in this process."""

from __future__ import annotations

import os
import runpy
import shutil
import sys
import types
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent
_HARMLESS = {"-I", "-S", "-P", "-B"}  # options that change nothing once torch is there
_UNBUFFERED = "-u"
_search_path = sys.path[1:]


@dataclass(frozen=True)
class Program:
    """A Python program: a module, a file or code, and its arguments."""

    kind: str
    name: str
    arguments: Sequence[str]
    warnings_are_errors: bool = False
    unbuffered: bool = False

    @classmethod
    def of(cls, argv: Sequence[str], environment: Mapping[str, str]) -> Program | None:
        """Read a command; None where it is no Python program of this environment."""
        first, *words = map(os.fspath, argv)
        found = shutil.which(first, path=environment.get("PATH"))
        if found is None or Path(found).absolute().parent != BIN:
            return None
        if not Path(found).name.startswith("python"):
            with Path(found).open("rb") as file:
                line = file.readline().decode(errors="replace").strip()
            python = Path(line.removeprefix("#!"))  # `python`, `python3` or `python3.11`
            own = python.parent == BIN and python.name.startswith("python")
            return cls("file", found, words) if own else None
        unbuffered = False
        while words and words[0] in {*_HARMLESS, _UNBUFFERED}:
            unbuffered |= words.pop(0) == _UNBUFFERED
        if errors := words[:2] == ["-W", "error"]:
            del words[:2]
        if len(words) >= 2 and words[0] in ("-m", "-c"):
            kind = {"-m": "module", "-c": "code"}[words[0]]
            return cls(kind, words[1], words[2:], errors, unbuffered)
        if not words or words[0][:1] == "-":
            return None
        return cls("file", words[0], words[1:], errors, unbuffered)

    @classmethod
    def forkable(
        cls, argv: Sequence[str], folder: Path | str | None, environment: Mapping[str, str]
    ) -> Program | None:
        """Read a command; None where a fork of this process isn't the same program."""
        program = cls.of(argv, environment) if _same_interpreter(environment) else None
        return None if program and program._has_other_paceline(folder, environment) else program

    def _has_other_paceline(
        self, folder: Path | str | None, environment: Mapping[str, str]
    ) -> bool:
        """Return whether it imports Paceline from another checkout than this one."""
        here = Path(folder or ".").absolute()
        first = here / Path(self.name).parent if self.kind == "file" else here
        own = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
        path = [first, *(here / name for name in own)]
        found = [each for each in path if (each / "paceline/__init__.py").exists()]
        return bool(found) and found[0].resolve() != ROOT

    def run(self) -> None:
        """Run it as the interpreter would."""
        if self.warnings_are_errors:
            warnings.simplefilter("error")
            sys.warnoptions.append("error")
        if self.unbuffered:  # or a test would wait for lines until 8 KB of them are there
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        start = {"module": os.getcwd(), "code": "", "file": str(Path(self.name).absolute().parent)}
        own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:] = [start[self.kind], *filter(None, own), *_search_path]
        sys.argv[:] = [{"module": self.name, "code": "-c", "file": self.name}[self.kind]]
        sys.argv += self.arguments
        if self.kind == "module":
            sys.modules.pop(self.name, None)
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        elif self.kind == "file":
            main = types.ModuleType("__main__")
            main.__file__ = self.name
            sys.modules["__main__"] = main
            exec(compile(Path(self.name).read_bytes(), self.name, "exec"), main.__dict__)
        else:
            main = types.ModuleType("__main__")
            sys.modules["__main__"] = main
            exec(compile(self.name, "<string>", "exec"), main.__dict__)


def _same_interpreter(environment: Mapping[str, str]) -> bool:
    """Return whether no variable is for the interpreter's start alone."""

    def own(variables: Mapping[str, str]) -> dict[str, str]:
        return {k: v for k, v in variables.items() if k[:6] == "PYTHON" and k != "PYTHONPATH"}

    return own(environment) == own(os.environ)
