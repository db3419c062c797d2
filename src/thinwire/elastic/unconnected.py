# SPDX-License-Identifier: Apache-2.0
"""Find workers that do not reach each other, from the views that failed to connect."""

from __future__ import annotations

from thinwire.core.view import View

_VIEWS = 3  # consecutive failed views with the same workers, before one of them stops


class Unconnected:
    """Find the workers that do not reach all others; the result is the same on all workers.

    Views with new workers are ignored. A worker that waits for one that waits for a third may fail to connect in some
    views, but rarely in all.

    Example:
        >>> from thinwire.core.view import Progress, View
        >>> apart, members = Unconnected(), ("a", "b", "c")
        >>> for epoch, names in enumerate(["", "ab", "abc", "ab"]):
        ...     progress = {each: Progress(7, True, 3, unconnected=each in names) for each in members}
        ...     print(apart.add(View(epoch, members, progress=progress)))
        ()
        ()
        ()
        ('a', 'b')
    """

    def __init__(self) -> None:
        self.views: list[set[str]] = []

    def add(self, view: View) -> tuple[str, ...]:
        """Return the workers that connected in none of the last views, in rank order; empty at first."""
        now = {each for each, progress in view.ready.items() if progress.unconnected}
        same = not (view.joined or view.lost or view.left)
        self.views = [*self.views, now] if same and now else []
        if len(self.views) < _VIEWS:
            return ()
        found = set.intersection(*self.views) or now
        return tuple(each for each in view.members if each in found)
