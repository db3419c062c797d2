# SPDX-License-Identifier: Apache-2.0
"""Comparisons of bytes and seconds, which say nothing where a run did not reach its end."""

from __future__ import annotations

from thinwire.errors import NonFiniteError
from thinwire.lab.runs.comparison import Comparison


def ended(done: Comparison) -> Comparison:
    """The comparison, all of whose runs reached their end.

    Raises:
        NonFiniteError: one of them diverged; with what ended it.
    """
    for strategy, number, words in done.diverged:
        raise NonFiniteError(f"{strategy}, round {number}: {words}")
    return done
