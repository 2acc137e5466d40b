"""Modules under torch.compile: compile blocks, and wait for parameters outside them.

Inside a compiled module no hook can wait: its hooks are traced once and for all. So a compiled
module is one reader of all its parameters, and the wait for them happens around its compiled call,
which `module.compile()` leaves in an attribute. That keeps names and state dict as they are, and a
copy of the module (an average of weights) isn't compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.errors import ConfigError, Message
from paceline.replica.live_hooks import replace

_VARIANTS_PER_BLOCK = 8  # code for training and for evaluation, each for some batch sizes


def compile_blocks(blocks: list[nn.Module], backend: str = "inductor") -> None:
    """Compile modules in place, each at its first call; a failure is a `ConfigError` there."""
    import torch._dynamo as dynamo  # takes a second; imported only where it is used

    # Blocks share their code: one limit holds for the variants of all of them together.
    limit = _VARIANTS_PER_BLOCK * len(blocks)
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, limit)
    for block in blocks:
        block.compile(backend=backend)
        around_call(block, partial(_as_compile_error, dynamo.exc.TorchDynamoException))


def is_compiled(module: nn.Module) -> bool:
    """Return whether calls are compiled: by `module.compile()` or `torch.compile(module)`."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def visible_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model's modules, each once, but none inside of a compiled one."""
    seen = set()
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            yield module
            if not is_compiled(module):
                waiting.extend(reversed(list(module.children())))


def around_call(
    module: nn.Module, context: Callable[[], AbstractContextManager[object]]
) -> Callable[[], None]:
    """Enter a context around each call of a compiled module; return what undoes that.

    Undo in the opposite order.
    """
    name = "forward" if "_orig_mod" in module._modules else "_compiled_call_impl"
    inner: Any = vars(module)[name]

    def call(*args: Any, **kwargs: Any) -> Any:
        with context():
            return inner(*args, **kwargs)

    return replace(module, name, call)


@contextmanager
def _as_compile_error(kind: type[Exception]) -> Iterator[None]:
    """Turn a failure of the compiler inside the block into a `ConfigError`."""
    try:
        yield
    except kind as error:
        raise compile_error(error) from error


def compile_error(error: BaseException) -> ConfigError:
    """Return the error for a failure of torch.compile."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = f"{type(error).__name__}: {' '.join(lines[:2])[:200]}"
    return ConfigError(
        flag="compile",
        rule=Message("torch.compile failed ({})", reason),
        remedy=Message("install a C++ compiler (g++), or train without {--compile}"),
    )


def check_compiler() -> None:
    """Compile a small function for the CPU, in some seconds.

    Raises:
        ConfigError: there is no working C++ compiler.
    """
    try:
        torch.compile(lambda x: x + 1, dynamic=False)(torch.ones(2))
    except Exception as error:  # compilers fail in many ways
        raise compile_error(error) from error
