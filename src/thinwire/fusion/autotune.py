"""Which of several ways to compute the same is fastest here: measured once, and remembered."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import Tensor

from thinwire.fusion.autotune_cache import Memory
from thinwire.fusion.batch import Batch, Value
from thinwire.kernels.base import compiled

Way = Callable[..., Batch]
PIN = "THINWIRE_DETERMINISTIC"
# Uses of the best guess before ways are measured, which takes as long as a few uses of each.
PATIENCE = 40
# Rounds of at least a millisecond a way: always some, and more of what is quick, for other work may disturb a few.
_LEAST_ROUNDS, _MOST_ROUNDS, _ENOUGH_SECONDS = 4, 12, 0.3
_LEAST_SECONDS = 1e-3
# Seconds of these times the least are too many: after one use, and after several.
_NEAR_AT_FIRST, _NEAR = 4.0, 1.3
# Of what differs by less than a measurement does, the better guess.
_CLEARLY = 1.02
_CHOSEN: dict[tuple[Any, ...], str] = {}
_USES: Counter[tuple[Any, ...]] = Counter()
_MEMORY = Memory()
_PATIENCE = ContextVar[float]("patience", default=PATIENCE)


def choices() -> dict[str, str]:
    """What was chosen so far: an operation with its shapes, and the way that was fastest."""
    return {_case(key): way for key, way in _CHOSEN.items()}


def forget_choices() -> None:
    """Measure anew, whatever this process or one before it has measured."""
    _CHOSEN.clear()
    _USES.clear()
    _MEMORY.forget()


def remember_choices() -> None:
    """Keep what was measured so far for other processes; one that ends by itself does, a forked one has to say so."""
    _MEMORY.write()


@contextmanager
def guessing() -> Generator[None]:
    """Take the best guess and measure nothing within, for what is done once."""
    yield from _patient(math.inf)


@contextmanager
def measuring() -> Generator[None]:
    """Measure whatever is met for the first time within, for what will be done very often."""
    yield from _patient(0)


def _patient(uses: float) -> Generator[None]:
    token = _PATIENCE.set(uses)
    try:
        yield
    finally:
        _PATIENCE.reset(token)


def has_kernel(*values: Value | None) -> bool:
    """Whether compiled kernels take these: all are there, fp32, on the CPU and not empty, outside of autocast."""
    tensors = [value.tensor if isinstance(value, Batch) else value for value in values]
    if any(tensor is None or tensor.dtype != torch.float32 or not tensor.numel() for tensor in tensors):
        return False
    first = tensors[0]
    return first is not None and not torch.is_autocast_enabled(first.device.type) and compiled(first) is not None


def fastest(
    name: str, ways: Mapping[str, Way], values: Sequence[Value | None], settings: tuple[Any, ...] = ()
) -> Batch:
    """Compute by the way that takes least time, forward and backward.

    Ways are measured when a case has been met as often as pays for it, or within `measuring` at once; until then the
    best guess is taken. What was measured is remembered on this machine.

    With the environment variable THINWIRE_DETERMINISTIC=1 nothing is measured and the first way is taken, so that a
    rerun rounds alike.

    Args:
        name: the operation.
        ways: from the best guess to the worst; each is given `values`.
        values: what is computed on; the shapes, layouts, dtypes and devices tell one case from another.
        settings: what else tells cases apart.
    """
    patience = _PATIENCE.get()
    if len(ways) == 1 or patience == math.inf or os.environ.get(PIN, "0") not in ("", "0"):
        return next(iter(ways.values()))(*values)
    key = (name, *settings, *map(_looks, values), torch.get_num_threads(), _casts(values))
    way = _CHOSEN.get(key) or _choose(key, ways, values, patience)
    return ways[way](*values)


def _choose(key: tuple[Any, ...], ways: Mapping[str, Way], values: Sequence[Value | None], patience: float) -> str:
    case = f"{_case(key)} of {', '.join(ways)}"
    if _device(values) == "cuda":
        case = f"{case} on {torch.cuda.get_device_name()}"
    known = None if _USES[key] else _MEMORY.recall(case)
    if known is not None and known in ways:
        _CHOSEN[key] = known
        return known
    _USES[key] += 1
    if _USES[key] <= patience:
        return next(iter(ways))
    seconds = _measure(ways, values)
    enough = _CLEARLY * min(seconds.values())
    _CHOSEN[key] = next(way for way in ways if seconds[way] <= enough)
    _MEMORY.note(case, _CHOSEN[key])
    return _CHOSEN[key]


def _case(key: tuple[Any, ...]) -> str:
    return " ".join(map(str, key))


def _looks(value: Value | None) -> Any:
    if value is None:
        return None
    tensor, axis = (value.tensor, value.axis) if isinstance(value, Batch) else (value, None)
    trained = tensor.requires_grad and torch.is_grad_enabled()
    return (axis, tensor.shape, tensor.dtype, tensor.device, tensor.is_contiguous(), trained)


def _casts(values: Sequence[Value | None]) -> str | None:
    """The dtype that autocast would compute in."""
    device = _device(values)
    return str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None


def _device(values: Sequence[Value | None]) -> str:
    for value in values:
        if value is not None:
            return (value.tensor if isinstance(value, Batch) else value).device.type
    return "cpu"


def _measure(ways: Mapping[str, Way], values: Sequence[Value | None]) -> dict[str, float]:
    """Seconds of each way: the least of several rounds, in which those that may yet win take turns."""
    copies = [_copy(value) for value in values]
    cuda = _device(values) == "cuda"
    with torch.no_grad():
        result = next(iter(ways.values()))(*copies).at(0)
    # The gradient comes with the models first, as it does to an array's result.
    above = torch.ones_like(result, memory_format=torch.contiguous_format)
    once = {name: partial(_once, way, copies, above) for name, way in ways.items()}
    best = {name: _seconds(work, 1, cuda) for name, work in once.items()}
    near, start = _NEAR_AT_FIRST, perf_counter()
    for round in range(_MOST_ROUNDS):
        if round >= _LEAST_ROUNDS and perf_counter() - start > _ENOUGH_SECONDS:
            break
        limit = near * min(best.values())
        rivals = [name for name, seconds in best.items() if seconds <= limit]
        if near < _NEAR_AT_FIRST and len(rivals) == 1:
            break
        for name in rivals:
            again = max(1, min(20, int(_LEAST_SECONDS / best[name])))
            best[name] = min(best[name], _seconds(once[name], again, cuda))
        near = _NEAR
    return best


def _seconds(work: Callable[[], object], repeats: int, cuda: bool) -> float:
    """Of one use, after one that is not counted: it finds in the caches what another way has left there."""
    wait: Callable[[], object] = torch.cuda.synchronize if cuda else _nothing
    # One thread's own time is not disturbed by other processes.
    clock = thread_time if torch.get_num_threads() == 1 and not cuda else perf_counter
    work()
    wait()
    start = clock()
    for _ in range(repeats):
        work()
    wait()
    return max(clock() - start, 1e-9) / repeats


def _nothing() -> None:
    pass


def _once(way: Way, values: Sequence[Value | None], above: Tensor) -> None:
    """Forward, and backward where anything is trained, from the gradient `above`."""
    tensors = [value.tensor if isinstance(value, Batch) else value for value in values]
    trained = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
    with _mode(bool(trained)):
        found = way(*values).at(0)
        if trained:
            gradients = torch.autograd.grad(found, trained, above)
            for tensor, gradient in zip(trained, gradients, strict=True):
                # A parameter keeps its gradient laid out as it is itself.
                if gradient.stride() != tensor.stride():
                    gradient.contiguous()


def _mode(trained: bool) -> AbstractContextManager[object]:
    return torch.enable_grad() if trained else torch.no_grad()


def _copy(value: Value | None) -> Any:
    """The same shapes and layout, apart from any graph."""
    if value is None:
        return None
    if isinstance(value, Batch):
        return Batch(_copy(value.tensor), value.axis)
    trained = value.requires_grad and torch.is_grad_enabled()
    copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    with torch.no_grad():
        copy.copy_(value)
    return copy.requires_grad_(trained)
