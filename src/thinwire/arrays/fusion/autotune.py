# SPDX-License-Identifier: Apache-2.0
"""Measure several implementations of one operation, and use the fastest on this machine."""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import Tensor

from thinwire.arrays.fusion.autotune_cache import AutotuneCache
from thinwire.arrays.fusion.batch import Batch, Value, tensor_of
from thinwire.core.kernels.base import compiled
from thinwire.core.torch_internals import gpu_sleep

Implementation = Callable[..., Batch]
DETERMINISTIC = "THINWIRE_DETERMINISTIC"
# A measurement costs about as much as a few uses of every candidate: a case that is met less often would not repay it.
USES_BEFORE_MEASURING = 40
# Rounds per measurement: at least four, because other processes may disturb one or two; more while there is time.
_MIN_ROUNDS, _MAX_ROUNDS, _MAX_SECONDS = 4, 12, 0.3
# A candidate is timed for at least this long per round, so that the clock's resolution does not matter.
_MIN_SECONDS = 1e-3
# A candidate slower than this multiple of the best is dropped. The first use may include warm-up, so the limit is wide.
_DROP_AFTER_FIRST_USE, _DROP = 4.0, 1.3
# Two measurements of the same code differ by about this factor; within it, the earlier candidate is taken.
_MEASUREMENT_ERROR = 1.02
_chosen: dict[tuple[Any, ...], str] = {}
_uses: Counter[tuple[Any, ...]] = Counter()
_cache = AutotuneCache()
_uses_before_measuring = ContextVar[float]("uses_before_measuring", default=USES_BEFORE_MEASURING)
# A captured step launches its kernels at no cost to Python, so other candidates may be fastest in it.
_for_graphs = ContextVar[bool]("for_graphs", default=False)


def autotune_choices() -> dict[str, str]:
    """Return the measured choices of this process: for each operation and its shapes, the implementation that is used.

    Example:
        >>> import torch
        >>> from thinwire.arrays.fusion import autotune_choices, clear_autotune_cache, fuse, measuring
        >>> clear_autotune_cache()
        >>> array = fuse([torch.nn.Linear(4, 4) for _ in range(2)])
        >>> with measuring():
        ...     output = array(torch.ones(3, 4))
        >>> list(autotune_choices().values())[0] in ("side by side", "batched", "loop")
        True
        >>> clear_autotune_cache()
        >>> autotune_choices()
        {}
    """
    return {_case_of(key): name for key, name in _chosen.items()}


def clear_autotune_cache() -> None:
    """Forget all measurements, of this process and of earlier ones; the file keeps them for later processes."""
    _chosen.clear()
    _uses.clear()
    _cache.clear()


@contextmanager
def without_autotuning() -> Generator[None]:
    """Inside, measure nothing and use the first candidate: for work that is done only once."""
    yield from _measuring_after(math.inf)


@contextmanager
def measuring() -> Generator[None]:
    """Inside, measure every case when it is first met: for work that will be repeated very often."""
    yield from _measuring_after(0)


@contextmanager
def choosing_for_graphs(*, measure: bool) -> Generator[None]:
    """Inside, choose what is fastest in a CUDA graph: candidates are timed by how long they keep the GPU busy.

    Args:
        measure: measure every case when it is first met. False uses the choices so far and measures nothing, which is
            impossible while a graph is captured.
    """
    token = _for_graphs.set(True)
    try:
        yield from _measuring_after(0 if measure else sys.maxsize)
    finally:
        _for_graphs.reset(token)


def _measuring_after(uses: float) -> Generator[None]:
    token = _uses_before_measuring.set(uses)
    try:
        yield
    finally:
        _uses_before_measuring.reset(token)


def has_kernel(*values: Value | None) -> bool:
    """Whether compiled kernels accept these values: all given, fp32, on the CPU and not empty, outside autocast."""
    tensors = [tensor_of(value) for value in values if value is not None]
    if len(tensors) < len(values) or any(each.dtype != torch.float32 or not each.numel() for each in tensors):
        return False
    first = tensors[0]
    return not torch.is_autocast_enabled(first.device.type) and compiled(first) is not None


