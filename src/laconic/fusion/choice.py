"""Which of several ways to compute the same is fastest here: measured once, and remembered."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from time import perf_counter, thread_time
from typing import Any

import torch

from laconic.fusion.batch import Batch, Value

Way = Callable[..., Batch]
PIN = "LACONIC_DETERMINISTIC"
_ROUNDS = 4
_LEAST_SECONDS = 3e-3
_CHOSEN: dict[tuple[Any, ...], str] = {}
_GUESSED = ContextVar("guessed", default=False)


def choices() -> dict[str, str]:
    """What was chosen so far: an operation with its shapes, and the way that was fastest."""
    return {" ".join(map(str, key)): way for key, way in _CHOSEN.items()}


def forget_choices() -> None:
    """Measure anew on the next use."""
    _CHOSEN.clear()


@contextmanager
def guessing() -> Generator[None]:
    """Take the best guess and measure nothing within, for what is done once."""
    token = _GUESSED.set(True)
    try:
        yield
    finally:
        _GUESSED.reset(token)


def fastest(
    name: str, ways: Mapping[str, Way], values: Sequence[Value | None], settings: tuple[Any, ...] = ()
) -> Batch:
    """Compute by the way that took least time, forward and backward, when these shapes were first seen.

    With the environment variable LACONIC_DETERMINISTIC=1 nothing is measured and the first way is taken, so that a
    rerun rounds alike.

    Args:
        name: the operation.
        ways: from the best guess to the worst; each is given `values`.
        values: what is computed on; the shapes, layouts, dtypes and devices tell one case from another.
        settings: what else tells cases apart.
    """
    if len(ways) == 1 or _GUESSED.get() or os.environ.get(PIN, "0") not in ("", "0"):
        return next(iter(ways.values()))(*values)
    key = (name, *settings, *map(_looks, values), torch.get_num_threads(), _casts(values))
    if key not in _CHOSEN:
        _CHOSEN[key] = min(_measure(ways, values).items(), key=lambda way: way[1])[0]
    return ways[_CHOSEN[key]](*values)


def _looks(value: Value | None) -> Any:
    if value is None:
        return None
    tensor, axis = (value.tensor, value.axis) if isinstance(value, Batch) else (value, None)
    trained = tensor.requires_grad and torch.is_grad_enabled()
    return (axis, tuple(tensor.shape), tensor.dtype, tensor.device.type, tensor.is_contiguous(), trained)


def _casts(values: Sequence[Value | None]) -> str | None:
    """The dtype that autocast would compute in."""
    device = _device(values)
    return str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None


def _device(values: Sequence[Value | None]) -> str:
    tensors = (value.tensor if isinstance(value, Batch) else value for value in values)
    return next(tensor.device.type for tensor in tensors if tensor is not None)


def _measure(ways: Mapping[str, Way], values: Sequence[Value | None]) -> dict[str, float]:
    """Seconds of each way: the least of several rounds in which they take turns."""
    copies = [_copy(value) for value in values]
    cuda = _device(values) == "cuda"
    best = {name: _seconds(way, copies, 1, cuda) for name, way in ways.items()}
    best = {name: _seconds(way, copies, 1, cuda) for name, way in ways.items()}
    again = {name: max(1, min(20, int(_LEAST_SECONDS / seconds))) for name, seconds in best.items()}
    limit = 4 * min(best.values())
    for _ in range(_ROUNDS):
        for name, way in ways.items():
            if best[name] <= limit:
                best[name] = min(best[name], _seconds(way, copies, again[name], cuda))
    return best


def _seconds(way: Way, values: Sequence[Value | None], repeats: int, cuda: bool) -> float:
    wait: Callable[[], object] = torch.cuda.synchronize if cuda else _nothing
    # One thread's own time is not disturbed by other processes.
    clock = thread_time if torch.get_num_threads() == 1 and not cuda else perf_counter
    wait()
    start = clock()
    for _ in range(repeats):
        _once(way, values)
    wait()
    return max(clock() - start, 1e-9) / repeats


def _nothing() -> None:
    pass


def _once(way: Way, values: Sequence[Value | None]) -> None:
    tensors = [value.tensor if isinstance(value, Batch) else value for value in values]
    trained = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
    with _mode(bool(trained)):
        found = way(*values).tensor
        if trained:
            gradients = torch.autograd.grad(found, trained, torch.ones_like(found))
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
