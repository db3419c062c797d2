# SPDX-License-Identifier: Apache-2.0
"""Comparisons in virtual time: the numbers of real runs, and the times of a simulated network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire
from thinwire.cli import main
from thinwire.lab.emulate import Straggler
from thinwire.lab.report.folder import read
from thinwire.lab.report.table import rows
from thinwire.lab.runs.simulated import VirtualEngine
from thinwire.planning import simulate
from thinwire.planning.plan.predict import ModelTime
from thinwire.planning.simulate import SimulatedComm

pytest.importorskip("sklearn")
Capture = pytest.CaptureFixture[str]
DIGITS = ("--task", "digits", "--workers", "2", "--steps", "6", "--threads", "1", "--eval-limit", "64", "--json")
TWO = ("--strategies", "AllReduce(); LocalSGD(period=2)")


def compared(capsys: Capture, *arguments: str) -> list[dict[str, Any]]:
    assert main(["compare", *DIGITS, *arguments]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[0])


@pytest.mark.slow
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


def test_a_pause_within_the_backward_pass_or_the_update_comes_on_top() -> None:
    def work(comm: SimulatedComm) -> float:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worker = thinwire.attach(model, optimizer, "Local()", comm=comm)
        step = ModelTime(forward=0.5, backward=2.0, update=0.25)
        engine = VirtualEngine(worker, optimizer, comm, step, Straggler())
        engine.backward(model(torch.ones(2)).sum())
        engine.update()
        return comm.now

    assert simulate.run(1, work) == [2.75]
    pauses = (simulate.Pause(0, at=1.0, seconds=4.0), simulate.Pause(0, at=6.6, seconds=8.0))
    assert simulate.run(1, work, network=simulate.Network(pauses=pauses)) == pytest.approx([14.75])


@pytest.mark.slow
def test_a_slow_worker_of_the_file_is_slow_in_its_whole_step(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "network.toml"
    file.write_text('network = {bandwidth = "10gbit"}\nworkers = [{ranks = 1, slowdown = 4}]')
    given = ("--strategies", "AllReduce()", "--step-seconds", "0.03", "--network", str(file))
    (found,) = compared(capsys, "--simulate", *given, "--out", str(tmp_path / "run"))
    assert found["seconds_per_step"] == pytest.approx(0.12, 0.02)


@pytest.mark.slow
def test_waits_may_take_as_long_as_the_slowest_link_of_the_file_needs(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "network.toml"
    file.write_text('network = {bandwidth = "10kbit"}')  # an all-reduce takes longer than the usual minute
    given = ("--strategies", "AllReduce()", "--step-seconds", "0.03", "--network", str(file))
    (found,) = compared(capsys, "--simulate", *given, "--out", str(tmp_path / "run"))
    assert found["steps"] == 6 and found["seconds_per_step"] > 10


@pytest.mark.slow
def test_a_run_that_diverges_is_told_and_the_next_one_follows(capsys: Capture, tmp_path: Path) -> None:
    out, given = tmp_path / "run", ("--simulate", "--step-seconds", "0.03", "--lr", "1e25", "--optimizer", "sgd")
    recipes = ("--strategies", "AllReduce(); LocalSGD(period=2)")
    assert main(["compare", *DIGITS, *given, *recipes, "--out", str(out)]) == 1
    printed = capsys.readouterr()
    first, second = json.loads(printed.out.splitlines()[0])
    assert first["strategy"].startswith("AllReduce") and second["strategy"].startswith("LocalSGD")
    for each in (first, second):
        assert "NaN or infinite" in each["diverged"] or "the loss is" in each["diverged"]
        assert each["eval_loss"] is each["train_loss"] is None
    found = read(out)
    assert len(found.runs) == 2
    assert all(any(note.startswith("The run diverged, and ended") for note in run.notes) for run in found.runs)
    assert {row["held-out loss"] for row in rows(found.summaries)} == {"diverged"}


@pytest.mark.slow
def test_numbers_are_those_of_processes(capsys: Capture, tmp_path: Path) -> None:
    virtual = compared(capsys, "--simulate", *TWO, "--step-seconds", "0.03", "--out", str(tmp_path / "virtual"))
    real = compared(capsys, *TWO, "--out", str(tmp_path / "real"))
    for name in ("eval_loss", "eval_metric", "train_loss", "payload_bytes_per_worker_per_step", "steps"):
        assert [each[name] for each in virtual] == [each[name] for each in real], name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--simulate", "--strategies", "AllReduce(); ddp"), "ddp: is torch's own method, whose code cannot be"),
        (("--step-seconds", "1"), "--step-seconds 1.0: is about simulated runs. Add --simulate"),
        (("--network", "x.toml"), "--network x.toml: is about simulated runs"),
        (("--simulate", "--network", "x.toml", "--link", "1gbit"), "both say what the network is. Give one"),
        (("--simulate", "--strategies", "AllReduce()", "--network", "x.toml"), "x.toml: cannot be read"),
        (("--simulate", "--step-seconds", "-1"), "must be positive seconds"),
        (("--simulate", "--strategies", "AllReduce()", "--elastic"), "simulated workers cannot be lost"),
        (
            ("--strategies", "AllReduce(); ddp", "--switch", "2: AllReduce()"),
            "torch's own method, which cannot be left",
        ),
        (
            ("--strategies", "AllReduce(); Paced(base=LocalSGD(period=4))", "--switch", "2: AllReduce()"),
            "only after multiples of 4 steps",
        ),
        (("--strategies", "AllReduce(); ddp", "--elastic"), "torch's own method, which ends with any worker"),
    ],
)
def test_what_cannot_be_simulated_is_refused(arguments: tuple[str, ...], words: str, capsys: Capture) -> None:
    assert main(["compare", *DIGITS, *arguments]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ('compute = {time = "50ms"}', "[compute]: the step takes what --step-seconds says"),
        ("deaths = [{rank = 1, step = 2}]", "[[deaths]]: a lost worker ends a comparison"),
    ],
)
def test_entries_of_a_network_file_that_would_be_ignored_are_refused(
    entry: str, words: str, capsys: Capture, tmp_path: Path
) -> None:
    (tmp_path / "network.toml").write_text(entry)
    given = ("--simulate", "--strategies", "AllReduce()", "--network", str(tmp_path / "network.toml"))
    assert main(["compare", *DIGITS, *given]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
