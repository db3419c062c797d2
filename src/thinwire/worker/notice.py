# SPDX-License-Identifier: Apache-2.0
"""Leave with notice: a signal on one rank stops all ranks after the same step, so that they save and exit together."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch

from thinwire.errors import ConfigError
from thinwire.worker.worker import Worker

LEFT_WITH_NOTICE = 75
"""The exit code of a program that has saved and wants to be started again (EX_TEMPFAIL)."""
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""Those that give notice: of spot machines and Kubernetes, and of Slurm; Windows has not both."""


class Notice:
    """Tells all ranks, after the same step, that one of them was asked to leave by a signal.

    Its handlers replace those of the process until `close`. Every `every` steps the ranks share one flag, 4 bytes; a
    step in between costs nothing. What the ranks do then is the loop's: save, and exit with `LEFT_WITH_NOTICE`, from
    which a launcher starts them again. A second signal is handled as if there were no notice.

    Attributes:
        received: the signal that this rank got, by its name; None while there is none.

    Args:
        worker: that trains.
        every: steps between the flags; with the steps' length, how late a notice may be seen.
        signals: those that give notice.

    Raises:
        ConfigError: `every` is less than 1, or this is not the main thread, in which alone Python handles signals.

    Example:
        >>> import os, signal, tempfile, torch, thinwire
        >>> from thinwire.worker.notice import Notice
        >>> model = torch.nn.Linear(1, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> worker = thinwire.attach(model, optimizer, thinwire.LocalSGD(period=4))
        >>> notice = Notice(worker, every=5)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for step in range(20):
        ...         model(torch.ones(1, 1)).sum().backward()
        ...         optimizer.step()
        ...         if step == 7:
        ...             os.kill(os.getpid(), signal.SIGUSR1)
        ...         if notice.agreed():
        ...             print(worker.step, worker.save(folder).name)
        ...             break
        10 step-00000010
        >>> notice.close()
    """

    def __init__(
        self,
        worker: Worker,
        *,
        every: int = 20,
        signals: Sequence[signal.Signals] = SIGNALS,
    ) -> None:
        if every < 1:
            raise ConfigError(f"every={every}: must be at least 1 step; 20 is usual")
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("Notice in a thread beside the main one: Python handles signals in that one only")
        self.received: str | None = None
        self._worker = worker
        # Where ranks meet only at multiples of a round, they are asked there.
        meets = worker.strategy.meets_every
        self._every = -(-every // meets) * meets
        self._asked_at, self._answer = -1, False
        self._before: dict[signal.Signals, Any] = {each: signal.signal(each, self._receive) for each in signals}

    def _receive(self, number: int, _: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        self.close()

    def agreed(self) -> bool:
        """Whether any rank has received a signal; the same on all ranks. Call it after every step, on all ranks."""
        step = self._worker.step
        if self._answer or step % self._every or step == self._asked_at:
            return self._answer
        self._asked_at = step
        self._worker.wait_pending()
        # Elastic workers ask again where one is lost meanwhile.
        self._answer = self._worker._together(self._ask)  # pyright: ignore[reportPrivateUsage]
        return self._answer

    def _ask(self) -> bool:
        flag = torch.tensor([float(self.received is not None)], device=self._worker.replicas[0].x.device)
        return float(self._worker.comm.all_reduce_(flag).wait()) > 0

    def close(self) -> None:
        """Put the process's own handlers back."""
        while self._before:
            signal.signal(*self._before.popitem())
