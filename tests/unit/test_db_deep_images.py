"""Images of more than 8 bits: scaled by a range that is stated, or refused; never black unsaid."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from paceline.cli.main import main
from paceline.config.db import DbInfoConfig
from paceline.data.db.inspect import inspect_database
from paceline.data.image.augment import View
from paceline.data.image.decode import decode
from paceline.data.image.image_errors import DamagedImage, UnreadImage
from paceline.data.image.image_file import check_image, stored_form
from paceline.errors import DataError
from tests.harness.data.databases import write_lmdb
from tests.harness.data.image_folder import put
from tests.harness.data.record_bytes import encoded_tensorprotos
from tests.unit.test_db_create import create, pixels_of, records

PHOTOMETRIC, BITS, SAMPLE_FORMAT = 262, 258, 339


def ramp(top: float, kind: Any, *, bottom: float = 0) -> np.ndarray:
    """From `bottom` to `top`, 32 × 32."""
    return np.linspace(bottom, top, 1024).reshape(32, 32).astype(kind)


def file(pixels: np.ndarray, form: str = "TIFF", **options: Any) -> bytes:
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, form, **options)
    return content.getvalue()


def tiff(pixels: np.ndarray, *, bits: int, sample_format: int) -> bytes:
    """Write 32 × 32 pixels in one strip by hand, of formats that Pillow reads and doesn't write."""
    body = pixels.tobytes()
    entries = [
        *((256, 32), (257, 32), (BITS, bits), (259, 1), (PHOTOMETRIC, 1), (273, 0)),
        *((277, 1), (278, 32), (279, len(body)), (SAMPLE_FORMAT, sample_format)),
    ]
    head = 8 + 2 + 12 * len(entries) + 4
    content = b"II*\0" + (8).to_bytes(4, "little") + len(entries).to_bytes(2, "little")
    for tag, value in entries:
        value = head if tag == 273 else value
        content += tag.to_bytes(2, "little") + b"\4\0\1\0\0\0" + value.to_bytes(4, "little")
    return content + bytes(4) + body


def twelve_bits(values: np.ndarray) -> np.ndarray:
    """Pack pairs of values into three bytes."""
    left, right = values.reshape(-1, 2).T
    return np.stack([left >> 4, (left << 4 | right >> 8) & 255, right & 255], axis=1).astype("u1")


STATED = {
    "16-bit PNG": file(ramp(65535, np.uint16), "PNG"),
    "16-bit TIFF": file(ramp(65535, np.uint16)),
    "compressed 16-bit TIFF": file(ramp(65535, np.uint16), compression="tiff_lzw"),
    "BigTIFF": file(ramp(65535, np.uint16), big_tiff=True),
    "white is zero": file(ramp(65535, np.uint16)[::-1, ::-1], tiffinfo={PHOTOMETRIC: 0}),
    "PGM of 16 bits": file(ramp(65535, np.uint16), "PPM"),
    "PGM of 12 bits": b"P5 32 32 4095\n" + ramp(4095, ">u2").tobytes(),
    "12-bit TIFF": tiff(twelve_bits(ramp(4095, np.uint16)), bits=12, sample_format=1),
}
NOT_STATED = {
    "signed 32-bit integers": file(ramp(255, np.int32)),
    "32-bit integers": tiff(ramp(2**32 - 1, np.uint32), bits=32, sample_format=1),
    "signed 16-bit integers": tiff(ramp(4095, np.int16), bits=16, sample_format=2),
    "signed 8-bit integers": tiff(ramp(100, np.int8, bottom=-100), bits=8, sample_format=2),
    "floating-point numbers": file(ramp(1, np.float32)),
}
TOPS = {"signed 32-bit integers": 255, "32-bit integers": 2**32 - 1, "signed 16-bit integers": 4095}


@pytest.mark.parametrize("name", STATED)
def test_a_range_that_the_format_states_is_the_scale(name: str) -> None:
    stored = stored_form(STATED[name], "raw")
    expected = ramp(255, np.uint8)[:, :, None].astype(int)
    assert np.abs(pixels_of(stored.image).astype(int) - expected).max() <= 1
    assert stored.depth is not None
    assert stored.values in ((0, 65535), (0, 4095))


@pytest.mark.parametrize("name", NOT_STATED)
def test_pixels_whose_white_is_not_stated_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnreadImage, match=f"its pixels are {name}, here .*which value is white"):
        stored_form(NOT_STATED[name], "png")
    with pytest.raises(UnreadImage, match=name):  # `paceline db info`
        check_image(NOT_STATED[name])


@pytest.mark.parametrize("name", NOT_STATED)
def test_a_range_that_is_given_is_the_scale(name: str) -> None:
    low = -100 if "8-bit" in name else 0
    high = TOPS.get(name, 100 if "8-bit" in name else 1)
    found = pixels_of(stored_form(NOT_STATED[name], "raw", value_range=(low, high)).image)
    assert (int(found.min()), int(found.max())) == (0, 255)
    assert 122 < found.mean() < 133


def test_what_lies_outside_of_a_range_is_clipped() -> None:
    data = file(ramp(3000, np.int32, bottom=-1000))
    found = pixels_of(stored_form(data, "raw", value_range=(0, 1000)).image)
    assert (found == 0).mean() == pytest.approx(0.25, abs=0.01)
    assert (found == 255).mean() == pytest.approx(0.5, abs=0.01)


def test_pixels_that_are_no_numbers_are_damage() -> None:
    pixels = ramp(1, np.float32)
    pixels[3, 4] = np.nan
    with pytest.raises(DamagedImage, match="some of its pixels are NaN or infinite"):
        stored_form(file(pixels), "raw", value_range=(0, 1))


