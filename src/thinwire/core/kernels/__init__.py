# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of codecs, of arrays of models (`rows`, `normalised`, `linear`) and of coresets (`nearest`).

It runs as C on the CPU, as Triton on a GPU, and where neither is available as torch, in
`thinwire.core.kernels.reference`.

Meta tensors have sizes but no data. As with torch's own operators, results have the right sizes, and nothing is
computed. Only `reading` turns data into Python values, so a dry run executes the lines of a real one.
"""

from thinwire.core.kernels.base import as_fp32, quantized_nbytes
from thinwire.core.kernels.chunks import add_chunks_, chunk_kept, chunked_nbytes, encode_chunks_
from thinwire.core.kernels.floats import decode_fp8, decode_powers, encode_fp8, encode_powers
from thinwire.core.kernels.largest import pack_indices, packed_nbytes, top_k, unpack_indices
from thinwire.core.kernels.quantized import clip_outliers, dequantize_, quantize_
from thinwire.core.kernels.reading import (
    Flag,
    all_finite,
    all_finite_each,
    both,
    finite_flags,
    is_finite,
    join,
    read_flags,
    take,
)
from thinwire.core.kernels.rng import mix64, uniform
from thinwire.core.kernels.rounded import decode_rounded_, encode_rounded_, sum_rounded_
from thinwire.core.kernels.signs import decode_signs_, encode_signs_, pack_signs, sign_nbytes, sum_signs_, unpack_signs
from thinwire.core.kernels.sketched import cells_at, heavy, sketch_, unsketch

__all__ = [
    "Flag",
    "add_chunks_",
    "all_finite",
    "all_finite_each",
    "as_fp32",
    "both",
    "cells_at",
    "chunk_kept",
    "chunked_nbytes",
    "clip_outliers",
    "decode_fp8",
    "decode_powers",
    "decode_rounded_",
    "decode_signs_",
    "dequantize_",
    "encode_chunks_",
    "encode_fp8",
    "encode_powers",
    "encode_rounded_",
    "encode_signs_",
    "finite_flags",
    "heavy",
    "is_finite",
    "join",
    "mix64",
    "pack_indices",
    "pack_signs",
    "packed_nbytes",
    "quantize_",
    "quantized_nbytes",
    "read_flags",
    "sign_nbytes",
    "sketch_",
    "sum_rounded_",
    "sum_signs_",
    "take",
    "top_k",
    "uniform",
    "unpack_indices",
    "unpack_signs",
    "unsketch",
]
