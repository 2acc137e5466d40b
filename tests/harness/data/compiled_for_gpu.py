"""A program that compiles the kernels of `data/gpu_decode` for an H100, on a machine without one.

A process of its own, because Triton is the interpreter in that of the tests.
"""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paceline.data.gpu_decode import kernel

_TYPES = {"plans": "*i64", "sums": "*i64", "resized": "*u8", "constants": "*fp32"}
_TYPES |= {"images": "*fp32", "weights": "*i32", "taps": "i32"}


def _compile() -> None:
    constants = {"SIZE": 224, "CHANNELS": 3}
    for function in (kernel._weigh, kernel._resize, kernel._finish):
        names = function.arg_names
        signature = {n: "constexpr" if n in constants else _TYPES.get(n, "i64") for n in names}
        values = {(names.index(n),): value for n, value in constants.items() if n in names}
        source = ASTSource(function, signature, values)
        built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=kernel.OPTIONS)
        assert built.asm["cubin"]
        assert all(each.do_not_specialize for each in function.params if each.name == "taps")
        # A GPU has few units for float64, of which a pixel must need none.
        assert (".f64" in built.asm["ptx"]) == (function is kernel._weigh)


if __name__ == "__main__":
    _compile()
