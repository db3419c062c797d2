# SPDX-License-Identifier: Apache-2.0
"""`thinwire plan`: its table, its picture, its JSON, and what it refuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from io import StringIO
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch

from thinwire.cli import main
from thinwire.cli.console import Console
from thinwire.cli.progress import Parts
from thinwire.lab.emulate import parse_links
from thinwire.methods.strategies.recipe import parse
from thinwire.planning.doctor import host, speeds
from thinwire.planning.doctor.findings import Examination
from thinwire.planning.doctor.links import Pair
from thinwire.planning.doctor.speeds import StepTime
from thinwire.planning.plan import timings
from thinwire.planning.plan.candidates import Accuracy, AccuracyTable
from thinwire.planning.plan.decision import Decision, decide, late_merging, why
from thinwire.planning.plan.network_words import differences, rates_differ
from thinwire.planning.plan.networks import network_of_links
from thinwire.planning.plan.predict import ModelTime, Prediction
from thinwire.planning.plan.search import Crossing, Job, Option, Planner
from thinwire.planning.simulate import Network, Racks, Special
from thinwire.planning.simulate import Pair as Between

QUICK = ["--task", "digits", "--strategies", "AllReduce(); PushSum(staleness=1)"]


@pytest.fixture(autouse=True)
def own_timings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Plans of a test keep their timings in a folder of the test, and find the machine idle."""
    monkeypatch.setattr(host, "load_average", lambda: 0.0)
    path = tmp_path / "cache" / "timings.json"
    monkeypatch.setattr(timings, "timings_path", lambda: path)
    return path


