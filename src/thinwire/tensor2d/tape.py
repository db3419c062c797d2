# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing that does not repeat communication.

Checkpointing recomputes a block in the backward pass, which would repeat its collectives. So the first pass records the
result of every collective on a tape, and the recomputation takes them from the tape in the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from thinwire.errors import MismatchError


class _Current(threading.local):
    # Per thread, because ranks may be threads of one process.
    tape: Tape | None = None


_current = _Current()


class Tape:
    """The results of one block's collectives, in order."""

    def __init__(self) -> None:
        self._results: list[Tensor] = []
        self._next: int | None = None

    @contextmanager
    def recording(self) -> Generator[None, None, None]:
        """Record the results of `recorded` calls in this thread."""
        self._results, self._next = [], None
        with self._as_current():
            yield

    @contextmanager
    def replaying(self) -> Generator[None, None, None]:
        """Return the recorded results again, from the first."""
        self._next = 0
        with self._as_current():
            yield

    @contextmanager
    def _as_current(self) -> Generator[None, None, None]:
        before, _current.tape = _current.tape, self
        try:
            yield
        finally:
            _current.tape = before

    def take(self, make: Callable[[], Tensor]) -> Tensor:
        """The next result: computed and recorded, or replayed."""
        if self._next is None:
            result = make()
            self._results.append(result.detach())  # with its graph it would keep the block's activations alive
            return result
        if self._next == len(self._results):
            raise MismatchError(
                f"a recomputed block asks for result {self._next + 1} of {len(self._results)} recorded ones: its "
                "forward pass must run the same collectives every time"
            )
        self._next += 1
        return self._results[self._next - 1].detach()


def recorded(make: Callable[[], Tensor]) -> Tensor:
    """The result of `make`, or in a recomputed block the recorded result of its first call.

    Raises:
        MismatchError: the recomputed block makes more calls than the first time.
    """
    return make() if _current.tape is None else _current.tape.take(make)


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The forward and recomputation contexts for `torch.utils.checkpoint.checkpoint(..., context_fn=...)`."""
    tape = Tape()
    return tape.recording(), tape.replaying()


def checkpoint_2d(run: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Run a block under activation checkpointing, and keep the results of its collectives.

    Outputs of products, embeddings and norm statistics are kept. The backward pass recomputes activations, norms,
    dropout and attention, and sends nothing again.

    Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016, arXiv:1604.06174.
    """
    # Only the non-reentrant implementation takes a `context_fn`.
    return checkpoint(run, *arguments, use_reentrant=False, context_fn=checkpoint_contexts, **keywords)


def checkpoint_(module: nn.Module) -> nn.Module:
    """Make a module run under `checkpoint_2d` in training mode, in place; returns the module."""
    run = module.forward

    def forward(*arguments: Any, **keywords: Any) -> Any:
        return checkpoint_2d(run, *arguments, **keywords) if module.training else run(*arguments, **keywords)

    module.forward = forward
    return module
