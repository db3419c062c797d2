"""What a checkpointed block need not say twice.

Recomputing a block in the backward pass would repeat its messages. While a tape runs, whatever comes out of the wire is
kept; when the block is recomputed, the tape hands it out again in the same order, and nobody talks.
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
    tape: Tape | None = None


_current = _Current()


class Tape:
    """The results of one block's messages, in order."""

    def __init__(self) -> None:
        self._results: list[Tensor] = []
        self._next: int | None = None

    @contextmanager
    def recording(self) -> Generator[None, None, None]:
        """Keep what `kept` makes in this thread."""
        self._results, self._next = [], None
        with self._as_current():
            yield

    @contextmanager
    def replaying(self) -> Generator[None, None, None]:
        """Hand out again what was kept, from the beginning."""
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
        """The next result: made and kept, or found."""
        if self._next is None:
            result = make()
            self._results.append(result.detach())
            return result
        if self._next == len(self._results):
            raise MismatchError(
                f"a recomputed block asks for message {self._next + 1} of {len(self._results)}: its forward pass must "
                "do the same every time"
            )
        self._next += 1
        return self._results[self._next - 1].detach()


def kept(make: Callable[[], Tensor]) -> Tensor:
    """The result of `make`, or of what it made when the block ran first.

    Raises:
        MismatchError: a recomputed block asks for more than it did the first time.
    """
    return make() if _current.tape is None else _current.tape.take(make)


def keeping_messages() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The two contexts that `torch.utils.checkpoint.checkpoint(..., context_fn=...)` asks for."""
    tape = Tape()
    return tape.recording(), tape.replaying()


def checkpoint_2d(run: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Run a block and keep of it what came over the wire; the backward pass recomputes the rest, and says nothing.

    Kept are the outputs of products, embeddings and norms' statistics; recomputed are activations, norms, dropout and
    attention.

    Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016, arXiv:1604.06174.
    """
    return checkpoint(run, *arguments, use_reentrant=False, context_fn=keeping_messages, **keywords)


def checkpoint_(module: nn.Module) -> nn.Module:
    """Make a module run under `checkpoint_2d` from now on while it is training; returns it."""
    run = module.forward

    def forward(*arguments: Any, **keywords: Any) -> Any:
        return checkpoint_2d(run, *arguments, **keywords) if module.training else run(*arguments, **keywords)

    module.forward = forward
    return module
