# SPDX-License-Identifier: Apache-2.0
"""In each trainer the interfaces carry the recipe's bytes, and nothing of DistributedDataParallel's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.integrations.small import Net
from tests.integrations.wire import AVERAGES, TOOLS, WIDTH
from thinwire.lab.emulate import Network, available, parse_links, run_workers

REASON = available()


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.emulation
@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
def test_interfaces_carry_the_recipe_s_bytes_within_three_percent(tool: str, tmp_path: Path) -> None:
    pytest.importorskip(tool.partition("-")[0])
    lines: list[str] = []
    with Network(parse_links("1gbit", 2)) as network:
        exits = run_workers(
            [sys.executable, "-m", "tests.integrations.wire", tool, str(tmp_path)],
            2,
            network=network,
            on_line=lambda rank, stream, line: lines.append(line),
            timeout=100,
        )
    assert [record.code for record in exits] == [0, 0], lines
    sent = [int(line.split()[1]) for line in lines if line.startswith("sent ")]
    vector = 4 * sum(p.numel() for p in Net(WIDTH).parameters())
    assert sent == [pytest.approx(AVERAGES * vector, rel=0.03)] * 2
