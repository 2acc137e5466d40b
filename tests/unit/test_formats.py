"""Both record formats, as other programs write them and as we do."""

from __future__ import annotations

import io
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image

from paceline.data.db.formats.record_formats import (
    UnfitRecord,
    decode_record,
    encode_record,
    printable,
)
from paceline.data.source import Record
from tests.harness.data.record_bytes import (
    BYTE,
    FLOAT,
    INT32,
    INT64,
    STRING,
    UINT8,
    bgr_planes,
    bgr_rows,
    blob,
    dims,
    encoded_tensorprotos,
    int_label,
    number,
    packed_floats,
    packed_ints,
    raw_datum,
    raw_tensorprotos,
    single_floats,
    tensorprotos,
)

KEY = b"00000007_cat\x00.jpg"
# Two rows of three pixels, no two values equal: a swapped axis or colour shows.
RGB = np.arange(1, 19, dtype=np.uint8).reshape(2, 3, 3)
GREY = np.arange(1, 7, dtype=np.uint8).reshape(2, 3, 1)
IMAGE = dims(2, 3, 3) + number(2, BYTE) + blob(5, bgr_rows(RGB))
DATUM_DIMS = number(1, 3) + number(2, 2) + number(3, 3)
BGR_VALUES = bgr_planes(RGB).ravel().tolist()


