"""Write docs/reference/commands.md and commands-more.md: every command and flag.

    python docs/make_commands.py

They are made from the configuration.
A flag's name, type and default are a dataclass's field, its meaning the text below the field.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from paceline.cli.flags import aliases
from paceline.cli.main import COMMANDS
from paceline.config.active_run import StatusConfig, StopConfig
from paceline.config.db import DbConvertConfig, DbCreateConfig, DbInfoConfig
from paceline.config.evaluate import EvaluateConfig
from paceline.config.export import ExportConfig
from paceline.config.ledger import LedgerConfig
from paceline.config.plan import PlanConfig
from paceline.config.predict import PredictConfig
from paceline.config.runs import CompareConfig, PlotConfig, RunsConfig
from paceline.config.serve import ServeConfig
from paceline.config.train import TrainConfig
from paceline.config.zoo import ZooConfig

FOLDER = Path(__file__).with_name("reference")
WIDTH = 100
WORDS = {int: "N", float: "X", str: "TEXT", Path: "PATH", NoneType: "None"}

HEAD = """\
# Commands

Made by `python docs/make_commands.py` from `paceline/config`; don't edit it here.

`paceline COMMAND --help` shows a command's flags with examples, and `paceline --version` shows the
version. In the name of a flag, `-` may replace `_`. A switch may have a value, as in `--use_cpu
True`. The default value of each flag is in parentheses. The exit status is 0 for success, 2 for a
mistake on the command line, 1 for any other failure, 130 after Ctrl-C and 143 after SIGTERM.

This page has the flags of `train` and `launch`; [more commands](commands-more.md) has the others'.
"""

MORE = """\
# More commands

Made by `python docs/make_commands.py` from `paceline/config`; don't edit it here.

[Commands](commands.md) says what all commands have in common, and has `train` and `launch`.
"""

LAUNCH = """\
## paceline launch

`paceline launch [FLAGS] [--] COMMAND`

The flags are those of `paceline train` under "World", and `-n`. COMMAND begins after `--`, or at
the first word that is not a flag.

- **`--num_servers N`** (0): Number of parameter servers to start on machine 0, for a script with
  sync="server".
- **`-n N`**: `--num_workers N`. By default, there is one worker per GPU, or a single worker on
  a machine without GPUs.
"""


def documents() -> dict[str, str]:
    """Make the texts of the pages."""
    index = "".join(f"- `paceline {name}`: {what}\n" for name, (_, what) in COMMANDS.items())
    parts = [HEAD, index, "## paceline train\n", "`resnet50_trainer` is the same command.\n"]
    for part, config in get_type_hints(TrainConfig).items():
        parts += [f"### {part.capitalize()}\n", f"{config.__doc__}\n", *_flags(config)]
    parts.append(LAUNCH)
    more = [MORE]
    others = {
        "evaluate": EvaluateConfig,
        "export": ExportConfig,
        "predict": PredictConfig,
        "zoo": ZooConfig,
        "runs": RunsConfig,
        "compare": CompareConfig,
        "plot": PlotConfig,
        "serve": ServeConfig,
        "db create": DbCreateConfig,
        "db convert": DbConvertConfig,
        "db info": DbInfoConfig,
        "stop": StopConfig,
        "status": StatusConfig,
        "ledger": LedgerConfig,
        "plan": PlanConfig,
    }
    for name, config in others.items():
        usage = f"paceline {name} {_positionals(config) or '[FLAGS]'}"
        more += [f"## paceline {name}\n", f"`{usage}`\n"]
        more += _flags(config)
    return {"commands": "\n".join(parts), "commands-more": "\n".join(more)}


def _flags(config: type) -> Iterator[str]:
    hints, texts = get_type_hints(config, include_extras=True), dict(_texts(config))
    for field in fields(config):
        flag = f"**`{_usage(field, hints[field.name])}`**{_default(field)}"
        text = f"- {flag}: {texts[field.name]}".replace("<", r"\<")
        yield textwrap.fill(
            text, WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
        )
    yield ""


def _texts(config: type) -> Iterator[tuple[str, str]]:
    """Read the text below each field, which Python itself forgets."""
    (definition,) = ast.parse(inspect.getsource(config)).body
    assert isinstance(definition, ast.ClassDef)
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(field.target, ast.Name)
            yield field.target.id, " ".join(str(ast.literal_eval(text.value)).split())


def _usage(field: Field[Any], hint: Any) -> str:
    if _is_positional(hint):
        return _metavar(hint)
    if hint is bool:
        return f"--no_{field.name}" if field.default else f"--{field.name}"
    names = [*aliases(hint), f"--{field.name}"]
    return f"{', '.join(names)} {_value(hint)}"


def _value(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "|".join(get_args(hint))
    if get_origin(hint) is tuple:
        first, *more = get_args(hint)
        word = WORDS[first]
        return f"{word} [{word} ...]" if Ellipsis in more else " ".join([word] * (1 + len(more)))
    if hint in WORDS:
        return WORDS[hint]
    if get_origin(hint) is Annotated:
        return _value(get_args(hint)[0])
    return "|".join(_value(kind) for kind in get_args(hint))


def _default(field: Field[Any]) -> str:
    if field.default is MISSING:
        return " (required)"
    if isinstance(field.default, bool) or field.default in ("", ()):
        return ""
    values = field.default if isinstance(field.default, tuple) else (field.default,)
    return f" ({' '.join(f'{v:g}' if isinstance(v, float) else str(v) for v in values)})"


def _positionals(config: type) -> str:
    hints = get_type_hints(config, include_extras=True).values()
    return " ".join(_metavar(hint) for hint in hints if _is_positional(hint))


def _is_positional(hint: Any) -> bool:
    return get_origin(hint) is Annotated and not aliases(hint)


def _metavar(hint: Any) -> str:
    return next(str(note.metavar) for note in get_args(hint) if hasattr(note, "metavar"))


if __name__ == "__main__":
    for page, text in documents().items():
        (FOLDER / f"{page}.md").write_text(text)
