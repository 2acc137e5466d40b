"""`Server`: what `sync=` takes for parameter servers, and its short form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.config.rules import whole
from paceline.errors import ConfigError, options_named

ARGUMENTS = {
    "num_servers": "servers",
    "staleness": "staleness",
    "staleness_lr": "staleness_lr",
}
"""Names of the flags in a script: fields of `Server`."""

_STALENESS = "a whole number of at least 0"
_VALUES = {
    "servers": "a whole number of at least 1",
    "staleness": f"{_STALENESS}, or async",
    "staleness_lr": "given or scale",
}
"""What the options of the short form may be."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """Parameter servers: they own the parameters, and update them by the workers' gradients.

    Args:
        staleness: by how many steps the parameters that a worker reads may be behind. 0:
            synchronous, equal to one process. K > 0: a worker may lead the slowest one by up to K
            steps before it waits. None: asynchronous, each worker's gradients are an
            update of their own, in the order of arrival.
        staleness_lr: with staleness None, the learning rate of an update by gradients that are
            s > 1 updates old: "given" is that of the step, "scale" that divided by s.
        servers: the number of servers; None: as many as `paceline launch --num_servers` starts, or
            one that `paceline serve` starts.

    Raises:
        ConfigError: a value breaks its rule.
    """

    staleness: int | None = 0
    staleness_lr: str = "given"
    servers: int | None = None

    def __post_init__(self) -> None:
        with options_named(_argument):
            if self.staleness is not None and not _is_whole(self.staleness):
                rule = f"must be {_STALENESS}, or None: asynchronous"
                raise ConfigError(flag="staleness", value=self.staleness, rule=rule)
            if self.staleness_lr not in ("given", "scale"):
                raise ConfigError(
                    flag="staleness_lr", value=self.staleness_lr, rule="must be given or scale"
                )
            if self.staleness_lr == "scale" and self.staleness is not None:
                raise ConfigError(
                    flag="staleness_lr",
                    value=self.staleness_lr,
                    rule="only asynchronous updates have rates of their own",
                    remedy="leave it out, or use staleness=None",
                )
            if self.servers is not None:
                whole("num_servers", self.servers, 1)


def parse_server(sync: str) -> Server | None:
    """Return the `Server` of a short form, such as "server" or "server:servers=2".

    None: `sync` is the name of another exchange.

    Raises:
        ConfigError: there is no such option, or a value breaks its rule.
    """
    name, colon, text = sync.partition(":")
    if name != "server":
        return None
    values: dict[str, Any] = {}
    words: dict[str, dict[str, str | None]] = {
        "staleness": {"async": None},
        "staleness_lr": {"given": "given", "scale": "scale"},
    }
    for item in text.split(",") if colon else ():
        option, _, word = (part.strip() for part in item.partition("="))
        if word in words.get(option, ()) and option not in values:
            values[option] = words[option][word]
            continue
        if option not in _VALUES or option in values:
            raise ConfigError(
                f"sync={sync!r}: {item!r} must be an option, given once: servers=N, staleness=N, "
                "staleness=async, staleness_lr=given or staleness_lr=scale."
            )
        if not word.isdecimal():
            raise ConfigError(f"sync={sync!r}: {option} must be {_VALUES[option]}.")
        values[option] = int(word)
    return Server(**values)


def _is_whole(value: object) -> bool:
    return type(value) is int and value >= 0


def _argument(option: str) -> str:
    return ARGUMENTS.get(option, option)