def image_file(form: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(RGB).save(file, form)
    return file.getvalue()


TENSORPROTOS = {
    "colour": (raw_tensorprotos(RGB, 5), RGB),
    "UINT8, kept as integers": (
        tensorprotos(
            dims(2, 3, 3) + number(2, UINT8) + packed_ints(4, bgr_rows(RGB)), int_label(5)
        ),
        RGB,
    ),
    "floating point": (
        tensorprotos(
            dims(2, 3, 3) + number(2, FLOAT) + packed_floats(3, bgr_rows(RGB)), int_label(5)
        ),
        RGB,
    ),
    "grey, two dims": (
        tensorprotos(dims(2, 3) + number(2, BYTE) + blob(5, GREY.tobytes()), int_label(5)),
        GREY,
    ),
    "grey, three dims": (
        tensorprotos(dims(2, 3, 1) + number(2, BYTE) + blob(5, GREY.tobytes()), int_label(5)),
        GREY,
    ),
    "label INT64": (
        tensorprotos(IMAGE, dims(1) + number(2, INT64) + packed_ints(10, [5])),
        RGB,
    ),
    "label FLOAT": (
        tensorprotos(IMAGE, dims(1) + number(2, FLOAT) + packed_floats(3, [5.0])),
        RGB,
    ),
    "packed dims, named tensors, unpacked label": (
        tensorprotos(
            packed_ints(1, [2, 3, 3]) + number(2, BYTE) + blob(5, bgr_rows(RGB)) + blob(7, b"data"),
            number(2, INT32) + number(4, 5) + blob(7, b"label"),
        ),
        RGB,
    ),
    "a third tensor": (tensorprotos(IMAGE, int_label(5), int_label(9)), RGB),
}
DATUM = {
    "colour": (raw_datum(bgr_planes(RGB), 5), RGB),
    "grey": (raw_datum(GREY.transpose(2, 0, 1), 5), GREY),
    "floating point, unpacked": (DATUM_DIMS + number(5, 5) + single_floats(6, BGR_VALUES), RGB),
    "floating point, packed": (DATUM_DIMS + number(5, 5) + packed_floats(6, BGR_VALUES), RGB),
    "another order of fields": (
        blob(4, bytes(BGR_VALUES)) + number(7, 0) + number(5, 5) + DATUM_DIMS,
        RGB,
    ),
}


def check_pixels(value, pixels, expected_format):
    record, found = decode_record(value)
    assert found == expected_format
    assert record.label == 5
    assert record.image.dtype == np.uint8
    assert record.image.shape == pixels.shape
    assert np.array_equal(record.image, pixels)
    assert record.image.flags.writeable  # torch warns of anything else


@pytest.mark.parametrize("name", TENSORPROTOS)
def test_tensorprotos_pixels_have_the_right_colours_and_label(name):
    check_pixels(*TENSORPROTOS[name], "tensorprotos")


@pytest.mark.parametrize("name", DATUM)
def test_datum_pixels_have_the_right_colours_and_label(name):
    check_pixels(*DATUM[name], "datum")


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
def test_an_encoded_file_comes_out_as_it_was(form):
    file = image_file(form)
    flagged = blob(4, file) + number(5, 3) + number(7, 1)
    for value, expected_format in (
        (encoded_tensorprotos(file, 3), "tensorprotos"),
        (flagged, "datum"),
        (DATUM_DIMS + flagged, "datum"),
        (DATUM_DIMS + blob(4, file) + number(5, 3), "datum"),  # the flag forgotten
    ):
        assert decode_record(value) == (Record(file, 3), expected_format)


def test_a_datum_without_a_label_has_label_0_as_caffe_reads_it():
    record, _ = decode_record(blob(4, image_file("PNG")) + number(7, 1))
    assert record.label == 0


UNFIT = {
    "empty": (b"", "neither"),
    "text": (b"hello, world", "neither"),
    "an image without a record": (image_file("PNG"), "but a bare image file, which has no label"),
    "keys": (pickle.dumps([b"0", b"1"]), "but a pickled list, such as the list of keys"),
    "keys, older": (pickle.dumps([b"0", b"1"], protocol=2), "but a pickled list"),
    "a length": (pickle.dumps(50_000), "but a pickled number, such as the count of records"),
    "a length as text": (b"50000", "but the number 50000, such as the count of records"),
    "a pickled sample": (pickle.dumps((b"\xff\xd8\xff", 3)), "but a pickled object of Python"),
    "JSON": (b'{"classes": ["cat"]}', "but JSON text"),
    "what only begins as a pickle": (
        b"\x80\x04\xff\xff.",
        "are neither a TensorProtos nor a Datum record: the record",
    ),
    "both formats at once": (raw_tensorprotos(RGB, 5) + blob(4, b"x"), "neither"),
    "a datum without data": (DATUM_DIMS + number(5, 1), "neither"),
    "a tensor without a label": (tensorprotos(IMAGE), "no label"),
    "an image of strings": (
        tensorprotos(number(2, STRING) + blob(6, b"cat"), int_label(1)),
        "not an image file",
    ),
    "an image of no string": (tensorprotos(number(2, STRING), int_label(1)), "nothing"),
    "a flagged datum of text": (blob(4, b"cat") + number(7, 1), "not an image file"),
    "half floats": (tensorprotos(dims(2, 3) + number(2, 12), int_label(1)), "data type 12"),
    "too few pixels": (
        tensorprotos(dims(2, 3, 3) + number(2, BYTE) + blob(5, bytes(17)), int_label(1)),
        "17 values",
    ),
    "one dim": (tensorprotos(dims(6) + number(2, BYTE) + blob(5, bytes(6)), int_label(1)), "dims"),
    "four channels": (
        tensorprotos(dims(1, 1, 4) + number(2, BYTE) + blob(5, bytes(4)), int_label(1)),
        "1 (grey) or 3 (colour)",
    ),
    "huge dims": (
        number(1, 3) + number(2, 2**31 - 1) + number(3, 2**31 - 1) + blob(4, b"x"),
        "1 values",
    ),
    "negative dims": (
        number(1, 3) + number(2, -2) + number(3, -3) + blob(4, bytes(18)),
        "-2, -3",
    ),
    "scaled pixels": (DATUM_DIMS + packed_floats(6, [v / 18 for v in BGR_VALUES]), "0 to 1"),
    "pixels around zero": (
        DATUM_DIMS + packed_floats(6, [v - 9.0 for v in BGR_VALUES]),
        "0 to 255",
    ),
    "pixels that are no numbers": (DATUM_DIMS + packed_floats(6, [float("nan")] * 18), "0 to 255"),
    "negative label": (raw_datum(bgr_planes(RGB), -1), "label is -1"),
    "label with a fraction": (
        tensorprotos(IMAGE, dims(1) + number(2, FLOAT) + packed_floats(3, [1.5])),
        "label is 1.5",
    ),
    "label without end": (
        tensorprotos(IMAGE, dims(1) + number(2, FLOAT) + packed_floats(3, [float("inf")])),
        "label is inf",
    ),
    "two labels": (
        tensorprotos(IMAGE, dims(2) + number(2, INT32) + packed_ints(4, [1, 2])),
        "label is 1, 2",
    ),
    "label of strings": (
        tensorprotos(IMAGE, number(2, STRING) + blob(6, b"cat")),
        "label has data type 4",
    ),
    "empty label": (tensorprotos(IMAGE, number(2, INT32)), "label is empty"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_an_unfit_record_is_an_error_that_says_why(name):
    value, reason = UNFIT[name]
    with pytest.raises(UnfitRecord) as raised:
        decode_record(value)
    assert reason in str(raised.value)


def test_a_mixture_is_an_error_that_names_both_formats():
    for value, expected in (
        (raw_datum(bgr_planes(RGB), 5), "tensorprotos"),
        (raw_tensorprotos(RGB, 5), "datum"),
    ):
        with pytest.raises(UnfitRecord, match=r"(Datum.*Tensor|Tensor.*Datum)"):
            decode_record(value, expected)


def test_a_long_key_is_cut_in_the_message():
    assert printable(b"00000007_cat\x00.jpg") == '"00000007_cat\\x00.jpg"'
    assert printable("7_été\u2028\x1b.jpg".encode()) == '"7_été\\u2028\\x1b.jpg"'
    assert printable(b"7_\xe9t\xc3") == '"7_\\xe9t\\xc3"'
    assert len(printable(b"k" * 5000)) < 400


@pytest.mark.parametrize(
    "value", [raw_tensorprotos(RGB, 5), raw_datum(bgr_planes(RGB), 5)], ids=["tensors", "datum"]
)
def test_no_truncated_record_gives_another_image(value):
    for length in range(len(value)):
        try:
            record, _ = decode_record(value[:length])
        except UnfitRecord:
            continue
        # A Datum cut just before its label is a Datum without one.
        assert length == len(value) - 2
        assert np.array_equal(record.image, RGB)


def test_records_are_written_with_the_official_numbers_byte_for_byte():
    assert encode_record(RGB, 300, "tensorprotos") == raw_tensorprotos(RGB, 300)
    assert encode_record(b"\xff\xd8\xff", 0, "tensorprotos") == encoded_tensorprotos(
        b"\xff\xd8\xff", 0
    )
    assert encode_record(RGB, 300, "datum") == raw_datum(bgr_planes(RGB), 300)
    assert encode_record(b"\xff\xd8\xff", 0, "datum") == (
        blob(4, b"\xff\xd8\xff") + number(5, 0) + number(7, 1)
    )
    grey = dims(2, 3) + number(2, BYTE) + blob(5, GREY.tobytes())
    assert encode_record(GREY, 1, "tensorprotos") == tensorprotos(grey, int_label(1))


pixels_of_any_size = st.tuples(
    st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 3])
).flatmap(lambda shape: arrays.arrays(np.uint8, shape))
labels = st.integers(0, 2**31 - 1)


@given(pixels_of_any_size, labels)
def test_pixels_survive_both_formats(pixels, label):
    for name in ("tensorprotos", "datum"):
        record, found = decode_record(encode_record(pixels, label, name))
        assert found == name
        assert record.label == label
        assert np.array_equal(record.image, pixels)


@given(st.sampled_from([b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"]), st.binary(max_size=200), labels)
def test_encoded_files_survive_both_formats_whatever_their_bytes(magic, rest, label):
    for name in ("tensorprotos", "datum"):
        record, found = decode_record(encode_record(magic + rest, label, name))
        assert (found, record) == (name, Record(magic + rest, label))


@given(st.binary(max_size=300))
def test_junk_is_a_data_error(junk):
    try:
        record, _ = decode_record(junk)
    except UnfitRecord:
        return
    assert record.image[:3] in (b"\xff\xd8\xff", b"\x89PN")  # by an unlikely chance, a record


@given(st.data())
def test_a_flipped_byte_gives_a_whole_record_or_a_data_error(data):
    value = bytearray(
        data.draw(st.sampled_from([v for v, _ in (*TENSORPROTOS.values(), *DATUM.values())]))
    )
    value[data.draw(st.integers(0, len(value) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        record, _ = decode_record(bytes(value))
    except UnfitRecord:
        return
    assert record.label >= 0
    assert isinstance(record.image, bytes) or record.image.shape[2] in (1, 3)
