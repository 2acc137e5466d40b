"""Images of kinds that aren't decoded: named, counted as images, and listed where they are left."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from paceline.cli.main import main
from paceline.data.db.formats.record_formats import UnfitRecord, decode_record
from paceline.data.image.image_errors import UnreadImage
from paceline.data.image.image_file import is_image, stored_form
from paceline.data.image.unread_formats import unread_by_content, unread_by_name
from paceline.errors import DataError
from tests.harness.data.image_folder import file_of, put, ramp, some_images
from tests.harness.data.record_bytes import encoded_tensorprotos
from tests.unit.test_db_create import create


def box(*brands: bytes) -> bytes:
    """Begin a file of ISO's base media format: its size, type, major brand, version, brands."""
    major, *compatible = brands
    content = b"ftyp" + major + bytes(4) + b"".join(compatible)
    return (len(content) + 4).to_bytes(4, "big") + content + bytes(100)


def camera_tiff(tags: dict[int, object]) -> bytes:
    """A TIFF whose first picture is a thumbnail, as in camera raw files."""
    directory = ImageFileDirectory_v2()
    for tag, value in tags.items():
        directory[tag] = value
    file = io.BytesIO()
    Image.fromarray(ramp(8, 12)).save(file, "TIFF", tiffinfo=directory)
    return file.getvalue()


CONTENT = {
    "HEIC of an iPhone": ("HEIC", box(b"heic", b"mif1", b"heic")),
    "HEIF": ("HEIC", box(b"mif1", b"heic")),
    "AVIF": ("AVIF", box(b"avif", b"mif1", b"miaf")),
    "AVIF by a compatible brand": ("AVIF", box(b"mif1", b"avif")),
    "JPEG XL": ("JPEG XL", b"\xff\x0a" + bytes(50)),
    "JPEG XL in boxes": ("JPEG XL", b"\0\0\0\x0cJXL \r\n\x87\n" + bytes(50)),
    "JPEG 2000": ("JPEG 2000", b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(50)),
    "CR2": ("camera raw", b"II*\0\x10\0\0\0CR\x02\0" + bytes(50)),
    "CR3": ("camera raw", box(b"crx ", b"isom")),
    "RAF": ("camera raw", b"FUJIFILMCCD-RAW 0201" + bytes(50)),
    "DNG": ("camera raw", camera_tiff({50706: b"\1\4\0\0"})),
    "NEF": ("camera raw", camera_tiff({254: 1})),
    "DICOM": ("DICOM", bytes(128) + b"DICM" + bytes(50)),
    "Photoshop": ("Photoshop", b"8BPS\0\1" + bytes(50)),
}


@pytest.mark.parametrize("name", CONTENT)
@pytest.mark.parametrize("suffix", [".bin", ".jpg"])  # a phone's HEIC is often called .jpg
def test_a_kind_is_named_by_its_content(tmp_path: Path, name: str, suffix: str) -> None:
    kind, data = CONTENT[name]
    assert is_image(data, f"a/photo{suffix}")
    with pytest.raises(UnreadImage, match=f"it is an image of the kind {kind}, which isn't"):
        stored_form(data, "jpeg")
    put(tmp_path / "in", f"cat/1{suffix}", data)
    with pytest.raises(
        DataError, match=rf"cat/1{suffix} can't be read: .* kind {kind}, .* Convert it to JPEG"
    ):
        create(tmp_path / "in", tmp_path / "db")


@pytest.mark.parametrize(
    "suffix", [".HEIC", ".avif", ".jxl", ".NEF", ".arw", ".dng", ".CR2", ".raf", ".psd", ".tga"]
)
@pytest.mark.parametrize("content", ["", "TIFF"])
def test_a_kind_is_named_by_its_suffix_where_the_content_tells_nothing(
    tmp_path: Path, suffix: str, content: str
) -> None:
    put(tmp_path / "in", f"cat/1{suffix}", file_of(ramp(8, 8), content) if content else b"")
    with pytest.raises(DataError, match=f"1{suffix} can't be read: it is an image of the kind "):
        create(tmp_path / "in", tmp_path / "db")


def test_a_jpeg_is_read_whatever_its_name_promises(tmp_path: Path) -> None:
    put(tmp_path / "in", "cat/1.heic", file_of(ramp(8, 8), "JPEG"))
    put(tmp_path / "in", "cat/2.nef", file_of(ramp(8, 8), "PNG"))
    assert len(create(tmp_path / "in", tmp_path / "db").keys) == 2


@pytest.mark.parametrize(
    "data", [b"", b"\0\0\0\x18ftypisom" + bytes(50), b"RIFF\0\0\0\0WAVE", b"II*", b"plain text"]
)
def test_a_video_a_sound_and_a_text_are_no_images(data: bytes) -> None:
    assert unread_by_content(data) is None
    assert not is_image(data, "cat/file")


@pytest.mark.parametrize("name", ["cat/1", "cat/1.jpg", "a.heic/1.txt", "heic", ""])
def test_other_names_promise_nothing(name: str) -> None:
    assert unread_by_name(name) is None


def test_the_command_lists_them_as_images_that_it_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some_images(tmp_path / "in", classes=1, each=2)
    put(tmp_path / "in", "class0/phone.heic", CONTENT["HEIF"][1])
    put(tmp_path / "in", "class0/broken.jpg", b"\xff\xd8\xff")
    put(tmp_path / "in", "class0/notes.txt", b"")
    words = ["db", "create", str(tmp_path / "in"), str(tmp_path / "db"), "--skip_damaged"]
    assert main(words) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:3] == [
        f"{tmp_path / 'db'}: 2 records in 1 class.",
        "1 file that isn't an image: skipped.",
        "2 unreadable images skipped:",
    ]
    assert "  class0/phone.heic: it is an image of the kind HEIC, which isn't decoded" in said
    assert any(line.startswith("  class0/broken.jpg: ") for line in said)


def test_a_record_of_such_an_image_is_named() -> None:
    for data in (CONTENT["AVIF"][1], CONTENT["CR2"][1]):
        kind = unread_by_content(data)
        with pytest.raises(UnfitRecord, match=f"its image is of the kind {kind}, which isn't"):
            decode_record(encoded_tensorprotos(data, 3))


def test_what_a_tiff_of_another_program_holds_is_read() -> None:
    data = camera_tiff({254: 0})
    assert np.array_equal(stored_form(data, "raw").image, ramp(8, 12))
