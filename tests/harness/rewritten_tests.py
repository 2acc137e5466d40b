"""Rewrites the asserts of the tests once, before the processes of xdist all do it side by side.

A fresh clone has 500 files of tests, which cost eight processor seconds. Pytest keeps each beside
its source, for all later processes, but has no function that does so before an import.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def rewrite_tests(config: pytest.Config) -> None:
    """Rewrite the files that this run collects, where pytest would keep what it rewrites."""
    if not sys.dont_write_bytecode:
        for source in _sources(config):
            _rewrite(source, config)


def _sources(config: pytest.Config) -> Iterator[Path]:
    for argument in config.args:
        path = config.invocation_params.dir / argument.partition("::")[0]
        yield from path.rglob("test_*.py") if path.is_dir() else [path]


def _rewrite(source: Path, config: pytest.Config) -> None:
    folder = rewrite.get_cache_dir(source)
    kept = folder / (source.stem + rewrite.PYC_TAIL)
    if rewrite._read_pyc(source, kept) is not None:
        return
    source_hash, code = rewrite._rewrite_test(source, config)
    rewrite.try_makedirs(folder)
    rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source_hash, kept)
