"""The protobuf messages of both record formats, built in code: no compiler, no generated files.

    TensorProtos { repeated TensorProto protos = 1; }      Caffe2's native record (caffe2.proto)
    Datum        { channels, height, width, data, … }      Caffe's record (caffe.proto)

Names, field numbers and wire types are those of the two published files; fields that training
doesn't read are left out, and protobuf passes over them. `data_type` is declared as a number, not
as an enumeration, so that a type we don't know is still there to be named in an error. The
messages live in a pool of their own: a program that has Caffe's modules loaded sees no conflict.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import descriptor_pb2, message_factory

_Field = descriptor_pb2.FieldDescriptorProto
_PACKAGE: Final = "paceline"

# TensorProto.DataType, the numbers that occur in records.
FLOAT = 1
INT32 = 2
BYTE = 3
STRING = 4
UINT8 = 6
INT64 = 10

# Per message: name -> (number, type, repeated, packed).
_MESSAGES: Final[dict[str, dict[str, tuple[int, Any, bool, bool]]]] = {
    "TensorProto": {
        "dims": (1, _Field.TYPE_INT64, True, False),
        "data_type": (2, _Field.TYPE_INT32, False, False),
        "float_data": (3, _Field.TYPE_FLOAT, True, True),
        "int32_data": (4, _Field.TYPE_INT32, True, True),
        "byte_data": (5, _Field.TYPE_BYTES, False, False),
        "string_data": (6, _Field.TYPE_BYTES, True, False),
        "int64_data": (10, _Field.TYPE_INT64, True, True),
    },
    "TensorProtos": {"protos": (1, _Field.TYPE_MESSAGE, True, False)},
    "Datum": {
        "channels": (1, _Field.TYPE_INT32, False, False),
        "height": (2, _Field.TYPE_INT32, False, False),
        "width": (3, _Field.TYPE_INT32, False, False),
        "data": (4, _Field.TYPE_BYTES, False, False),
        "label": (5, _Field.TYPE_INT32, False, False),
        "float_data": (6, _Field.TYPE_FLOAT, True, False),
        "encoded": (7, _Field.TYPE_BOOL, False, False),
    },
}


def _message_classes() -> dict[str, Any]:
    """Build the messages' classes, by name."""
    file = descriptor_pb2.FileDescriptorProto(
        name="paceline/records.proto", package=_PACKAGE, syntax="proto2"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field_name, (number, kind, repeated, packed) in fields.items():
            label = _Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL
            field = message.field.add(name=field_name, number=number, type=kind, label=label)
            if packed:
                field.options.packed = True
            if kind == _Field.TYPE_MESSAGE:
                field.type_name = f".{_PACKAGE}.TensorProto"
    classes: dict[str, Any] = message_factory.GetMessages([file])  # in a pool of their own
    return classes


_CLASSES = _message_classes()
TensorProtos = _CLASSES[f"{_PACKAGE}.TensorProtos"]
Datum = _CLASSES[f"{_PACKAGE}.Datum"]
