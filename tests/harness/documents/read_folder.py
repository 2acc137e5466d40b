"""Folder in which the documents' blocks run: the result of `make demo`, and damaged data."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import lmdb
import numpy as np
from PIL import Image

from paceline.data.db.formats.record_formats import decode_record, encode_record
from tests.harness.data.databases import write_lmdb
from tests.harness.data.image_folder import file_of, put, ramp, some_images

TRAIN, TEST = 5, 2  # images of each digit


def make_clone(folder: Path) -> None:
    """Write the demo's images, fewer of them, somebody's photographs, and a shared folder."""
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "shared/meet").mkdir(parents=True)
    some_images(folder / "photos/train", classes=3, each=4, size=64)
    some_images(folder / "photos/test", classes=3, each=1, size=64)
    from sklearn.datasets import load_digits  # a second, which only these tests take

    digits = load_digits()
    for label in range(10):
        for i, number in enumerate(np.flatnonzero(digits.target == label)[: TRAIN + TEST]):
            part = "train" if i < TRAIN else "test"
            path = folder / f"demo-data/{part}/{label}/{number:04}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = (digits.images[number] * (255 / 16)).astype(np.uint8)
            Image.fromarray(pixels).resize((32, 32)).save(path)


def break_things(folder: Path) -> None:
    """Write the damaged and the unfit data that the pages of errors speak of, of `train-lmdb`."""
    whole = _items(folder / "train-lmdb")
    damaged, mixed = dict(whole), dict(whole)
    seventh, ninth = list(whole)[7], list(whole)[9]
    damaged[seventh] = damaged[ninth] = b"\x08\x01\x10\x01"
    record, _ = decode_record(whole[seventh])
    mixed[seventh] = encode_record(record.image, record.label, "tensorprotos")
    animals = {key: whole[key] for key in list(whole)[:4]}
    for name, items in (("damaged", damaged), ("mixed", mixed), ("animals", animals)):
        (folder / f"{name}-lmdb").mkdir()
        write_lmdb(folder / f"{name}-lmdb", list(items.items()))
    (folder / "animals-lmdb/labels.txt").write_text("cat\ndog\n")
    (folder / "cut-lmdb").mkdir()
    data = (folder / "train-lmdb/data.mdb").read_bytes()
    (folder / "cut-lmdb/data.mdb").write_bytes(data[: len(data) // 2])
    put(folder, "flat-photos/1.jpg", file_of(ramp(16, 16), "JPEG"))
    put(folder, "broken-photos/dog/2.jpg", file_of(ramp(16, 16), "JPEG")[:200])
    put(folder, "phone-photos/cat/1.heic", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
    levels = np.linspace(0, 4095, 256).reshape(16, 16).astype(np.int32)
    put(folder, "microscope/cell/1.tif", file_of(levels, "TIFF"))


def _items(database: Path) -> dict[bytes, bytes]:
    with (
        closing(lmdb.open(str(database), readonly=True, lock=False)) as environment,
        environment.begin() as transaction,
    ):
        return dict(transaction.cursor())
