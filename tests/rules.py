# SPDX-License-Identifier: Apache-2.0
"""One test that asks the same of many things, and names each that fails."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from thinwire import ConfigError


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


def refusals(
    cases: Iterable[tuple[Any, ...]],
    call: Callable[..., Any] = lambda make: make(),
    *,
    error: type[Exception] = ConfigError,
) -> Callable[[], None]:
    """Return a test that calls a function for each case, which must raise an error with the case's words.

    Args:
        cases: the arguments of a call, and last a regular expression of the words. Often the argument is a function
            without arguments, which is called.
        call: what is called with the arguments.
        error: what it raises.
    """
    listed = list(cases)

    def test() -> None:
        assert listed
        wrong: list[str] = []
        for *arguments, words in listed:
            try:
                call(*arguments)
            except error as found:
                if not re.search(words, str(found)):
                    wrong.append(f"{words!r} is not in {str(found)!r}")
            else:
                wrong.append(f"nothing is raised with {words!r}")
        assert not wrong, "\n".join(wrong)

    return test
