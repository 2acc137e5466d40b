"""Integrity of files of weights or of a run's state: checked before they are unpickled.

    torch.save       a zip archive: its directory is at the end, a checksum with each member
    safetensors      [8 bytes: n][n bytes of JSON][tensors]: the JSON gives the file's length
    torch.save, old  a pickle and bytes behind it; only reading it shows damage
    Caffe2           a minidb of blobs: a length with each record (`weights_caffe2.py`)

torch itself passes over the checksums of its archives, so that a flipped bit on a disk would become
a weight. https://docs.pytorch.org/docs/stable/notes/serialization.html,
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import struct
import zipfile
import zlib
from argparse import Namespace
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch

from paceline.errors import CheckpointError
from paceline.state.weights_caffe2 import begins_as_caffe2, read_caffe2

Kind = Literal["torch", "safetensors", "old torch", "caffe2"]

_GLOBAL = re.compile(r"GLOBAL (\S+)")  # in torch's message: what a pickle wanted to call
_LONGEST_REASON = 200  # characters of a reason in a message
_ZIP = b"PK\x03\x04"
_OLD = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)  # what torch wrote first before 1.6
_START = 32  # bytes that tell the formats apart
_LONGEST_HEADER = 100_000_000  # bytes of safetensors' JSON, the format's own limit
_FOLDER = 0x10  # MS-DOS's mark, in a member's attributes
# What zipfile raises over damage, depending on where it sits: an OSError is a seek to nowhere.
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError)


def check_integrity(path: Path) -> None:
    """Read a whole file and compare it with its checksums and lengths.

    Raises:
        CheckpointError: it can't be read, is torn or damaged, or holds something else.
    """
    if check_header(path) == "torch":
        try:
            with zipfile.ZipFile(path) as archive:
                # torch can leave the checksums out, as zeros.
                checked = any(member.CRC for member in archive.infolist())
                damaged = archive.testzip() if checked else None
        except _DAMAGE as error:
            raise _torn(path, str(error) or type(error).__name__) from error
        if damaged is not None:
            raise _torn(path, f"the checksum of {damaged} is wrong")


def check_header(path: Path) -> Kind:
    """Return the format of a file, by its first and last bytes, which also show a torn one.

    Raises:
        CheckpointError: it can't be read, is torn, or is of no format that holds weights.
    """
    try:
        with path.open("rb") as file:
            start = file.read(_START)
            if not start:
                raise _torn(path, "it is empty")
            if start.startswith(_ZIP):
                _check_archive(path, file)
                return "torch"
            # Before the length of a header is looked for:
            # those 8 bytes may be anything in such a file.
            if start.startswith(_OLD):
                return "old torch"
            if begins_as_caffe2(start):
                return "caffe2"
            if start[8:9] == b"{":
                _check_lengths(path, file)
                return "safetensors"
    except OSError as error:
        raise CheckpointError(
            f"{path}: can't be read ({error.strerror or error}); give a file that you may read."
        ) from error
    raise CheckpointError(
        f"{path}: not a file of weights; give one that a run, torch.save, safetensors or Caffe2 "
        "wrote."
    )


def contents_id(path: Path) -> str:
    """Return a digest that files of the same contents share; of an archive by its checksums.

    Args:
        path: of a file of weights, or of the JSON index of one in parts.

    Raises:
        CheckpointError: it can't be read, is torn, or is of no format that holds weights.
    """
    digest = hashlib.sha256()
    if path.suffix != ".json" and check_header(path) == "torch":
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                # Read from the directory at the end, without
                # the tensors: a file may have many gigabytes.
                digest.update(f"{member.filename} {member.file_size} {member.CRC}\n".encode())
    else:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
    return digest.hexdigest()


def load_file(path: Path, *, mmap: bool = False) -> Any:
    """Read a file into this machine's memory; a file that would call code is refused.

    Args:
        mmap: leave the tensors of a torch.save file on the disk.

    Raises:
        CheckpointError: the file is damaged, or of no format that holds weights.
    """
    try:
        kind = check_header(path)
        if kind == "safetensors":
            from safetensors.torch import load_file as load_safetensors  # an extra

            return load_safetensors(path)
        if kind == "caffe2":
            return read_caffe2(path)
        # Scripts save their parsed arguments, which run no code when they are read.
        with torch.serialization.safe_globals([Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except CheckpointError:
        raise
    except Exception as error:  # torch's unpickler raises a dozen kinds over damage
        raise CheckpointError(f"{path}: not a file of weights: {reason_of(error)}") from error


def reason_of(error: Exception) -> str:
    """Return the first line of a reader's error, or what a pickle would have called."""
    called = _GLOBAL.search(str(error))
    if called:
        return (
            f"loading it would call {called.group(1)}, which could run any code; give a file that "
            "holds a model's state_dict() alone."
        )
    text = str(getattr(error, "strerror", None) or error).strip() or type(error).__name__
    first = text.splitlines()[0]
    return first if len(first) <= _LONGEST_REASON else f"{first[:_LONGEST_REASON]}…"


def _check_archive(path: Path, file: BinaryIO) -> None:
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except _DAMAGE as error:
        raise _torn(path, f"an archive whose end is missing or unreadable: {error}") from error
    if any(member.external_attr & _FOLDER and not member.is_dir() for member in members):
        raise _torn(path, "a tensor is marked as a folder")  # torch would leave it uninitialised
    names = {member.filename.rpartition("/")[2] for member in members}
    if "data.pkl" not in names or "constants.pkl" in names:  # the latter is TorchScript's
        raise CheckpointError(
            f"{path}: a zip archive, but not one of torch.save; give a file of weights."
        )


def _check_lengths(path: Path, file: BinaryIO) -> None:
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    (length,) = struct.unpack("<Q", file.read(8))
    if length > min(size - 8, _LONGEST_HEADER):
        raise _torn(path, f"its header should have {length:,} bytes")
    try:
        tensors: dict[str, Any] = json.loads(file.read(length))
        ends = [value["data_offsets"][1] for key, value in tensors.items() if key != "__metadata__"]
        wanted = 8 + length + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise _torn(path, "its header can't be read") from error
    if size != wanted:
        raise _torn(path, f"it has {size:,} bytes where its header announces {wanted:,}")


def _torn(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: torn or damaged ({reason}); use another file, or a fresh copy of this one."
    )