def planned(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, object]:
    assert main(["plan", *options, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_workers_of_unequal_speeds_get_a_quorum_and_a_grace_window(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--task", "digits", "--strategies", "AllReduce()", "--workers", "4", "--link", "100mbit"]
    assert main(["plan", *options, "--step-seconds", "0.005", "--slow", "3:5x"]) == 0
    text = capsys.readouterr().out
    assert "LateMerging(quorum=0.75, deviations=" in text and "rounds that wait for all workers use" in text


def test_late_work_is_recommended_for_unequal_speeds_only() -> None:
    assert late_merging(Network(1e8, 1e-4), 4) is None
    late = late_merging(Network(1e8, 1e-4, specials=(Special((3,), slowdown=5.0),)), 4)
    assert late is not None
    assert late["goodput"] > 0.9 > 0.6 > late["goodput_of_waiting"] and late["quorum"] < 1


@pytest.mark.parametrize(("load", "told"), [pytest.param(1.9, False, marks=pytest.mark.slow), (2.1, True)])
@pytest.mark.slow
def test_a_fast_link_gets_all_reduce_and_a_busy_machine_is_told(
    load: float, told: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(host, "load_average", lambda: load)
    monkeypatch.setattr(host, "usable_cores", lambda: 4)
    network = tmp_path / "fast.toml"
    network.write_text('network = {bandwidth = "100gbit", latency = "10us", all_reduce = "gloo"}')
    fast = ["--workers", "2", "--network", str(network), "--step-seconds", "0.005"]
    assert main(["plan", *QUICK, *fast, "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["recommended"] == "AllReduce()"
    assert found["crossings"][0]["side"] == "slower"
    assert ("a load of 2.1 on 4 cores" in " ".join(printed.err.split())) is told


@pytest.mark.slow
def test_a_slow_link_gets_a_recipe_that_sends_less_with_its_reason_and_one_line_says_that_it_is_planning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", *QUICK, "--workers", "2", "--link", "300kbit", "--step-seconds", "0.05"]) == 0
    printed = capsys.readouterr()
    assert "\nPushSum(staleness=1)\nAllReduce() would wait" in printed.out
    assert "What would change that: above " in printed.out and "python -m benchmarks.accuracy" in printed.out
    assert printed.err == "planning: 2 recipes are simulated, which may take minutes\n"


ONE_SLOW = ["--link", "100mbit,3:30kbit", "--step-seconds", "0.5"]


@pytest.mark.slow
def test_a_link_that_differs_is_printed_and_what_would_change_the_choice_is_told_of_all_links(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", *QUICK, *ONE_SLOW]) == 0
    printed = capsys.readouterr().out
    assert "4 workers, 100 Mbit/s, 100 µs one way; rank 3: 30 kbit/s\n" in printed
    assert "What would change that: if all links were " in printed and " times as fast, AllReduce()." in printed
    assert main(["plan", *QUICK[:2], *ONE_SLOW, "--strategies", "AllReduce()"]) == 0
    assert "were all links between 0.100 and 1000 times as fast" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("network", "differ", "words"),
    [
        (Network(), False, ""),
        (network_of_links(parse_links("100mbit+5ms", 4)), False, ""),
        (network_of_links(parse_links("1gbit,1:5mbit,2:5mbit", 4)), True, "ranks 1-2: 5 Mbit/s"),
        (network_of_links(parse_links("1gbit,3:1gbit+2ms", 4)), False, "rank 3: 1.00 ms more one way"),
        (Network(specials=(Special((0,), slowdown=3.0),)), False, "rank 0: computes 3.00 times as long"),
        (Network(pairs=(Between((0, 5), 1e8, 0.01),)), True, "between ranks 0 and 5: 100 Mbit/s, 10.0 ms one way"),
        (Network(racks=Racks(8, 2e9)), True, "racks of 8, whose uplinks have 2 Gbit/s"),
        (Network(racks=Racks(8, latency=0.001)), False, "racks of 8, 1.00 ms more between them"),
    ],
)
def test_what_differs_in_a_network_is_told_in_words(network: Network, differ: bool, words: str) -> None:
    assert (rates_differ(network), differences(network)) == (differ, words)


def test_many_links_that_differ_are_counted() -> None:
    network = Network(specials=tuple(Special((rank,), 1e6 * (rank + 1)) for rank in range(12)))
    assert differences(network).endswith("rank 7: 8 Mbit/s; and 4 more")


@pytest.mark.slow
def test_the_links_and_the_step_that_the_doctor_measured_are_taken(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    step = StepTime("mine", [[1000, 1000]], "float32", 4_000_000, 0.02, 0.03, 0.0, [1.0])
    pairs = [Pair(a, b, "", 2e-3, 9e6, 9e6, 9e6, 9e6) for a, b in ((0, 1), (0, 2), (1, 2))]
    seen = Examination(3, "", {}, pairs, {}, dict.fromkeys(range(3), step))
    path = tmp_path / "doctor.json"
    path.write_text(json.dumps({**asdict(seen), "findings": [], "strategies": []}))
    found = planned(capsys, "--doctor", str(path), *QUICK[2:])
    assert found["workers"] == 3 and found["latency"] == pytest.approx(1e-3)
    assert found["step"]["name"] == "mine" and found["recommended"] == "PushSum(staleness=1)"  # type: ignore
    # Of another number of workers it is not known which are slow, and that is said.
    slow = [replace(pair, **dict.fromkeys(("there", "back", "both", "several"), 1e6)) for pair in pairs[1:]]
    path.write_text(json.dumps({**asdict(replace(seen, pairs=[pairs[0], *slow])), "findings": [], "strategies": []}))
    assert main(["plan", "--doctor", str(path), "--workers", "4", "--strategies", "AllReduce()"]) == 0
    words = " ".join(capsys.readouterr().err.split())
    assert "--workers 4: the doctor examined 3, of which rank 2: 1" in words and "are taken to be alike" in words


@pytest.mark.slow
def test_the_same_plan_gives_the_same_answer_and_says_where_its_timings_come_from(
    capsys: pytest.CaptureFixture[str], own_timings: Path
) -> None:
    link = ["--link", "10mbit", "--workers", "2"]
    options = [*QUICK, *link]
    first, second = planned(capsys, *options), planned(capsys, *options)
    assert [each["timings"]["measured"] for each in (first, second)] == [3, 0]  # type: ignore
    assert second["timings"]["kept"] == 3 and second["timings"]["file"] == str(own_timings)  # type: ignore
    assert {**first, "timings": None} == {**second, "timings": None}
    assert main(["plan", *options]) == 0
    assert "3 timings of this machine were kept from earlier plans, the oldest from 2" in capsys.readouterr().out
    again = planned(capsys, *QUICK[:2], *link, "--strategies", "AllReduce()", "--measure-again")["timings"]
    assert again["measured"] > 0 and again["kept"] == 0  # type: ignore
    step = first["step"]
    assert isinstance(step, dict) and step["forward"] > 0 and len(step["ready"]) == len(step["shapes"])


def test_on_a_terminal_the_part_under_way_is_shown_and_removed_at_the_end() -> None:
    shown = StringIO()
    console = Console(file=shown, force_terminal=True, width=80)
    with Parts("planning", console=console) as parts:
        parts.expect(2)
        parts("PushSum()")
        parts("AllReduce()")
        assert parts._live is not None
        (task,) = parts._live.tasks
        assert (task.description, task.completed, task.total) == ("AllReduce()", 1, 2)
    assert "AllReduce()" in shown.getvalue()


def option(recipe: str, step: float, accuracy: Accuracy | None) -> Option:
    return Option(recipe, Prediction(parse(recipe), step, 0.01, 0.0, 1e6, 1e6, 1e6), accuracy)


EXACT = Accuracy(1.0, 1.0, 1.0, 5, 0)
DENSE_ONLY = [option("AllReduce()", 1.0, EXACT)]


@pytest.mark.parametrize(
    ("others", "words", "silent"),
    [
        # Its three runs that reached the loss were sooner, and two never reached it.
        (
            [option("DiLoCo(period=32)", 0.1, Accuracy(inf, 1.2, 1.5, 5, 2))],
            "DiLoCo(period=32) may be sooner still, but it never reached the loss in 2 of 5 measured runs",
            "times as soon",
        ),
        ([option("DiLoCo(period=32)", 0.1, Accuracy(inf, inf, inf, 5, 5))], "A step takes 1.00 s", "DiLoCo"),
        ([option("LocalSGD(period=8)", 0.98, EXACT)], "LocalSGD(period=8) is within noise of it (5 %", "may be"),
    ],
)
def test_the_reason_says_what_missed_the_loss_and_what_is_within_noise(
    others: list[Option], words: str, silent: str
) -> None:
    reason = why([*others, *DENSE_ONLY], DENSE_ONLY[0])
    assert words in reason and silent not in reason


def test_json_has_the_links_that_differ_and_the_factor_of_all_and_never_is_null() -> None:
    found = [*DENSE_ONLY, option("DiLoCo(period=32)", 0.1, Accuracy(inf, 1.2, 1.5, 5, 2))]
    job = Job([(1000, 1000)], 4, network_of_links(parse_links("100mbit,3:30kbit", 4)), ModelTime(0.005, 0.005))
    planner = Planner(job, [each.recipe for each in found], table=AccuracyTable("", "", {}))
    crossing = Crossing(5e7, 0.5, "slower", "DiLoCo(period=32)")
    content = json.loads(json.dumps(Decision(planner, found, found[0], [crossing], None).as_json(), allow_nan=False))
    (slow,) = content["workers_that_differ"]
    assert (slow["ranks"], slow["bits_per_second"]) == ([3], 3e4)
    assert content["crossings"][0]["factor"] == 0.5
    assert content["recommended"] == "AllReduce()" and content["within_noise"] == []
    never = content["options"][1]
    assert never["relative_seconds_to_loss"] is None
    assert never["relative_steps"] == {"factor": None, "least": 1.2, "most": 1.5, "runs": 5, "missed": 2, "rates": {}}


MINE = """
import torch


def model():
    return torch.nn.Linear(4, 4)


def data(rank, size, seed):
    return [(torch.ones(1, 4), torch.zeros(1))]


def loss(outputs, targets):
    return outputs.sum()
"""


@pytest.mark.slow
def test_the_step_is_timed_with_the_optimizer_of_the_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_optimizer.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    options = [
        "--strategies",
        "AllReduce(); AllReduce(codec=ErrorFeedback(OneBit()))",
        "--link",
        "1gbit",
        "--workers",
        "2",
    ]
    used: list[str] = []
    real = speeds.time_steps

    def time_steps(
        name: str,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[], torch.Tensor],
        **_: Any,
    ) -> StepTime:
        used.append(type(optimizer).__name__)
        return real(name, model, optimizer, loss, budget=0.01)

    monkeypatch.setattr(speeds, "time_steps", time_steps)
    own = [word for name in ("model", "data", "loss") for word in (f"--{name}", f"own_optimizer:{name}")]
    refused = [
        planned(capsys, *options, *each)["options"][-1]["refused"]  # type: ignore
        for each in (own, [*own, "--optimizer", "sgd"], ["--task", "digits"])
    ]
    assert used == ["AdamW", "SGD", "SGD"]
    # Signs of a gradient cannot serve AdamW.
    assert ["AdamW" in each for each in refused] == [True, False, False]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "no network: give --link 100mbit"),
        (["--link", "100mbit", "--doctor", "x.json"], "--link and --doctor: give one of them"),
        (["--doctor", "no.json"], "no.json: cannot be read"),
        (["--link", "100mbit", "--workers", "1"], "--workers 1: must be 2 to 4096"),
        (["--link", "100mbit", "--step-seconds", "-1"], "--step-seconds -1.0: must be positive"),
        (["--link", "100mbit", "--strategies", "ddp"], "torch's own method"),
        (["--link", "100mbit", "--strategies", "LocalSDG()"], "LocalSGD"),
        (["--link", "100mbit", "--model", "train:make", "--task", "text"], "its data are the task"),
        (["--link", "100mbit", "--model", "train:make"], "--model train:make: needs --data MODULE:FUNCTION too"),
        (["--link", "100mbit", "--optimizer", "lion"], "must be sgd or adamw"),
        (["--network", "no.toml"], "no.toml: cannot be read"),
        (["--link", "100mbit", "--workers", "0"], "--workers 0: must be 2 to 4096"),
        (["--link", "100mbit", "--model", "train:make", "--batch-size", "4"], "--data makes the batches"),
        (["--doctor", "x.json", "--batch-size", "4"], "its step was timed already. Give --task too"),
        (["--doctor", "x.json", "--model-size", "6m"], "its step was timed already. Give --task too"),
    ],
)
def test_what_cannot_be_is_refused_in_one_message(
    capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert main(["plan", *options]) == 2
    printed = capsys.readouterr()
    assert words in printed.err and printed.out == "" and "Traceback" not in printed.err


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ('compute = {time = "lognormal(50ms, 0.2)"}', "[compute] time: the step takes what --step-seconds says"),
        ("deaths = [{rank = 1, step = 3}]", "[[deaths]]: a plan is for workers that live"),
        ('pauses = [{rank = 1, at = "2s", for = "1s"}]', "[[pauses]]: a plan is for every step alike"),
        ('compute = {device = "abacus"}', "device='abacus': torch cannot use it here"),
    ],
)
def test_entries_of_a_network_file_that_would_be_ignored_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, entry: str, words: str
) -> None:
    (tmp_path / "network.toml").write_text(entry)
    assert main(["plan", *QUICK, "--network", str(tmp_path / "network.toml"), "--step-seconds", "0.05"]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_an_examination_without_links_is_named_as_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    step = StepTime("mine", [[1000, 1000]], "float32", 4_000_000, 0.02, 0.03, 0.0, [1.0])
    apart = Examination(2, "", {}, [Pair(0, 1, problem="refused")], {}, {0: step})
    for seen, words in (
        (Examination(1, "", {}, steps={0: step}), "one process alone"),
        (apart, "2 ranks, of which none"),
    ):
        path.write_text(json.dumps({**asdict(seen), "findings": [], "strategies": []}))
        assert main(["plan", "--doctor", str(path)]) == 2
        assert f"--doctor {path}: has no link, as it is of {words}" in capsys.readouterr().err


def test_a_file_that_the_doctor_did_not_write_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    path.write_text("{}")
    assert main(["plan", "--doctor", str(path)]) == 2
    assert "is not what thinwire doctor --out writes" in capsys.readouterr().err


def test_a_model_of_functions_is_planned_for_as_it_is_trained(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[2])])
    own = ["--model", "examples.own_task:model", "--data", "examples.own_task:data"]
    options = ["--strategies", "AllReduce()", "--link", "1gbit", "--step-seconds", "0.01"]
    found = planned(capsys, *own, "--loss", "torch.nn.functional:cross_entropy", *options)
    assert found["step"]["name"] == "examples.own_task:model"  # type: ignore
    assert main(["plan", *own[:2], "--loss", "torch.nn.functional:cross_entropy", *options]) == 2
    assert "needs --data MODULE:FUNCTION too" in " ".join(capsys.readouterr().err.split())


def test_a_plan_is_made_from_python() -> None:
    job = StepTime("mine", [[100, 100]], "float32", 40_000, 0.01, 0.02, 0.0, []).job(2, Network(1e5, 1e-3))
    found = decide(job, ["AllReduce()", "AllReduce(codec=Bf16())"])
    assert found.chosen.recipe == "AllReduce(codec=Bf16())" and found.why.startswith("AllReduce() would wait")
    assert json.dumps(found.as_json(), allow_nan=False)
