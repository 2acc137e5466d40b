"""The protobuf messages of both record formats.

    TensorProtos { repeated TensorProto protos = 1; }      Caffe2's native record (caffe2.proto)
    Datum        { channels, height, width, data, … }      Caffe's record (caffe.proto)

Names, field numbers and wire types are those of the two published files; fields that training
doesn't read are left out, and protobuf passes over them. `data_type` is declared as a number, not
as an enumeration, so that a type we don't know is still there to be named in an error.
"""

from __future__ import annotations

from typing import Final

from paceline.state.protobuf import Field, Messages, message_classes

# TensorProto.DataType, the numbers that occur in records.
FLOAT = 1
INT32 = 2
BYTE = 3
STRING = 4
UINT8 = 6
INT64 = 10

_MESSAGES: Final[Messages] = {
    "TensorProto": {
        "dims": (1, Field.TYPE_INT64, True, False),
        "data_type": (2, Field.TYPE_INT32, False, False),
        "float_data": (3, Field.TYPE_FLOAT, True, True),
        "int32_data": (4, Field.TYPE_INT32, True, True),
        "byte_data": (5, Field.TYPE_BYTES, False, False),
        "string_data": (6, Field.TYPE_BYTES, True, False),
        "int64_data": (10, Field.TYPE_INT64, True, True),
    },
    "TensorProtos": {"protos": (1, Field.TYPE_MESSAGE, True, "TensorProto")},
    "Datum": {
        "channels": (1, Field.TYPE_INT32, False, False),
        "height": (2, Field.TYPE_INT32, False, False),
        "width": (3, Field.TYPE_INT32, False, False),
        "data": (4, Field.TYPE_BYTES, False, False),
        "label": (5, Field.TYPE_INT32, False, False),
        "float_data": (6, Field.TYPE_FLOAT, True, False),
        "encoded": (7, Field.TYPE_BOOL, False, False),
    },
}


_CLASSES = message_classes("paceline.records", _MESSAGES)
TensorProtos = _CLASSES["TensorProtos"]
Datum = _CLASSES["Datum"]
