"""Compiles the kernels of a fresh clone once, before the tests' processes all do it side by side.

    .venv/bin/python -m tests.harness.compile_kernels

Numba keeps the machine code beside the sources, for all later processes.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "paceline"
SOURCES = (
    PACKAGE / "cluster/membership/control_line/beat_loop.py",
    PACKAGE / "codecs/kernels/compiled.py",
    PACKAGE / "codecs/kernels/compiled_int4.py",
    PACKAGE / "codecs/kernels/compiled_topk.py",
    PACKAGE / "comm/transport/event_loop.py",
    PACKAGE / "comm/transport/system_calls.py",
)


def compile_all() -> None:
    """Call each kernel with the types that it has in a run."""
    import torch

    from paceline.cluster.membership.control_line.beats import Beats
    from paceline.codecs.kernels import compiled
    from paceline.codecs.merge_codecs import MERGE_CODECS, merge_codec
    from tests.harness.network.window_kinds import KINDS, run_windows
    from tests.harness.network.window_traffic import Traffic

    for dtype in (torch.float32, torch.float64):
        for past_caches in (False, True):
            whole = [(0, 8, torch.ones(8, dtype=dtype))]
            out = torch.zeros(8, dtype=dtype)
            compiled.add_up([whole], [1.0], out, past_caches=past_caches)
    for codec in filter(None, (*MERGE_CODECS.values(), merge_codec("topk:0.02"))):
        sources, zeros, after, out = [(0, 8, torch.ones(8))], *torch.zeros(3, 8)
        data = torch.zeros(codec.size(8), dtype=torch.uint8)
        codec.encode(sources, 1.0, zeros, data, after)
        for add in (False, True):
            codec.decode(data, out, add=add)
        codec.reduce([None, data.clone()], sources, 1.0, zeros, data, after, out)
    Beats(0.5).close()
    make = KINDS["tcp"](2, 80, 2)
    run_windows(make, 2, lambda window: Traffic(window, [40], 1, 1).run())


def load_all() -> None:
    """Load the compiled kernels, of which each process would load what it calls.

    The first one takes a third of a second, in which numba registers its types.
    """
    from numba.core.dispatcher import Dispatcher

    for source in filter(is_compiled, SOURCES):
        module = import_module(".".join(source.relative_to(PACKAGE.parent).with_suffix("").parts))
        for kernel in vars(module).values():
            if isinstance(kernel, Dispatcher):
                for signature, *_ in list(kernel._cache._cache_file._load_index()):
                    kernel.compile(signature)


def is_compiled(source: Path) -> bool:
    """Return whether a file's machine code is no older than the file."""
    made = source.parent.glob(f"__pycache__/{source.stem}.*.nbi")
    return any(index.stat().st_mtime > source.stat().st_mtime for index in made)


if __name__ == "__main__":
    if not all(map(is_compiled, SOURCES)):
        compile_all()
