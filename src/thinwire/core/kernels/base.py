# SPDX-License-Identifier: Apache-2.0
"""Choose the implementation and the number of threads of a kernel, and check its arguments."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, wraps
from importlib.util import find_spec
from itertools import pairwise
from threading import Lock, RLock
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from thinwire.core.kernels import native
from thinwire.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")
# For torch's bits: never reassociate sums, and never fuse a product with a sum.
FLAGS = ["-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]
if platform.machine() == "x86_64":
    # By default compilers avoid 512-bit vectors; loops with much arithmetic per element are faster with them.
    FLAGS.append("-mprefer-vector-width=512")
_SOURCES = (
    *("base.c", "signs.c", "quantized.c", "rounded.c", "largest.c", "chunks.c", "sketched.c", "rows.c"),
    *("normalised.c", "linear.c", "adaptive.c"),
)
# Fewer multiplications than this take less time than starting another thread.
WORK_PER_THREAD = 1 << 22
# Larger results would evict each other from the caches, so they bypass them (non-temporal stores).
STREAM_BYTES = 8 << 20
_long, _int, _float, _key, _at = ctypes.c_int64, ctypes.c_int, ctypes.c_float, ctypes.c_uint64, ctypes.c_void_p

# The argument types of each function of the C files, by its name without `thinwire_`.
_ARGUMENTS = {
    "uniform": [_at, _long, _key, _key],
    "encode_signs": [_at, _at, _at, _long, _long, _int, _int],
    "sum_signs": [_at, _long, _long, _at, _long, _long, _int],
    "quantize": [_at, _at, _at],
    "dequantize": [_at, _at, _at],
    "encode_rounded": [_at, _at, _at, _at],
    "decode_rounded": [_at, _at, _at],
    "encode_chunks": [_at, _at, _at, _at],
    "decode_chunks": [_at, _at, _at],
    "top_k": [_at, _long, _long, _at, _at, _at, _long],
    "pack_indices": [_at, _long, _int, _at],
    "unpack_indices": [_at, _long, _int, _at],
    "sketch": [_at, _long, _at, _long, _long, _key, _float],
    "unsketch": [_at, _at],
    "unsketch_at": [_at, _at, _long, _at],
    "heavy": [_at, _long, _at, _at, _at, _long],
    **{f"adam_rows{dtype}": [_at] * 6 for dtype in ("", "_double")},
    **dict.fromkeys(("layer_norm", "batch_norm"), (_at, _at, _at)),
    "layer_norm_back": [_at] * 6,
    "batch_norm_back": [_at] * 5,
    "linear_weights": [*[_at] * 5, _long, _at],
    "lamb_direction": [*[_at] * 5, _long, _at, _at],
    "scaled_step": [_at, _at, _long, _float, _float],
    "frozen_adam_step": [*[_at] * 4, _long, *[_float] * 3],
    **{f"sgd_rows{dtype}": [_at] * 4 for dtype in ("", "_double")},
}
_RETURN_INT64 = ("top_k", "heavy", "linear_weights", "encode_chunks", "decode_chunks")
_THREAD_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def compiled(x: Tensor) -> ctypes.CDLL | None:
    """Return the compiled kernels if they can work on the tensor and are not disabled by THINWIRE_NATIVE=0."""
    return _compiled() if usable(x) else None


def usable(x: Tensor) -> bool:
    """Return True if compiled C may use a tensor: it is on the CPU, and THINWIRE_NATIVE is not 0."""
    return x.device.type == "cpu" and sys.byteorder == "little" and os.environ.get("THINWIRE_NATIVE") != "0"


@cache
def _compiled() -> ctypes.CDLL | None:
    return load(FLAGS)


def load(flags: list[str]) -> ctypes.CDLL | None:
    """Return the kernels' library, compiled with these flags; None if that is not possible."""
    return native.load("kernels", _SOURCES, flags, _ARGUMENTS, _RETURN_INT64)


