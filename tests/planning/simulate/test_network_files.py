# SPDX-License-Identifier: Apache-2.0
"""What network files say, read."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire import ConfigError
from thinwire.planning.quantities import parse_rank
from thinwire.planning.simulate.network import load_network, read_network


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("0-15", tuple(range(16))), ("3-3", (3,)), ("0-2, 20", (0, 1, 2, 20)), (4, (4,)), ([5, 6], (5, 6))],
)
def test_a_range_of_ranks_includes_both_ends(text: object, ranks: tuple[int, ...]) -> None:
    network = read_network({"workers": [{"ranks": text, "slowdown": 2}]})
    assert network.specials[0].ranks == ranks


_MANY = "9" * 5000


@pytest.mark.parametrize(
    "text",
    [
        f"[[workers]]\nranks = {_MANY}",
        "[[workers]]\nranks = 99999999999999999999999999",
        f'[[workers]]\nranks = "{_MANY}"',
        f'[[workers]]\nranks = "0-{_MANY}"',
        '[[workers]]\nranks = "0-9999999999"',
        f"[[workers]]\nranks = [{2**70}]",
        f"[[workers]]\nranks = 1\nslowdown = 1{'0' * 400}",
        "[[workers]]\nranks = 1\nslowdown = 1e400",
        f'[network]\nbandwidth = "{_MANY}mbit"',
        f'[network]\nlatency = "{_MANY}ms"',
        f"[racks]\nsize = {2**64}",
        f"[[deaths]]\nrank = 1\nstep = {2**80}",
    ],
)
def test_huge_numbers_in_a_network_file_are_refused_in_words(text: str, tmp_path: Path) -> None:
    file = tmp_path / "network.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_network(file)
    assert len(str(refused.value)) < 400


def test_a_huge_rank_of_a_link_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="there is no worker"):
        parse_rank(_MANY, 4, argument="--link")
