"""Classes of protobuf messages, built in code: no compiler, no generated files.

The messages live in a pool of their own: a program that has Caffe's or Caffe2's modules loaded sees
no conflict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2, message_factory

Field = descriptor_pb2.FieldDescriptorProto

# By a message's name, its fields by their names: number, type, repeated, and the name of the type
# of a field that is a message, or whether it is packed.
Messages = Mapping[str, Mapping[str, tuple[int, Any, bool, str | bool]]]


def message_classes(package: str, messages: Messages) -> dict[str, Any]:
    """Build the classes of messages, by name.

    Args:
        package: the name of their package.
        messages: their fields.
    """
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{package}.proto", package=package, syntax="proto2"
    )
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for field_name, (number, kind, repeated, more) in fields.items():
            label = Field.LABEL_REPEATED if repeated else Field.LABEL_OPTIONAL
            field = message.field.add(name=field_name, number=number, type=kind, label=label)
            if kind == Field.TYPE_MESSAGE:
                field.type_name = f".{package}.{more}"
            elif more:
                field.options.packed = True
    classes = message_factory.GetMessages([file])  # in a pool of their own
    return {name: classes[f"{package}.{name}"] for name in messages}