def run_fastest(
    name: str, candidates: Mapping[str, Implementation], values: Sequence[Value | None], settings: tuple[Any, ...] = ()
) -> Batch:
    """Compute by the candidate that takes the least time for forward and backward.

    Candidates are measured once a case has been met `USES_BEFORE_MEASURING` times, or at once inside `measuring`; until
    then the first is used. Measurements are kept on this machine.

    With the environment variable THINWIRE_DETERMINISTIC=1 nothing is measured and the first candidate is used, so that
    two runs round alike.

    Args:
        name: the operation.
        candidates: the implementations, most promising first; each is called with `values`.
        values: the operands; their shapes, layouts, dtypes and devices distinguish cases.
        settings: what else distinguishes cases.
    """
    uses = _uses_before_measuring.get()
    if len(candidates) == 1 or uses == math.inf or os.environ.get(DETERMINISTIC, "0") not in ("", "0"):
        return next(iter(candidates.values()))(*values)
    device = next((tensor_of(value).device for value in values if value is not None), torch.device("cpu"))
    autocast = str(torch.get_autocast_dtype(device.type)) if torch.is_autocast_enabled(device.type) else None
    hashable = (tuple(each) if isinstance(each, list) else each for each in settings)
    gpu_only = (*_precision(), *(["graph"] if _for_graphs.get() else [])) if device.type == "cuda" else ()
    key = (name, *hashable, *map(_signature, values), torch.get_num_threads(), autocast, *gpu_only)
    choice = _chosen.get(key) or _choose(key, candidates, values, uses, gpu=device if device.type == "cuda" else None)
    return candidates[choice](*values)


def _precision() -> tuple[object, ...]:
    """Return how torch computes products and convolutions in fp32 on a GPU."""
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    try:
        return products.allow_tf32, convolutions.allow_tf32
    except RuntimeError:  # the program has used the newer settings, and torch refuses to mix them
        return products.fp32_precision, convolutions.conv.fp32_precision  # pyright: ignore[reportAttributeAccessIssue]


def _choose(
    key: tuple[Any, ...],
    candidates: Mapping[str, Implementation],
    values: Sequence[Value | None],
    uses: float,
    *,
    gpu: torch.device | None,
) -> str:
    # The candidates' names are part of the case: an entry of a version with other candidates must not match.
    case = f"{_case_of(key)} of {', '.join(candidates)}"
    if gpu is not None:
        case = f"{case} on {torch.cuda.get_device_name(gpu)}"
    known = None if _uses[key] else _cache.get(case)
    if known is not None and known in candidates:
        _chosen[key] = known
        return known
    _uses[key] += 1
    if _uses[key] <= uses:
        return next(iter(candidates))
    seconds = _measure(candidates, values, gpu=gpu)
    limit = _MEASUREMENT_ERROR * min(seconds.values())
    _chosen[key] = next(name for name in candidates if seconds[name] <= limit)
    _cache.put(case, _chosen[key])
    return _chosen[key]


def _case_of(key: tuple[Any, ...]) -> str:
    return " ".join(map(str, key))


def _signature(value: Value | None) -> Any:
    if value is None:
        return None
    tensor, axis = tensor_of(value), value.axis if isinstance(value, Batch) else None
    trained = tensor.requires_grad and torch.is_grad_enabled()
    return (axis, tensor.shape, tensor.dtype, tensor.device, tensor.is_contiguous(), trained)


