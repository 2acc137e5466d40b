"""Checks the pages of an LMDB's tree: the library itself aborts the process over some damage.

    meta ─▶ root: a branch page ─▶ … ─▶ branch pages ─▶ leaf pages (keys, and where values are)

    page     number (8 bytes), padding (2), flags (2), lower (2), upper (2), then an offset (2) for
             each node, up to `lower`; nodes from `upper` on
    node     page number (branch: 6 bytes) or length and flags (leaf: 6), length of the key (2),
             key; in a leaf then the value, or with flag 1 the number of its first own page (8)

A length beyond the end of the file would end the process with SIGBUS where the value is read. LMDB
asserts that branch pages have two keys or more; and, while it lists keys, that pages are of the
expected kind. Reading one key visits the branch pages, of which a million records have some
hundred; listing visits every page. So opening checks the former, and listing all. Layout: mdb.c of
LMDB 0.9; numbers are those of this machine.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import lmdb

from paceline.errors import DataError

_HEADER = struct.Struct("=QHHHH")
_NODE = struct.Struct("=HHHH")
_ROOT_AND_LAST = struct.Struct("=QQQ")  # in a meta page: root, last page, transaction
_META_ROOT = 16 + 24 + 48 + 40  # header, version and map, the free pages' tree, before the root
_PAGE_NUMBER = struct.Struct("=Q")
_BRANCH, _LEAF, _ON_OWN_PAGES = 1, 2, 1
_NONE = 2**64 - 1  # the root of an empty tree


def check_pages(path: Path, environment: lmdb.Environment, *, leaves: bool) -> None:
    """Check the pages of the newest tree.

    Args:
        path: data.mdb.
        environment: of it, which knows the page size and the tree's depth.
        leaves: check the leaf pages, too.

    Raises:
        DataError: a page is damaged, or the file can't be read.
    """
    facts = environment.stat()
    page_size = facts["psize"]
    try:
        with path.open("rb") as file:
            metas = (
                os.pread(file.fileno(), _ROOT_AND_LAST.size, at + _META_ROOT)
                for at in (0, page_size)
            )
            root, last, _ = max(map(_ROOT_AND_LAST.unpack, metas), key=lambda meta: meta[2])
            level = [] if root == _NONE else [root]
            for height in range(facts["depth"] - 1, -1 if leaves else 0, -1):
                children = []
                for number in level:
                    if number > last:
                        raise ValueError(f"page {number} is beyond the last one, {last}")
                    page = os.pread(file.fileno(), page_size, number * page_size)
                    children += _children(page, number, _BRANCH if height else _LEAF, last)
                level = children
    except (OSError, ValueError, struct.error) as error:
        raise DataError(
            f"{path} is damaged ({error}): LMDB can't read it; copy the database again."
        ) from error


def _children(page: bytes, number: int, kind: int, last: int) -> list[int]:
    """Check a page, and where a leaf's values lie; return the pages below a branch page."""
    own_number, _, flags, lower, upper = _HEADER.unpack_from(page)
    count = (lower - _HEADER.size) // 2
    if (own_number, flags) != (number, kind) or count < 3 - kind or not lower <= upper <= len(page):
        raise ValueError(f"page {number} has a wrong header")
    children = []
    for at in struct.unpack_from(f"={count}H", page, _HEADER.size):
        if not upper <= at <= len(page) - _NODE.size:
            raise ValueError(f"page {number} has a node outside of it")
        low, high, highest, key_length = _NODE.unpack_from(page, at)
        if at + _NODE.size + key_length > len(page):
            raise ValueError(f"page {number} has a key that goes beyond it")
        if kind == _LEAF:
            start, size, limit = at + _NODE.size + key_length, low | high << 16, len(page)
            if highest == _ON_OWN_PAGES:
                (first,) = _PAGE_NUMBER.unpack_from(page, start)
                start, limit = first * len(page) + _HEADER.size, (last + 1) * len(page)
            if start + size > limit:
                raise ValueError(f"page {number} has a value that goes beyond its place")
        children.append(low | high << 16 | highest << 32)
    return children if kind == _BRANCH else []
