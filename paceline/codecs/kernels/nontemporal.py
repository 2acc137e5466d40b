"""Sums of contributions with non-temporal stores, whose results bypass the caches.

In a cache, results that are read much later, or by another core, would displace this core's data.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from importlib import import_module
from typing import Any

numba: Any = import_module("numba")  # its own types are for what it compiles, not for callers
ir: Any = import_module("llvmlite.ir")
intrinsic: Any = import_module("numba.extending").intrinsic

LINE = 64  # bytes


def _write(builder, value, address):
    """Store a vector so that it takes no place in the caches."""
    place = builder.store(value, builder.inttoptr(address, value.type.as_pointer()))
    place.align = LINE
    one = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
    place.set_metadata("nontemporal", one)


def _product(builder, weight, address):
    """Load a line of values, and multiply them."""
    kind = ir.VectorType(weight.type, LINE // (4 if isinstance(weight.type, ir.FloatType) else 8))
    values = builder.load(builder.inttoptr(address, kind.as_pointer()))
    values.align = LINE // kind.count
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), weight, ir.IntType(32)(0))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), kind.count), [0] * kind.count)
    return builder.fmul(builder.shuffle_vector(first, first, lanes), values)


@intrinsic
def weigh_past_caches(_, out, a, weight):
    """Store weight * a in a line of memory."""

    def generate(context, builder, _, arguments):
        out, a, weight = arguments
        _write(builder, _product(builder, weight, a), out)
        return context.get_dummy_value()

    return numba.types.void(out, a, weight), generate


@intrinsic
def add_past_caches(_, out, a, wa, b, wb):
    """Store wa * a + wb * b in a line of memory."""

    def generate(context, builder, _, arguments):
        out, a, wa, b, wb = arguments
        total = builder.fadd(_product(builder, wa, a), _product(builder, wb, b))
        _write(builder, total, out)
        return context.get_dummy_value()

    return numba.types.void(out, a, wa, b, wb), generate


@intrinsic
def fence(_):
    """Order non-temporal stores before all later stores."""

    def generate(context, builder, _, __):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return numba.types.void(), generate
