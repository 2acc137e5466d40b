"""Checks the pages of an LMDB's tree: the library itself aborts the process over some damage.

    meta ─▶ root: a branch page ─▶ … ─▶ branch pages ─▶ leaf pages (keys, and where values are)

    page     number (8 bytes), padding (2), flags (2), lower (2), upper (2), then an offset (2) for
             each node, up to `lower`; nodes from `upper` on
    node     page number (branch: 6 bytes) or length and flags (leaf: 6), length of the key (2),
             key; in a leaf then the value, or with flag 1 the number of its first own page (8);
             with flag 2 the key is the name of another database

A length beyond the end of the file would end the process with SIGBUS where the value is read. LMDB
asserts that branch pages have two keys or more; and, while it lists keys, that pages are of the
expected kind. Branch pages, of which a million records have some hundred, are checked at open; a
leaf page before the first of its keys is read, or all of them before keys are listed. Layout:
mdb.c of LMDB 0.9; numbers are those of this machine.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb

from paceline.errors import DataError

_HEADER = struct.Struct("=QHHHH")
_NODE = struct.Struct("=HHHH")
_ROOT_AND_LAST = struct.Struct("=QQQ")  # in a meta page: root, last page, transaction
_META_ROOT = 16 + 24 + 48 + 40  # header, version and map, the free pages' tree, before the root
_PAGE_NUMBER = struct.Struct("=Q")
_BRANCH = 1  # kinds of pages
_LEAF = 2
_ON_OWN_PAGES = 1  # flags of a node
_IS_DATABASE = 2
_NONE = 2**64 - 1  # the root of an empty tree


class TreePages:
    """Pages of an LMDB's newest tree, each checked before LMDB reads it.

    Args:
        path: its file.
        environment: of it, which knows the page size and the tree's depth.

    Raises:
        DataError: a branch page is damaged, or the file can't be read.
    """

    def __init__(self, path: Path, environment: lmdb.Environment) -> None:
        facts = environment.stat()
        self._path = path
        self._page_size = facts["psize"]
        with self._reported(), path.open("rb") as file:
            metas = (
                os.pread(file.fileno(), _ROOT_AND_LAST.size, at + _META_ROOT)
                for at in (0, self._page_size)
            )
            root, self._last, _ = max(map(_ROOT_AND_LAST.unpack, metas), key=lambda meta: meta[2])
            level = [] if root == _NONE else [(b"", root)]
            for _ in range(facts["depth"] - 1):
                level = [
                    (key if i else first, child)  # the first node's own key counts for nothing
                    for first, number in level
                    for i, (key, child) in enumerate(self._nodes(file.fileno(), number, _BRANCH))
                ]
        self._first_keys = [key for key, _ in level]
        self._leaves = [page for _, page in level]
        self._unchecked = set(self._leaves)

    def check_leaf(self, key: bytes) -> None:
        """Check the leaf page that has `key`, unless that was done before.

        Raises:
            DataError: it is damaged, or the file can't be read.
        """
        if self._unchecked:
            number = self._leaves[bisect_right(self._first_keys, key) - 1]
            if number in self._unchecked:
                self._check([number])

    def check_leaves(self) -> list[bytes]:
        """Check all leaf pages; return the names of databases that stand among the keys.

        Raises:
            DataError: one is damaged, or the file can't be read.
        """
        return self._check(self._leaves)

    def _check(self, leaves: list[int]) -> list[bytes]:
        names: list[bytes] = []
        with self._reported(), self._path.open("rb") as file:
            for number in leaves:
                names += [name for name, _ in self._nodes(file.fileno(), number, _LEAF)]
                self._unchecked.discard(number)
        return names

    def _nodes(self, file: int, number: int, kind: int) -> list[tuple[bytes, int]]:
        if number > self._last:
            raise ValueError(f"page {number} is beyond the last one, {self._last}")
        page = os.pread(file, self._page_size, number * self._page_size)
        return _nodes(page, number, kind, self._last)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, struct.error) as error:
            raise DataError(
                f"{self._path} is damaged ({error}): LMDB can't read it; copy the database again."
            ) from error


def _nodes(page: bytes, number: int, kind: int, last: int) -> list[tuple[bytes, int]]:
    """Check a page, and where a leaf's values lie.

    Returns:
        keys and pages below a branch page; of a leaf, the names of databases, with 0.
    """
    own_number, _, flags, lower, upper = _HEADER.unpack_from(page)
    count = (lower - _HEADER.size) // 2
    if (own_number, flags) != (number, kind) or count < 3 - kind or not lower <= upper <= len(page):
        raise ValueError(f"page {number} has a wrong header")
    nodes = []
    for at in struct.unpack_from(f"={count}H", page, _HEADER.size):
        if not upper <= at <= len(page) - _NODE.size:
            raise ValueError(f"page {number} has a node outside of it")
        low, high, highest, key_length = _NODE.unpack_from(page, at)
        start = at + _NODE.size + key_length
        if start > len(page):
            raise ValueError(f"page {number} has a key that goes beyond it")
        if kind == _BRANCH:
            nodes.append((page[at + _NODE.size : start], low | high << 16 | highest << 32))
            continue
        if highest & _IS_DATABASE:
            nodes.append((page[at + _NODE.size : start], 0))
        size = low | high << 16
        limit = len(page)
        if highest == _ON_OWN_PAGES:
            (first,) = _PAGE_NUMBER.unpack_from(page, start)
            start = first * len(page) + _HEADER.size
            limit = (last + 1) * len(page)
        if start + size > limit:
            raise ValueError(f"page {number} has a value that goes beyond its place")
    return nodes
