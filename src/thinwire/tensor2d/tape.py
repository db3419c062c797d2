# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing that does not repeat communication.

Checkpointing recomputes a block in the backward pass, which would repeat its collectives. Therefore the first pass
records the result of every collective on a tape, and the recomputation reads them from the tape in the same order.
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
        """Replay the recorded results from the first one."""
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
        """Return the next result: computed and recorded, or replayed."""
        if self._next is None:
            result = make()
            self._results.append(result.detach())  # its graph would keep the block's activations alive
            return result
        if self._next == len(self._results):
            raise MismatchError(
                f"a recomputed block requests result {self._next + 1} of {len(self._results)} recorded ones: its "
                "forward pass must run the same collectives every time"
            )
        self._next += 1
        return self._results[self._next - 1].detach()


def recorded(make: Callable[[], Tensor]) -> Tensor:
    """Return the result of `make`, or in a recomputed block the recorded result of its first call.

    Raises:
        MismatchError: the recomputed block makes more calls than in its first run.
    """
    return make() if _current.tape is None else _current.tape.take(make)


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Make the contexts for `torch.utils.checkpoint.checkpoint(..., context_fn=...)`."""
    tape = Tape()
    return tape.recording(), tape.replaying()


def checkpoint_2d(run: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Run a block under activation checkpointing, and keep the results of its collectives.

    Outputs of products, embeddings and norm statistics are kept. The backward pass recomputes activations, norms,
    dropout and attention, without communication.

    Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016, arXiv:1604.06174.
    """
    # Only the non-reentrant implementation accepts a `context_fn`.
    return checkpoint(run, *arguments, use_reentrant=False, context_fn=checkpoint_contexts, **keywords)


def checkpoint_(module: nn.Module) -> nn.Module:
    """Run a module under `checkpoint_2d` in training mode, in place; return the module."""
    run = module.forward

    def forward(*arguments: Any, **keywords: Any) -> Any:
        return checkpoint_2d(run, *arguments, **keywords) if module.training else run(*arguments, **keywords)

    module.forward = forward
    return module