def _measure(
    candidates: Mapping[str, Implementation], values: Sequence[Value | None], *, gpu: torch.device | None
) -> dict[str, float]:
    """Return each candidate's seconds: the least of several rounds in which the candidates take turns."""
    copies = [_copy_of(value) for value in values]
    with torch.no_grad():
        result = next(iter(candidates.values()))(*copies).at(0)
    # An array's result has the models first, so its gradient has too: candidates pay here for moving them.
    gradient = torch.ones_like(result, memory_format=torch.contiguous_format)
    work = {name: partial(_run_once, run, copies, gradient) for name, run in candidates.items()}
    best = {name: _first_seconds(run, gpu) for name, run in work.items()}
    if min(best.values()) == math.inf:
        next(iter(work.values()))()  # raises again
    drop, start = _DROP_AFTER_FIRST_USE, perf_counter()
    for round in range(_MAX_ROUNDS):
        if round >= _MIN_ROUNDS and perf_counter() - start > _MAX_SECONDS:
            break
        limit = drop * min(best.values())
        rivals = [name for name, seconds in best.items() if seconds <= limit]
        if drop < _DROP_AFTER_FIRST_USE and len(rivals) == 1:
            break
        for name in rivals:
            repeats = max(1, min(20, int(_MIN_SECONDS / best[name])))
            best[name] = min(best[name], _seconds_of(work[name], repeats, gpu))
        drop = _DROP
    return best


def _first_seconds(work: Callable[[], object], gpu: torch.device | None) -> float:
    """Return the seconds of one use; infinity if it fails, for want of memory or of a layout that torch supports."""
    try:
        return _seconds_of(work, 1, gpu)
    except RuntimeError:
        if gpu is not None:
            torch.cuda.empty_cache()
        return math.inf


def _busy_seconds(work: Callable[[], object], repeats: int) -> float:
    """Return the seconds that one use keeps the GPU busy, without the time that Python takes to launch it."""
    start = perf_counter()
    work()
    launched = perf_counter() - start
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if gpu_sleep is not None:
        # The GPU waits until all is launched; its clock has at most two cycles a nanosecond.
        gpu_sleep(int(2e9 * min(0.5, 2 * repeats * launched + 1e-4)))
    before.record()
    for _ in range(repeats):
        work()
    after.record()
    after.synchronize()
    return max(before.elapsed_time(after) / 1e3, 1e-9) / repeats


def _seconds_of(work: Callable[[], object], repeats: int, gpu: torch.device | None) -> float:
    """Return the seconds of one use, after one that is not counted because its operands may not be in the caches."""
    if gpu is not None and _for_graphs.get():
        with torch.cuda.device(gpu):
            return _busy_seconds(work, repeats)
    # The thread's own CPU time is not disturbed by other processes, but it misses the work of other threads.
    clock = thread_time if torch.get_num_threads() == 1 and gpu is None else perf_counter
    work()
    if gpu is not None:
        torch.cuda.synchronize(gpu)  # the tensors' own, which need not be the current one
    start = clock()
    for _ in range(repeats):
        work()
    if gpu is not None:
        torch.cuda.synchronize(gpu)
    return max(clock() - start, 1e-9) / repeats


def _run_once(run: Implementation, values: Sequence[Value | None], gradient: Tensor) -> None:
    """Run forward, and backward from `gradient` if anything is trained."""
    trained = [tensor_of(value) for value in values if value is not None and tensor_of(value).requires_grad]
    with torch.set_grad_enabled(bool(trained)):
        output = run(*values).at(0)
        if trained:
            found = torch.autograd.grad(output, trained, gradient)
            for tensor, own in zip(trained, found, strict=True):
                # Autograd copies a gradient that is not laid out as its parameter: this copy is part of the cost.
                if own.stride() != tensor.stride():
                    own.contiguous()


def _copy_of(value: Value | None) -> Any:
    """Copy a value with its shape and layout, but outside any graph: measuring must not touch the caller's tensors."""
    if value is None:
        return None
    if isinstance(value, Batch):
        return Batch(_copy_of(value.tensor), value.axis)
    trained = value.requires_grad and torch.is_grad_enabled()
    copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    with torch.no_grad():
        copy.copy_(value)
    return copy.requires_grad_(trained)
