"""Where a keeper's mail goes out, and where it is told that time has passed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from thinwire.errors import CommError
from thinwire.quorum.control_messages import Note
from thinwire.quorum.coordinator import Keeper, Mail
from thinwire.quorum.weak_callback import weak


class Office:
    """A keeper among the others' messages; in whatever thread these come, under the mailbox's lock.

    Args:
        keeper: decides.
        changed: that lock.
        post: sends a note to a rank.
    """

    def __init__(self, keeper: Keeper, changed: threading.Condition, post: Callable[[tuple[int, Note]], None]) -> None:
        self.keeper = keeper
        self._changed, self._post = changed, post

    def hear(self, src: int, note: Note) -> None:
        """Take in a note, and say what follows from it."""
        self._send(self.keeper.hear(src, note, time.monotonic()))

    def _send(self, mail: Mail) -> None:
        """Post what the keeper says, and see to it that it looks again in time."""
        for each in mail:
            self._post(each)
        rest = self.keeper.rest(time.monotonic())
        if rest:
            timer = threading.Timer(rest, weak(self._look, None), [rest])
            timer.daemon = True
            timer.start()

    def _look(self, _: float) -> None:
        with suppress(CommError, ReferenceError), self._changed:
            self._send(self.keeper.look(time.monotonic()))