def parallel_for(n: int, parts: int, work: Callable[[int, int], object]) -> None:
    """Call `work(begin, end)` for parts of the range 0 to n, with one thread for each part.

    torch's own threads are used if they belong to GNU OpenMP: those spin for a while after their last work, so other
    threads would compete with them for the cores.
    """
    if parts < 2:
        work(0, n)
        return
    spans, failures = pairwise(n * part // parts for part in range(parts + 1)), list[BaseException]()
    lock = Lock()

    def run(_: object = None) -> None:
        # OpenMP may start fewer threads than requested, so each takes parts until none is left.
        while True:
            # An exception, even an interrupt, would be lost in the calling C code.
            try:
                with lock:
                    span = next(spans, None)
                if span is None:
                    return
                work(*span)
            except BaseException as error:
                failures.append(error)

    openmp = gnu_openmp()
    if openmp is not None:
        openmp(_THREAD_FUNCTION(run), None, parts, 0)
    else:
        with ThreadPoolExecutor(parts) as threads:
            for future in [threads.submit(run) for _ in range(parts)]:
                future.result()
    if failures:
        raise failures[0]


@cache
def gnu_openmp() -> Callable[..., None] | None:
    """Return the function that runs another one on all of torch's threads, if they are GNU OpenMP's."""
    try:
        found = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    found.argtypes, found.restype = [_THREAD_FUNCTION, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return found


Sample = Callable[[torch.device], list[Tensor]]
_SAMPLE_SIZE = 5000
_agreeing: dict[tuple[Sample, torch.device], bool] = {}
_comparing = RLock()


def on_gpu(x: Tensor, sample: Sample | None = None) -> bool:
    """Return True if the tensor is on a GPU whose Triton kernels can be used.

    A compiler's fault would make codes wrong in silence. So with `sample` the kernels' first results on each GPU are
    compared with those on the CPU. If they differ, torch computes instead, and a warning says so.

    Args:
        x: the tensor.
        sample: computes something by the kernels on a device; its results may differ in the order of floating sums.
    """
    return x.is_cuda and _has_triton() and (sample is None or _agrees(sample, x.device))


def sample_of(device: torch.device) -> Tensor:
    """Return a vector for a `Sample`, equal on all devices."""
    draw = torch.Generator().manual_seed(0)
    return torch.randn(_SAMPLE_SIZE, generator=draw, dtype=torch.float32, device="cpu").to(device)


def _agrees(sample: Sample, device: torch.device) -> bool:
    # Other threads wait, so that none uses the kernels before. The calls of the sample itself are of this thread.
    with _comparing:
        if (sample, device) not in _agreeing:
            if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
                return False  # a stream that records a graph cannot be waited for
            _agreeing[sample, device] = True
            if problem := _problem_of(sample, device):
                _agreeing[sample, device] = False
                kind = sample.__module__.rpartition(".")[2]
                native.warn_of_slow_path(
                    f"thinwire's GPU kernels of {kind} are not used on {device}: {problem}. PyTorch computes the same, "
                    "more slowly. Try another version of Triton"
                )
        return _agreeing[sample, device]


def _problem_of(sample: Sample, device: torch.device) -> str:
    try:
        pairs = zip(sample(device), sample(torch.device("cpu")), strict=True)
        same = all(_close(found.cpu(), expected) for found, expected in pairs)
    except Exception as error:  # a compiler may raise anything
        return f"{type(error).__name__}: {error}"
    return "" if same else "their results differ from the CPU's"


def _close(found: Tensor, expected: Tensor) -> bool:
    if expected.is_floating_point():
        return torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
    return torch.equal(found, expected)


def on_its_device(launch: Callable[Concatenate[Tensor, P], T]) -> Callable[Concatenate[Tensor, P], T]:
    """Launch on the GPU of the first argument; Triton would use the thread's current one, initially the first."""

    @wraps(launch)
    def launched(x: Tensor, *args: P.args, **kwargs: P.kwargs) -> T:
        with torch.cuda.device_of(x):
            return launch(x, *args, **kwargs)

    return launched


@cache
def _has_triton() -> bool:
    if find_spec("triton") is not None:
        return True
    native.warn_of_slow_path(
        "thinwire's GPU kernels need Triton, which is not installed. PyTorch computes the same, more slowly"
    )
    return False


def as_fp32(x: Tensor) -> Tensor:
    """Return a vector as contiguous fp32; no copy if it is."""
    return x.detach().to(torch.float32).contiguous()


def blocks_as_rows(x: Tensor, block: int) -> list[Tensor]:
    """View the whole blocks of a vector as the rows of a matrix, and the shorter last block as another matrix."""
    whole = x.numel() // block * block
    return [rows for rows in (x[:whole].view(-1, block), x[whole:].view(1, -1)) if rows.numel()]


@contextmanager
def writable(out: Tensor, dtype: torch.dtype = torch.float32, *, read: bool = False) -> Generator[Tensor, None, None]:
    """Yield a contiguous tensor of `dtype` that is copied into `out` at the end; `out` itself if possible.

    With `read` it first holds the values of `out`.
    """
    if out.dtype == dtype and out.is_contiguous():
        yield out.detach()
        return
    made = torch.empty(out.shape, dtype=dtype, device=out.device)
    if read:
        made.copy_(out.detach())
    yield made
    out.detach().copy_(made)


@cache  # asked for each message, of few sizes
def quantized_nbytes(n: int, bits: int, block: int, scale_bytes: int = 4) -> int:
    """Return the bytes of the payload of n elements with `bits` each, and a scale for each block."""
    return -(-n // block) * scale_bytes + bits * -(-n // 8)


def check_code(
    x: Tensor, payload: Tensor, residual: Tensor | None = None, *, bits: int = 1, block: int, scale_bytes: int
) -> None:
    """Check bits, blocks, scales, the size of the payload, and that all tensors are on one device.

    Raises:
        ConfigError: a value is invalid.
    """
    check_bits(bits)
    if block < 1:
        raise ConfigError(f"block={block}: must be at least 1. 2048 is usual")
    if scale_bytes not in (2, 4):
        raise ConfigError(f"scale_bytes={scale_bytes}: must be 2 (bf16) or 4 (fp32)")
    check_payload(payload, quantized_nbytes(x.numel(), bits, block, scale_bytes))
    check_same_device(x, payload, residual)
    if residual is not None:
        check_length("residual", residual.numel(), x.numel())


def check_bits(bits: int) -> None:
    """Check the bits of a code.

    Raises:
        ConfigError: they do not lie in 1 to 8.
    """
    if not 1 <= bits <= 8:
        raise ConfigError(f"bits={bits}: must lie in 1..8")


def check_norm(norm: str, known: tuple[str, str]) -> None:
    """Check that a norm is known.

    Raises:
        ConfigError: with the known norms.
    """
    if norm not in known:
        raise ConfigError(f"norm={norm!r}: must be one of {', '.join(known)}")


def check_payload(payload: Tensor, nbytes: int) -> None:
    """Check the size of a payload: kernels would read or write beyond the end of a shorter one.

    Raises:
        ConfigError: with both sizes.
    """
    if payload.dtype != torch.uint8 or payload.shape[-1] != nbytes:
        found = f"{payload.shape[-1]} elements of {payload.dtype}"
        raise ConfigError(f"payload of {found}: must be {nbytes} bytes, as uint8. Sender and receiver differ")


def check_length(name: str, found: int, wanted: int) -> None:
    """Check the length of a vector or list.

    Raises:
        ConfigError: with both lengths.
    """
    if found != wanted:
        raise ConfigError(
            f"{name} has {found} elements: must be {wanted}, as in the vector. Pass a tensor of that size"
        )


def check_same_device(x: Tensor, *others: Tensor | None) -> None:
    """Check that all tensors are on one device.

    Raises:
        ConfigError: with both devices.
    """
    for other in others:
        if other is not None and other.device != x.device:
            raise ConfigError(f"tensors on {x.device} and {other.device}: all must be on one device. Move them first")


def check_dense(*tensors: Tensor) -> None:
    """Check that tensors are contiguous and fp32.

    Raises:
        ConfigError: with the dtype of another one.
    """
    for tensor in tensors:
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise ConfigError(f"a tensor of {tensor.dtype}: must be contiguous and torch.float32")
