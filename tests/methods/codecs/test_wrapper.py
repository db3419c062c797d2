# SPDX-License-Identifier: Apache-2.0
"""A codec around another one is that one in all that it does not override."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.rules import for_each
from thinwire import Codec, Quantize
from thinwire.methods.codecs.base import CODEC_SOURCES, CodecWrapper


@dataclass(frozen=True)
class Around(CodecWrapper):
    """Overrides nothing."""

    codec: Codec


def test_the_table_has_every_property_and_method() -> None:
    assert sorted(CODEC_SOURCES) == sorted(name for name in vars(Codec) if name[0] != "_")


@for_each([name for name, of in vars(Codec).items() if isinstance(of, property)])
def test_a_property_is_that_of_the_codec_inside_or_that_of_every_codec(name: str) -> None:
    answer: Any = object()
    inside = type("Odd", (Quantize,), {name: answer})()
    if CODEC_SOURCES[name] == "codec":
        assert getattr(Around(inside), name) is answer
    else:
        assert getattr(CodecWrapper, name) is getattr(Codec, name)
