# SPDX-License-Identifier: Apache-2.0
"""A codec around another one has its traits, except those of one class alone."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch

from tests.rules import for_each
from thinwire import Codec, CodecTraits, Quantize
from thinwire.methods.codecs.base import NOT_INHERITED, CodecWrapper

ODD: dict[str, Any] = {
    **{each.name: not each.default for each in fields(CodecTraits) if isinstance(each.default, bool)},
    "error_bound": 0.5,
    "alignment": 24,
    "dtype": torch.float64,
    "growing": ("factor",),
    "inelastic": "a reason",
}


@dataclass(frozen=True)
class Around(CodecWrapper):
    """Overrides nothing."""

    codec: Codec


@dataclass(frozen=True)
class Odd(Quantize):
    """Differs from the defaults in all traits."""

    @cached_property
    def traits(self) -> CodecTraits:
        return CodecTraits(**ODD)


def test_the_table_names_traits() -> None:
    assert {each.name for each in fields(CodecTraits)} == set(ODD) > set(NOT_INHERITED)


@for_each(sorted(ODD))
def test_a_trait_is_that_of_the_codec_inside_or_that_of_every_codec(name: str) -> None:
    expected = CodecTraits() if name in NOT_INHERITED else Odd().traits
    assert getattr(Around(Odd()).traits, name) == getattr(expected, name)
