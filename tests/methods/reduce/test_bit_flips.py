# SPDX-License-Identifier: Apache-2.0
"""One bit of what ranks exchange in codes is flipped on the way: an error on all ranks, and nobody applies anything."""

from __future__ import annotations

import pytest

from tests.methods.reduce.flips import CALLS, VECTORS, drawn, outcome_of, wrong

QUICK = 100


@pytest.mark.parametrize("flips", [range(QUICK), pytest.param(range(QUICK, 5000), marks=pytest.mark.slow)], ids=len)
def test_a_flipped_bit_is_an_error_on_all_ranks_before_anyone_applies_anything(flips: range) -> None:
    bad = [f"{flip}: {words}" for flip in map(drawn, flips) if (words := wrong(flip, outcome_of(flip)))]
    assert not bad, "\n".join(bad)


def test_every_codec_and_every_call_is_among_the_few_that_are_always_tried() -> None:
    flips = [drawn(seed) for seed in range(QUICK)]
    assert {str(flip.codec) for flip in flips} == {str(codec) for codec in VECTORS}
    assert {(flip.what, flip.call) for flip in flips} == {(what, call) for what in CALLS for call in CALLS[what]}
