# SPDX-License-Identifier: Apache-2.0
"""One test that asks the same of many things, and names each that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def for_each(things: Iterable[Any], name: Callable[[Any], str] = str) -> Callable[[Callable[[Any], None]], Any]:
    """Run a test for each thing, as one test: thousands of cases would cost more than what they look at.

    Args:
        things: what is looked at.
        name: of a thing, in the report.
    """
    listed = list(things)

    def decorate(check: Callable[[Any], None]) -> Callable[[], None]:
        def test() -> None:
            assert listed
            failed: list[str] = []
            for thing in listed:
                try:
                    check(thing)
                except Exception as error:  # all are looked at
                    failed.append(f"{name(thing)}: {type(error).__name__}: {error}")
            assert not failed, "\n".join(failed)

        test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
        return test

    return decorate
