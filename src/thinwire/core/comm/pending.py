# SPDX-License-Identifier: Apache-2.0
"""The in-flight means of one training step, which finish together."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import cast

from torch import Tensor

from thinwire.core.comm.work import Work
from thinwire.core.kernels import Flag, read_flags
from thinwire.errors import CommError

Stages = Generator[Flag | None, bool, Tensor]
"""A mean as a generator that pauses four times; `PendingMeans` resumes it."""


class PendingMeans:
    """The means of one training step, which finish together at the first wait for any of them.

    A step is skipped as a whole or not at all: residuals are updated only if every rank's vector in every one of these
    means is finite. A mean with a second stage starts it when the next mean is launched. Of many parts of a gradient,
    only the last then runs its second stage after the backward pass. Ranks launch and wait in the same order, so these
    moments are the same on all of them. The owner of the step keeps one of these objects for all its means.

    A mean is a generator. It starts when it is launched, and resumes from its

    1. `yield`, when the next mean has been launched, when its work's `advance` is called, or with the next line;
    2. `yield`, at the first wait for any of the means;
    3. `yield finite` (whether all ranks' vectors of this mean are finite), when this is known for all means; the
       expression evaluates to whether all of them are. On a GPU, the host waits here for the flags of all means;
    4. `yield`, at the wait for this mean; it returns the mean.

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
        # True while the last of them is in its first stage.
        self._in_first_stage = False

    def launch(self, mean: Stages) -> Work[Tensor]:
        """Start a mean; the `wait` of its work finishes all means in flight."""
        next(mean)
        if self._in_first_stage:
            self._advance()
        self._means.append(mean)
        self._in_first_stage = True

        def advance() -> None:
            if self._means and self._means[-1] is mean:
                self._advance()

        def finish() -> Tensor:
            # The first wait finishes all means; later waits only fetch their result.
            if mean in self._means:
                self._finish()
            try:
                next(mean)
            except StopIteration as end:
                if end.value is not None:
                    return end.value
            raise CommError(
                "this mean failed at an earlier wait, alone or with others of its step. See the first error"
            )

        return Work(finish, advance=advance)

    def _advance(self) -> None:
        """Start the second stage of the last mean, if it has not been started."""
        if self._in_first_stage:
            self._in_first_stage = False
            self._together(lambda: next(self._means[-1]))

    def drop(self) -> None:
        """Discard all means in flight after their connections were closed."""
        for mean in self._means:
            mean.close()
        self._means, self._in_first_stage = [], False

    def _finish(self) -> None:
        self._together(self._agree)
        self._means = []

    def _agree(self) -> None:
        self._advance()
        flags = cast(list[Flag], list(map(next, self._means)))  # the third `yield` has a flag
        finite = all(read_flags(flags))
        for mean in self._means:
            mean.send(finite)

    def _together(self, go_on: Callable[[], object]) -> None:
        """Resume the means; if that fails, none of them is complete."""
        try:
            go_on()
        except BaseException:
            for mean in self._means:
                mean.close()
            self._means, self._in_first_stage = [], False
            raise
