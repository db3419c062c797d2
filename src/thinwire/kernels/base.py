"""Who does the work, and what all kernels refuse."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from threading import Lock

import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.kernels import native

# The same bits as torch: no sum is reassociated, and no product fused with a sum.
FLAGS = ["-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]
if platform.machine() == "x86_64":
    # Compilers shun the widest vectors; for loops that do much with each element these pay.
    FLAGS.append("-mprefer-vector-width=512")
_SOURCES = (
    *("base.c", "signs.c", "quantized.c", "largest.c", "sketched.c", "rows.c"),
    *("normalised.c", "linear.c", "adaptive.c"),
)
# Products of numbers that take longer than handing them to another thread.
PART = 1 << 22
# Results of all models that drive each other out of the caches: they are written past them.
AWAY_BYTES = 8 << 20
_long, _int, _float, _key, _at = ctypes.c_int64, ctypes.c_int, ctypes.c_float, ctypes.c_uint64, ctypes.c_void_p

_ARGUMENTS = {
    "uniform": [_at, _long, _key, _key],
    "encode_signs": [_at, _at, _at, _long, _long, _int, _int],
    "sum_signs": [_at, _long, _long, _at, _long, _long, _int],
    "quantize": [_at, _at, _at],
    "dequantize": [_at, _at, _at],
    "top_k": [_at, _long, _long, _at, _at, _at, _long],
    "pack_indices": [_at, _long, _int, _at],
    "unpack_indices": [_at, _long, _int, _at],
    "sketch": [_at, _long, _at, _long, _long, _key, _float],
    "unsketch": [_at, _at],
    "heavy": [_at, _long, _at, _at, _at, _long],
    **{f"adam_rows{dtype}": [_at] * 6 for dtype in ("", "_double")},
    **dict.fromkeys(("layer_norm", "group_norm", "batch_norm"), (_at, _at, _at)),
    "layer_norm_back": [_at] * 6,
    **dict.fromkeys(("group_norm_back", "batch_norm_back"), (_at,) * 5),
    "linear_weights": [*[_at] * 5, _long, _at],
    "turn": [*[_at] * 5, _long, _at, _at],
    "descend": [_at, _at, _long, _float, _float],
    "adam_descend": [*[_at] * 4, _long, *[_float] * 3],
    **{f"sgd_rows{dtype}": [_at] * 4 for dtype in ("", "_double")},
}
_PIECE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_COUNTING = ("top_k", "heavy", "linear_weights")


def compiled(x: Tensor) -> ctypes.CDLL | None:
    """The compiled kernels, where they can work on a tensor and nobody has switched them off."""
    return _compiled() if native.usable(x) else None


@cache
def _compiled() -> ctypes.CDLL | None:
    return load(FLAGS)


def load(flags: list[str]) -> ctypes.CDLL | None:
    """The kernels' library, compiled with these flags; None where there is no compiler."""
    return native.load("kernels", _SOURCES, flags, _ARGUMENTS, _COUNTING)


def shared_out(n: int, parts: int, work: Callable[[int, int], object]) -> None:
    """Do what is to be done for 0 to n in so many threads: each time from one number to another.

    Where torch's threads are those of GNU's OpenMP they do it: others would compete with them, for they go on looking
    for work a while after they have had some.
    """
    if parts < 2:
        work(0, n)
        return
    spans, failures = pairwise(n * part // parts for part in range(parts + 1)), list[BaseException]()
    lock = Lock()

    def some(_: object = None) -> None:
        while True:
            # C that calls this would lose what is raised, an interrupt too.
            try:
                with lock:
                    span = next(spans, None)
                if span is None:
                    return
                work(*span)
            except BaseException as error:
                failures.append(error)

    team = torch_team()
    if team is not None:
        team(_PIECE(some), None, parts, 0)
    else:
        with ThreadPoolExecutor(parts) as threads:
            for move in [threads.submit(some) for _ in range(parts)]:
                move.result()
    if failures:
        raise failures[0]


@cache
def torch_team() -> Callable[..., None] | None:
    """What calls a function from every one of torch's threads, if they are GNU's."""
    try:
        found = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    found.argtypes, found.restype = [_PIECE, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return found


def on_gpu(x: Tensor) -> bool:
    """Whether Triton can do the work."""
    return x.is_cuda and _triton_is_there()


@cache
def _triton_is_there() -> bool:
    return find_spec("triton") is not None


def single(x: Tensor) -> Tensor:
    """A vector as contiguous fp32; itself where it is."""
    return x.detach().to(torch.float32).contiguous()


@contextmanager
def writable(out: Tensor, dtype: torch.dtype = torch.float32, *, read: bool = False) -> Generator[Tensor, None, None]:
    """A contiguous tensor of `dtype` whose values are put into `out` in the end; itself where it is one already.

    With `read` it holds the values of `out` to begin with.
    """
    if out.dtype == dtype and out.is_contiguous():
        yield out.detach()
        return
    made = torch.empty(out.shape, dtype=dtype, device=out.device)
    if read:
        made.copy_(out.detach())
    yield made
    out.detach().copy_(made)


def check_layout(block: int, scale_bytes: int) -> None:
    """Refuse blocks and scales that cannot be.

    Raises:
        ConfigError: with the value and the rule.
    """
    if block < 1:
        raise ConfigError(f"block={block}: must be at least 1; 2048 is usual")
    if scale_bytes not in (2, 4):
        raise ConfigError(f"scale_bytes={scale_bytes}: a scale is bf16 in 2 bytes or fp32 in 4")


def check_norm(norm: str, known: tuple[str, str]) -> None:
    """Refuse norms that are not known.

    Raises:
        ConfigError: with those that are.
    """
    if norm not in known:
        raise ConfigError(f"norm={norm!r}: must be one of {', '.join(known)}")


def check_payload(payload: Tensor, nbytes: int) -> None:
    """Refuse payloads of another size, whose bytes would be read or written beyond their end.

    Raises:
        ConfigError: with both sizes.
    """
    if payload.dtype != torch.uint8 or payload.shape[-1] != nbytes:
        found = f"{payload.shape[-1]} elements of {payload.dtype}"
        raise ConfigError(f"payload of {found}: must be {nbytes} bytes, as uint8; sender and receiver differ")


def check_length(name: str, found: int, wanted: int) -> None:
    """Refuse vectors that do not fit each other.

    Raises:
        ConfigError: with both lengths.
    """
    if found != wanted:
        raise ConfigError(f"{name} of {found} elements: must be {wanted}, as the vector has")


def check_same_device(x: Tensor, *others: Tensor | None) -> None:
    """Refuse tensors on several devices.

    Raises:
        ConfigError: with the devices.
    """
    for other in others:
        if other is not None and other.device != x.device:
            raise ConfigError(f"{other.device} beside {x.device}: all tensors must be on one device; move them first")
