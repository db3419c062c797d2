# SPDX-License-Identifier: Apache-2.0
"""Which workers do not reach each other, by the views that did not connect."""

from __future__ import annotations

from thinwire.elastic.view import View

_VIEWS = 3  # in a row with the same workers, before one of them stops


class Unconnected:
    """Finds, view by view, who does not reach all others; the same on all workers, who know it from the views.

    Views with workers that are new say nothing about the others. Who waits for a worker that waits for another one may
    be among those that did not connect in some views, and seldom in all.

    Example:
        >>> from thinwire.elastic.view import Progress, View
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
        """Those that did not connect in any of the last views, in the order of ranks; empty while these are too few."""
        now = {each for each, progress in view.ready.items() if progress.unconnected}
        same = not (view.joined or view.lost or view.left)
        self.views = [*self.views, now] if same and now else []
        if len(self.views) < _VIEWS:
            return ()
        found = set.intersection(*self.views) or now
        return tuple(each for each in view.members if each in found)
