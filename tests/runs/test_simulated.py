# SPDX-License-Identifier: Apache-2.0
"""Comparisons in virtual time: the numbers of real runs, and the times of a simulated network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from thinwire.cli import main
from thinwire.report.folder import read

pytest.importorskip("sklearn")
Capture = pytest.CaptureFixture[str]
DIGITS = ("--task", "digits", "--workers", "2", "--steps", "6", "--threads", "1", "--eval-limit", "64", "--json")
TWO = ("--strategies", "AllReduce(); LocalSGD(period=2)")


def compared(capsys: Capture, *arguments: str) -> list[dict[str, Any]]:
    assert main(["compare", *DIGITS, *arguments]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[0])


def test_times_are_those_of_the_links_and_of_the_step(capsys: Capture, tmp_path: Path) -> None:
    given = ("--simulate", *TWO, "--step-seconds", "0.03", "--slow", "1:2x", "--link", "100kbit")
    every, local = compared(capsys, *given, "--out", str(tmp_path / "run"))
    # The slower worker's step, and the vector once in each direction: after each step, or after two.
    transfer = 8 * every["payload_bytes_per_worker_per_step"] / 1e5
    assert [each["seconds"] for each in (every, local)] == pytest.approx(
        [6 * (0.06 + transfer), 0.36 + 3 * transfer], 0.1
    )
    assert every["exposed_seconds_per_step"] == pytest.approx(transfer, 0.2)
    assert all(each["wire_bytes_per_worker_per_step"] is None for each in (every, local))


@pytest.mark.slow
def test_a_seed_is_a_comparison_and_its_folder_is_one_that_the_report_reads(capsys: Capture, tmp_path: Path) -> None:
    given = ("--simulate", *TWO, "--step-seconds", "0.03", "--stall", "0.5:1s", "--link", "10mbit")
    first, again = (compared(capsys, *given, "--out", str(tmp_path / name)) for name in ("a", "b"))
    assert first == again
    found = read(tmp_path / "a")
    assert found.title == "2 strategies on digits (mlp), 2 workers over 10mbit, simulated"
    assert [run.config["simulated"] for run in found.runs] == [True, True]
    assert {span.kind for span in found.runs[0].spans} >= {"compute", "wait"}


def test_a_network_file_takes_the_place_of_links(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "network.toml"
    file.write_text('network = {bandwidth = "1gbit", latency = "100ms"}')
    given = ("--strategies", "AllReduce()", "--step-seconds", "0.03", "--network", str(file))
    (found,) = compared(capsys, "--simulate", *given, "--out", str(tmp_path / "run"))
    assert found["seconds_per_step"] == pytest.approx(0.23, 0.05)


@pytest.mark.slow
def test_numbers_are_those_of_processes(capsys: Capture, tmp_path: Path) -> None:
    virtual = compared(capsys, "--simulate", *TWO, "--step-seconds", "0.03", "--out", str(tmp_path / "virtual"))
    real = compared(capsys, *TWO, "--out", str(tmp_path / "real"))
    for name in ("eval_loss", "eval_metric", "train_loss", "payload_bytes_per_worker_per_step", "steps"):
        assert [each[name] for each in virtual] == [each[name] for each in real], name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--simulate", "--strategies", "AllReduce(); ddp"), "ddp is torch's own method, whose code cannot be"),
        (("--simulate", "--strategies", "AllReduce()", "--stop", "1:1s:1s"), "give pauses in a network file"),
        (("--step-seconds", "1"), "--step-seconds 1.0: is about simulated runs; add --simulate"),
        (("--network", "x.toml"), "--network x.toml: is about simulated runs"),
        (("--simulate", "--network", "x.toml", "--link", "1gbit"), "both say what the network is; give one"),
        (("--simulate", "--strategies", "AllReduce()", "--network", "x.toml"), "x.toml: cannot be read"),
        (("--simulate", "--step-seconds", "-1"), "must be positive seconds"),
    ],
)
def test_what_cannot_be_simulated_is_refused(arguments: tuple[str, ...], words: str, capsys: Capture) -> None:
    assert main(["compare", *DIGITS, *arguments]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
