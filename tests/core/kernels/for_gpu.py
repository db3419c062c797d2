# SPDX-License-Identifier: Apache-2.0
"""Compile the kernels for a GPU, which need not be there: no product fused with a sum, and no atomic operation."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from thinwire.core.kernels import (
    triton_chunks,
    triton_floats,
    triton_quantized,
    triton_rounded,
    triton_rows,
    triton_signs,
    triton_sketched,
)

KINDS = {
    **dict.fromkeys(("x", "residual", "scales", "out", "table"), "*fp32"),
    **dict.fromkeys(("stream", "streams", "planes", "payload", "payloads"), "*u8"),
    **dict.fromkeys(("shift", "half", "scale"), "fp32"),
    **dict.fromkeys(("low", "high"), "i64"),
    **dict.fromkeys(("places", "wrong"), "*i32"),
    "values": "*fp32",
    "seeds": "*i64",
    **dict.fromkeys(("gradient", "mean", "square", "most", "momentum"), "*fp32"),
    "numbers": "*fp64",
    "active": "*u8",
}
DOUBLE = ("x", "gradient", "mean", "square", "most", "momentum")
FIXED: list[tuple[Any, dict[str, object]]] = [
    (triton_signs._encode, {"SPAN": 2048, "RESIDUAL": True, "SQUARED": False, "HALF": True}),
    (triton_signs._encode, {"SPAN": 8, "RESIDUAL": False, "SQUARED": True, "HALF": False}),
    (triton_signs._sum, {"SPAN": 2048, "PER": 2048}),
    (triton_quantized._quantize, {"SPAN": 2048, "BITS": 4, "SQUARED": False, "UP": True}),
    (triton_quantized._quantize, {"SPAN": 64, "BITS": 1, "SQUARED": True, "UP": False}),
    (triton_quantized._dequantize, {"SPAN": 2048, "BITS": 3, "PER": 8, "DITHER": True}),
    *(
        (triton_rounded._encode, {"SPAN": span, "BITS": bits, "STEP": 0.5, "RESIDUAL": residual})
        for span, bits, residual in ((2048, 4, True), (16, 1, False), (64, 7, True))
    ),
    *(
        (triton_rounded._decode, {"SPAN": 2048, "BITS": bits, "PER": per, "SUM": add})
        for bits, per, add in ((4, 2048, False), (8, 8, True))
    ),
    *(
        (
            triton_chunks._encode,
            {"SPAN": span, "KEPT": kept, "BYTES": 128, "BITS": bits, "STEP": 0.5, "RESIDUAL": residual},
        )
        for span, kept, bits, residual in ((4096, 64, 2, True), (64, 1, 5, False))
    ),
    *((triton_chunks._add, {"SPAN": 4096, "KEPT": 64, "BITS": 2, "FRESH": fresh}) for fresh in (True, False)),
    (triton_floats._encode, {"SPAN": 2048}),
    (triton_floats._decode, {"SPAN": 2048}),
    (triton_floats._decode, {"SPAN": 2048, "n": 1}),
    # Triton makes arguments that are 1 constants.
    (
        triton_rounded._encode,
        {"SPAN": 8, "BITS": 8, "STEP": 0.5, "RESIDUAL": False, "n": 1, "plane": 1},
    ),
    (
        triton_rounded._decode,
        {"SPAN": 2048, "BITS": 3, "PER": 1, "SUM": False, "n": 1, "plane": 1, "number": 1, "scale_stride": 1},
    ),
    (triton_sketched._sketch, {"SPAN": 1024}),
    (triton_sketched._sketch, {"SPAN": 1024, "columns": 1, "blocks": 1}),
    (triton_sketched._unsketch, {"SPAN": 1024, "ROWS": 1}),
    (triton_sketched._unsketch, {"SPAN": 1024, "ROWS": 5}),
    (triton_rows._adam, {"SPAN": 1024, "AMSGRAD": True}),
    (triton_rows._adam, {"SPAN": 1024, "AMSGRAD": False, "n": 1}),
    (triton_rows._sgd, {"SPAN": 1024}),
]
# Also for parameters in fp64, where the machine's own quotients and roots are built from fused products.
IN_DOUBLE: list[tuple[Any, dict[str, object]]] = [
    (triton_rows._adam, {"SPAN": 1024, "AMSGRAD": True}),
    (triton_rows._sgd, {"SPAN": 1024}),
]


def compiled(kernel: Any, fixed: dict[str, object], double: bool = False) -> str:
    """Its assembly."""
    names = list(kernel.arg_names)
    kinds = {**KINDS, **dict.fromkeys(DOUBLE, "*fp64")} if double else KINDS
    signature = {name: "constexpr" if name in fixed else kinds.get(name, "i32") for name in names}
    if kernel in (triton_floats._encode, triton_chunks._encode):
        signature["out"] = "*u8"
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in fixed.items()})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
    assert len(made.asm["cubin"]) > 1000
    return str(made.asm["ptx"])


def main() -> None:
    for kernel, fixed in FIXED:
        assembly = compiled(kernel, fixed)
        assert not [word for word in ("fma.", "atom.", "red.global") if word in assembly]
    for kernel, fixed in IN_DOUBLE:
        compiled(kernel, fixed, double=True)
    print(f"{len(FIXED) + len(IN_DOUBLE)} compiled")


if __name__ == "__main__":
    main()
