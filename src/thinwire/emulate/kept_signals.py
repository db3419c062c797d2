"""Signals to this process, kept until somebody asks."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

KEPT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class KeptSignals:
    """A context in which SIGINT, SIGTERM and SIGHUP are noted instead of acted on.

    Only the main thread may set handlers; in any other this does nothing. A signal that was ignored stays ignored.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        """Start to note signals."""
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in KEPT if signal.getsignal(number) != signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._note) for number in heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put the former handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