def test_a_report_on_a_record_whose_white_is_not_stated_says_what_to_do(tmp_path: Path) -> None:
    image = NOT_STATED["signed 32-bit integers"]
    write_lmdb(tmp_path / "db", [(b"0", encoded_tensorprotos(image, 0))])
    report = inspect_database(DbInfoConfig(path=tmp_path / "db"), lambda done, total: None)
    assert report.first_damaged is not None
    assert "can't be read: its pixels are signed 32-bit" in report.first_damaged
    assert "with --encoding png --value_range LOW HIGH" in report.first_damaged


def test_training_on_a_record_whose_white_is_not_stated_names_it() -> None:
    out = np.zeros((32, 32, 3), np.uint8)
    with pytest.raises(
        DataError,
        match=r"record 5 can't be decoded: its pixels are signed .* --value_range LOW HIGH",
    ):
        decode(
            NOT_STATED["signed 32-bit integers"],
            lambda width, height: View(box=(0, 0, 32, 32), size=32),
            out,
            fill=np.zeros(3, np.uint8),
            name=lambda: "record 5",
        )


@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        (
            [],
            1,
            "a/0.tif can't be read: its pixels are signed 32-bit .* png --value_range LOW",
        ),
        (
            ["--value_range", "-1000", "3000"],
            0,
            r"1 image of signed 32-bit integers: scaled to 8 bits, from -1,000 \(black\) to 3,000 "
            r"\(white\); the values are 0 to 255\.",
        ),
        (["--value_range", "5", "5"], 2, "--value_range 5 5: the first value, black, must be less"),
        (["--value_range", "0", "inf"], 2, "--value_range 0 inf: the first value, black, must be"),
    ],
)
def test_the_command_refuses_or_says_its_scale(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    status: int,
    said: str,
) -> None:
    put(tmp_path / "in", "a/0.tif", NOT_STATED["signed 32-bit integers"])
    assert main(["db", "create", str(tmp_path / "in"), str(tmp_path / "db"), *flags]) == status
    assert re.search(said, "".join(capsys.readouterr()))


def test_twelve_bits_in_files_of_sixteen_are_refused_until_their_range_is_given(
    tmp_path: Path,
) -> None:
    for number in range(2):
        put(tmp_path / "in", f"a/{number}.png", file(ramp(4095, np.uint16), "PNG"))
    with pytest.raises(
        DataError,
        match=r"all values of its 2 images of 16-bit integers are within 0 to 4,095, where white "
        r"is 65,535: .*Give --value_range 0 4095, .* or --value_range 0 65535 to leave them so",
    ):
        create(tmp_path / "in", tmp_path / "db")
    assert not (tmp_path / "db").exists()
    create(tmp_path / "in", tmp_path / "db", encoding="raw", value_range=(0, 4095))
    assert [int(pixels_of(r.image).max()) for r in records(tmp_path / "db")] == [255, 255]


def test_one_bright_image_of_a_set_shows_that_a_dark_one_is_dark(tmp_path: Path) -> None:
    put(tmp_path / "in", "a/0.png", file(ramp(300, np.uint16), "PNG"))
    put(tmp_path / "in", "a/1.png", file(ramp(65535, np.uint16), "PNG"))
    put(tmp_path / "in", "a/2.png", file(ramp(255, np.uint8), "PNG"))
    created = create(tmp_path / "in", tmp_path / "db")
    assert list(created.reduced.notes()) == [
        "2 images of 16-bit integers: scaled to 8 bits, from 0 (black) to 65,535 (white); the "
        "values are 0 to 65,535."
    ]


def colour_ppm(top: int) -> bytes:
    pixels = np.repeat(ramp(top, ">u2")[:, :, None], 3, axis=2)
    return b"P6 32 32 65535\n" + pixels.tobytes()


def test_dark_colours_of_sixteen_bits_are_refused_too(tmp_path: Path) -> None:
    put(tmp_path / "in", "a/0.ppm", colour_ppm(65535))
    created = create(tmp_path / "in", tmp_path / "bright")
    assert "1 image of 16-bit colours" in next(created.reduced.notes())
    put(tmp_path / "in", "a/0.ppm", colour_ppm(4095))
    with pytest.raises(DataError, match=r"16-bit colours .* Convert them to 8 bits a colour"):
        create(tmp_path / "in", tmp_path / "dark", value_range=(0, 4095))


def test_a_database_of_deep_images_is_converted_by_the_same_rules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lmdb(
        tmp_path / "old", [(b"0", encoded_tensorprotos(file(ramp(4095, np.uint16), "PNG"), 0))]
    )
    words = ["db", "convert", str(tmp_path / "old"), str(tmp_path / "new"), "--encoding", "png"]
    assert main(words) == 1
    assert "Give --value_range 0 4095" in capsys.readouterr().err
    assert main([*words, "--value_range", "0", "4095"]) == 0
    (record,) = records(tmp_path / "new")
    assert pixels_of(record.image).max() == 255


@pytest.mark.parametrize(("mode", "level"), [("1", 255), ("L", 200), ("LA", 200), ("P", 200)])
def test_shallow_grey_and_palettes_keep_their_levels(mode: str, level: int) -> None:
    content = io.BytesIO()
    Image.new("L", (8, 8), level).convert(mode).save(content, "PNG")
    stored = stored_form(content.getvalue(), "raw")
    assert stored.depth is None
    assert int(pixels_of(stored.image).max()) == int(pixels_of(stored.image).min()) == level
