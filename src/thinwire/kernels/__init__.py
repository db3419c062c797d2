"""The arithmetic of codecs (vectors to bytes and back), arrays of models (`rows`, `normalised`, `linear`) and coresets
(`nearest`).

It runs as C on the CPU, as Triton on a GPU, and as torch (`thinwire.kernels.reference`) where neither is available.
"""

from thinwire.kernels.largest import pack_indices, packed_nbytes, top_k, unpack_indices
from thinwire.kernels.quantized import dequantize_, quantize_, quantized_nbytes
from thinwire.kernels.rng import mix64, uniform
from thinwire.kernels.signs import decode_signs_, encode_signs_, sign_nbytes, sum_signs_
from thinwire.kernels.sketched import heavy, sketch_, unsketch

__all__ = [
    "decode_signs_",
    "dequantize_",
    "encode_signs_",
    "heavy",
    "mix64",
    "pack_indices",
    "packed_nbytes",
    "quantize_",
    "quantized_nbytes",
    "sign_nbytes",
    "sketch_",
    "sum_signs_",
    "top_k",
    "uniform",
    "unpack_indices",
    "unsketch",
]
