# SPDX-License-Identifier: Apache-2.0
"""Graceful shutdown: all ranks learn of a signal after the same step, and save or continue without the rank."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

from thinwire.core.comm.forks import protect
from thinwire.elastic.late_rounds import LateRounds
from thinwire.elastic.rounds import Elastic
from thinwire.errors import ConfigError
from thinwire.worker.handshake import gather_texts
from thinwire.worker.worker import Worker, internals_of

LEFT_WITH_NOTICE = 75
"""The exit code of a program that has saved and wants to be started again (EX_TEMPFAIL)."""
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""Those that give notice: of spot machines and Kubernetes, and of Slurm; Windows has not both."""

_ONE_NOTICE_SECONDS = 5.0  # a launcher may pass on the signal that the worker itself has got, too


class Notice:
    """Tells all ranks, after the same step, which of them were asked to leave by a signal.

    Its handlers replace those of the process until `close`. Every `every` steps the ranks exchange 8 bytes;
    a step in between costs nothing. The loop decides what follows: all save, and exit with `LEFT_WITH_NOTICE`,
    from which a launcher starts them again; or, under `attach(elastic=True)`, those that were asked `leave`, and the
    others continue. If a worker is a group of ranks, a signal to one of them counts for all of them. A second signal
    after 5 s or more is handled as without this object.

    Attributes:
        received: why this rank has to leave: the name of the signal that it got; None while there is no reason. Set it
            to a text where notice comes in another way, such as from a cloud's metadata service.
        reasons: why ranks have to leave, by rank, and under `elastic=True` by `worker_id`; empty until all know of it.

    Args:
        worker: that trains.
        every: steps between the messages; with the steps' length, how late a notice may be seen.
        signals: those that give notice.

    Raises:
        ConfigError: `every` is less than 1, or there are signals and this is not the main thread, in which alone Python
            handles them.

    Example:
        >>> import os, signal, tempfile, torch, thinwire
        >>> from thinwire.elastic.notice import Notice
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
        ...             print(worker.step, notice.reasons, worker.save(folder).name)
        ...             break
        10 {0: 'SIGUSR1'} step-00000010
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
        if signals and threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "Notice in a thread other than the main one: Python handles signals in the main thread only"
            )
        self.received: str | None = None
        self.reasons: dict[int | str, str] = {}
        self._worker = worker
        views = worker.elastic
        assert views is None or isinstance(views, Elastic | LateRounds)  # the only ones that `attach` can enter
        self._views = views
        self._every = every
        self._asked_at = -1
        self._received_at = 0.0
        self._before: dict[signal.Signals, Any] = {each: signal.signal(each, self._receive) for each in signals}
        protect(self)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self.received is None:
            self.received, self._received_at = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - self._received_at > _ONE_NOTICE_SECONDS:
            self.close()
            signal.raise_signal(number)

    def agreed(self) -> bool:
        """Return True if any rank has a reason to leave; equal on all ranks. Call it after every step, on all ranks."""
        worker = self._worker
        step, meets = worker.step, worker.strategy.traits.meets_every
        # Where ranks meet only at multiples of a round, they are asked there.
        every = -(-self._every // meets) * meets
        if self.reasons or step % every or step == self._asked_at:
            return bool(self.reasons)
        self._asked_at = step
        own, views = self.received or "", self._views
        reason = views.reason(own) if isinstance(views, Elastic) else own
        # Elastic workers ask again where one is lost meanwhile.
        self.reasons = self._ask(reason) if views is None else views.together(lambda: self._ask(reason), sends=False)
        return bool(self.reasons)

    def leave(self) -> bool:
        """Release workers with a reason to leave, while the others continue; for `attach(elastic=True)`.

        State of a leaving worker is passed on first: its push-sum mass and its residuals to a neighbor; where
        parameters differ, all take the mean of them. The others then continue in a view without it. Call it after every
        step, on all workers.

        Returns:
            Whether this worker has left: end its loop, and exit with 0. If all workers have a reason, so that there are
            as many `reasons` as workers, none continues: save on all of them, and exit with `LEFT_WITH_NOTICE`.

        Raises:
            ConfigError: this worker is not elastic.

        Example:
            >>> import torch
            >>> from thinwire import AllReduce, attach
            >>> from thinwire.elastic.threads import ThreadNetwork
            >>> from thinwire.elastic.notice import Notice
            >>> model = torch.nn.Linear(1, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> worker = attach(model, optimizer, AllReduce(), elastic=ThreadNetwork().fleet("a", 0, 1))
            >>> notice = Notice(worker, every=5)
            >>> notice.received = "the price is too high"
            >>> while not notice.leave():
            ...     model(torch.ones(1, 1)).sum().backward()
            ...     optimizer.step()
            >>> worker.step
            0
            >>> notice.close()
            >>> worker.detach()
        """
        if self._views is None:
            raise ConfigError(
                "leave(): only workers of attach(elastic=True) continue without one. If agreed() is true, save on all "
                "ranks and exit with LEFT_WITH_NOTICE"
            )
        if not self.agreed():
            return False
        if self._views.release({str(each): reason for each, reason in self.reasons.items()}):
            self.close()
            return True
        self.reasons = {}
        return False

    def _ask(self, reason: str) -> dict[int | str, str]:
        worker, device = self._worker, self._worker.replicas[0].x.device
        if self._views is not None and self._views.has_just_joined:
            return {}  # the others have asked after the step before
        internals_of(worker).wait_pending()
        texts = gather_texts(worker.comm, reason.encode(), device)
        names: Sequence[int | str] = range(len(texts)) if self._views is None else self._views.peers
        return {name: text.decode() for name, text in zip(names, texts, strict=True) if text}

    def after_fork(self) -> None:
        """Put the handlers back in a fork, such as a DataLoader's worker, which a signal is to end as before."""
        self.close()

    def close(self) -> None:
        """Put the process's own handlers back."""
        while self._before:
            signal.signal(*self._before.popitem())
