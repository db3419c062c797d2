# SPDX-License-Identifier: Apache-2.0
"""The means of one training step that are in flight and finish together."""

from __future__ import annotations

from collections.abc import Callable, Generator

from torch import Tensor

from thinwire.core.comm.work import Work
from thinwire.errors import CommError

Stages = Generator[bool | None, bool, Tensor]
"""A mean, as a function that pauses four times; `PendingMeans` says when it goes on."""


class PendingMeans:
    """The means of one training step, which finish together when the first of them is waited for.

    A step is skipped as a whole or not at all: residuals are updated only if every rank's vector in every one of these
    means is finite. A mean with a second stage starts it when the next mean is launched, so that of many parts of a
    gradient only the last has its second stage after the backward pass. Ranks launch and wait in the same order, so
    these moments are the same on all of them. Whoever owns the step keeps one of these for all its means.

    A mean is a generator. It starts when it is launched, and goes on from its

    1. `yield`, when the next mean has been launched, when its work is told to `advance`, or with the next line;
    2. `yield`, when the first of all means is waited for;
    3. `yield finite`, which says whether all ranks' vectors are finite, when that is known of all means; it evaluates
       to whether all of them are;
    4. `yield`, when this mean itself is waited for; it returns the mean.

    Example:
        >>> import torch
        >>> from thinwire.core.comm.pending import PendingMeans
        >>> def mean(x):
        ...     print("launched")
        ...     yield
        ...     print("second stage")
        ...     yield
        ...     finite = yield bool(x.isfinite())
        ...     yield
        ...     return x if finite else x * torch.nan
        >>> means = PendingMeans()
        >>> works = [means.launch(mean(torch.tensor(value))) for value in (1.0, torch.inf)]
        launched
        launched
        second stage
        >>> works[0].wait()
        second stage
        tensor(nan)
    """

    def __init__(self) -> None:
        self._means: list[Stages] = []
        # Whether the last of them is still in its first stage.
        self._in_first_stage = False

    def launch(self, mean: Stages) -> Work[Tensor]:
        """Start a mean; the work's `wait` finishes all that are in flight."""
        next(mean)
        self._advance()
        self._means.append(mean)
        self._in_first_stage = True

        def advance() -> None:
            if self._means and self._means[-1] is mean:
                self._advance()

        def finish() -> Tensor:
            # Whichever mean is waited for first finishes them all; the others then only fetch their result.
            if mean in self._means:
                self._finish()
            return _result(mean)

        return Work(finish, advance=advance)

    def _advance(self) -> None:
        """Start the second stage of the last mean, if it has not been started."""
        if self._in_first_stage:
            self._in_first_stage = False
            self._together(lambda: next(self._means[-1]))

    def drop(self) -> None:
        """Forget all means in flight, whose connections are closed."""
        for mean in self._means:
            mean.close()
        self._means, self._in_first_stage = [], False

    def _finish(self) -> None:
        self._advance()
        self._together(self._agree)
        self._means = []

    def _agree(self) -> None:
        finite = [next(mean) for mean in self._means]
        for mean in self._means:
            mean.send(all(finite))

    def _together(self, go_on: Callable[[], object]) -> None:
        """Go on; where that fails, none of the means is complete."""
        try:
            go_on()
        except BaseException:
            for mean in self._means:
                mean.close()
            self._means, self._in_first_stage = [], False
            raise


def _result(mean: Stages) -> Tensor:
    """What a mean returns when it goes on from its last `yield`."""
    try:
        next(mean)
    except StopIteration as end:
        if end.value is not None:
            return end.value
    raise CommError("this mean failed at an earlier wait, alone or with the others of its step; see the first error")
