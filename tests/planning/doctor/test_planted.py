# SPDX-License-Identifier: Apache-2.0
"""Faults planted in real processes behind emulated links: each is named, with the right ranks, in time."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import pytest

from thinwire.lab.emulate import Network, available, parse_links, run_workers

pytestmark = pytest.mark.skipif(available() is not None, reason=f"no emulated links: {available()}")


def examined(
    faults: str, *, workers: int = 3, link: str = "100mbit", options: tuple[str, ...] = ()
) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
    """Run the doctor with faults; returns rank 0's findings, all that it printed, and the other ranks' lines."""
    lines: list[str] = []
    others: list[str] = []

    def keep(rank: int, stream: str, line: str) -> None:
        (lines if (rank, stream) == (0, "stdout") else others).append(line)

    command = [sys.executable, "-m", "tests.planning.doctor.planted", faults, *options]
    with Network(parse_links(link, workers)) as network:
        run_workers(command, workers, network=network, on_line=keep, timeout=100)
    assert lines, others
    printed = json.loads("\n".join(lines))
    return printed["findings"], printed, "\n".join(others)


def ranks_of(findings: list[dict[str, Any]], kind: str) -> list[list[int]]:
    return [finding["ranks"] for finding in findings if finding["kind"] == kind]


@pytest.mark.slow
def test_faults_of_machines_are_all_named_with_their_ranks() -> None:
    findings, printed, _ = examined(
        "slow_rank+versions+threads+clock+open_files", link="100mbit,1:35mbit", options=("--quick",)
    )
    assert ranks_of(findings, "slow-link") == [[1]]
    assert ranks_of(findings, "slow-rank") == [[2]]
    assert ranks_of(findings, "versions") == [[2]]
    assert [0] in ranks_of(findings, "threads")
    assert ranks_of(findings, "clock") == [[2]]
    assert ranks_of(findings, "open-files") == [[1]]
    assert len(printed["pairs"]) == 3 and printed["all_reduces"]


@pytest.mark.slow
def test_a_missing_rank_is_named_and_the_others_are_measured() -> None:
    findings, printed, _ = examined("missing_rank", options=("--quick", "--timeout", "4"))
    assert ranks_of(findings, "missing-rank") == [[2]]
    assert [(pair["a"], pair["b"], pair["problem"]) for pair in printed["pairs"]] == [(0, 1, "")]
    assert sorted(printed["steps"]) == ["0", "1"]


@pytest.mark.slow
def test_a_blocked_pair_is_named() -> None:
    findings, _, _ = examined("blocked_port", options=("--quick", "--timeout", "4"))
    assert ranks_of(findings, "blocked-port") == [[1, 2]]


@pytest.mark.slow
def test_a_healthy_network_has_no_errors() -> None:
    findings, _, _ = examined("none", workers=2, options=("--quick",))
    assert not [finding for finding in findings if finding["severity"] == "error"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "link", "kind", "ranks"),
    [
        ("wrong_interface", "100mbit", "wrong-interface", [1]),
        ("name_is_loopback", "100mbit", "name-is-loopback", [1]),
        ("none", "100mbit,1:35mbit", "slow-link", [1]),
        ("slow_rank", "100mbit", "slow-rank", [2]),
        ("blocked_port", "100mbit", "blocked-port", [1, 2]),
        ("versions", "100mbit", "versions", [2]),
        ("threads", "100mbit", "threads", [0]),
        ("clock", "100mbit", "clock", [2]),
        ("open_files", "100mbit", "open-files", [1]),
        ("missing_rank", "100mbit", "missing-rank", [2]),
    ],
)
def test_each_fault_is_named_within_a_minute_at_default_settings(
    fault: str, link: str, kind: str, ranks: list[int]
) -> None:
    start = time.monotonic()
    findings, _, _ = examined(fault, link=link)
    assert ranks in ranks_of(findings, kind), findings
    assert time.monotonic() - start < 60


@pytest.mark.slow
def test_rank_0_that_does_not_come_is_named_by_the_others() -> None:
    lines: list[str] = []
    code = (
        "import os, sys\n"
        "if os.environ['RANK'] == '0': sys.exit(0)\n"
        "from tests.planning.doctor.planted import OPTIONS\n"
        "from thinwire.cli import main\n"
        "sys.exit(main(['doctor', '--timeout', '2', *OPTIONS]))"
    )
    exits = run_workers([sys.executable, "-c", code], 2, on_line=lambda *line: lines.append(line[2]), timeout=60)
    assert exits[1].code == 1
    assert "rank 1: the rendezvous at 127.0.0.1:" in "\n".join(lines) and "rank 0" in "\n".join(lines)
