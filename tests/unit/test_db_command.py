"""What `paceline db` says of a database that it has written."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.cli.main import main
from tests.harness.data.image_folder import file_of, put, ramp, some_images


def test_create_counts_in_words_of_the_right_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some_images(tmp_path / "in", classes=1, each=1)
    put(tmp_path / "in", "class0/notes.txt", b"nothing to see")
    assert main(["db", "create", str(tmp_path / "in"), str(tmp_path / "db")]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        f"{tmp_path}/db: 1 record in 1 class.",
        "1 file that isn't an image: skipped.",
    ]
    assert "2 of 2 files" in shown.err  # not images: one of them isn't


def test_images_of_no_class_are_counted_as_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some_images(tmp_path / "in", classes=1, each=1)
    for name in ("b.PNG", "a.jpg", "notes.txt", ".hidden.png"):
        put(tmp_path / "in", name, b"nothing to see")
    assert main(["db", "create", str(tmp_path / "in"), str(tmp_path / "db")]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "2 files that aren't images: skipped.",
        "2 images beside the class folders, of no class: skipped (the first: a.jpg).",
    ]


def test_dropped_transparency_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(2):
        image = np.dstack([ramp(8, 8), np.full((8, 8), 9, np.uint8)])
        put(tmp_path / "in", f"a/{i}.png", file_of(image, "PNG"))
    main(["db", "create", str(tmp_path / "in"), str(tmp_path / "db"), "--encoding", "png"])
    said = capsys.readouterr().out.splitlines()
    assert said[1] == (
        "2 images have transparent pixels: transparency was dropped, colours are as stored."
    )


@pytest.mark.parametrize("form", ["TIFF", "GIF", "PNG"])
def test_frames_that_are_left_out_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    """As pages of a TIFF in https://github.com/docarray/docarray/pull/845."""
    pages = [Image.fromarray(ramp(8, 8, seed=seed)) for seed in range(3)]
    content = io.BytesIO()
    pages[0].save(content, form, save_all=True, append_images=pages[1:])
    put(tmp_path / "in", f"a/0.{form.lower()}", content.getvalue())
    put(tmp_path / "in", "a/1.png", file_of(ramp(8, 8), "PNG"))
    main(["db", "create", str(tmp_path / "in"), str(tmp_path / "db")])
    assert capsys.readouterr().out.splitlines()[1:] == [
        "1 image has several frames or pages: the first is used, and the others were left out."
    ]


@pytest.mark.parametrize("top", [1, 17, 18])
def test_images_of_8_bits_that_are_almost_black_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], top: int
) -> None:
    """Such as masks, whose values are numbers of classes."""
    pixels = np.linspace(0, top, 64).reshape(8, 8).astype(np.uint8)
    put(tmp_path / "in", "a/0.png", file_of(pixels, "PNG"))
    main(["db", "create", str(tmp_path / "in"), str(tmp_path / "db"), "--encoding", "png"])
    said = capsys.readouterr().out.splitlines()[1:]
    dark = f"All values of 1 image of 8 bits are within 0 to {top}, where white is 255"
    assert [line.partition(":")[0] for line in said] == ([dark] if top < 18 else [])
