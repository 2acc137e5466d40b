"""Values of databases that are no records, named: what other tools store beside or instead of them.

    __keys__, keys      a pickled list of the keys
    __len__, length     a number, as text or pickled
    any key             a pickled sample; a bare image file; JSON

Nothing is unpickled, which could run any code; only the pickle's instructions are read.
"""

from __future__ import annotations

from pickletools import genops

from paceline.data.image.formats import IMAGE_MAGIC

_PICKLE = b"\x80"  # PROTO, with which pickles of protocol 2 and later begin
_BEFORE = {"PROTO", "FRAME", "MARK"}  # instructions that make nothing
_COUNT = ", such as the count of records that other tools store"


def name_of(value: bytes) -> str | None:
    """Name what a value is, as in "it is NAME"; None where that isn't known."""
    if value.startswith(IMAGE_MAGIC):
        return "a bare image file, which has no label"
    if value.startswith(_PICKLE) and value.endswith(b"."):
        return _pickled(value)
    if value.isdigit():
        return f"the number {value.decode()}{_COUNT}"
    if value[:1] + value[-1:] in (b"{}", b"[]"):
        return "JSON text"
    return None


def _pickled(value: bytes) -> str | None:
    """Name what a pickle makes, by its first instruction that makes anything."""
    try:
        made = next(code.name for code, _, _ in genops(value) if code.name not in _BEFORE)
    except Exception:  # genops raises many kinds over what is no pickle
        return None
    if "LIST" in made:
        return "a pickled list, such as the list of keys that other tools store"
    return f"a pickled number{_COUNT}" if "INT" in made else "a pickled object of Python"
