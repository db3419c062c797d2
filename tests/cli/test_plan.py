# SPDX-License-Identifier: Apache-2.0
"""`thinwire plan`: its table, its picture, its JSON, and what it refuses."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from thinwire.cli import main
from thinwire.cli.network_words import differences, rates_differ
from thinwire.doctor import host
from thinwire.doctor.findings import Examination
from thinwire.doctor.links import Pair
from thinwire.doctor.speeds import StepTime
from thinwire.emulate import parse_links
from thinwire.plan.networks import network_of_links
from thinwire.simulate import Network, Racks, Special
from thinwire.simulate import Pair as Between

QUICK = ["--task", "digits", "--strategies", "AllReduce(); LocalSGD(period=8)"]


def planned(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, object]:
    assert main(["plan", *options, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("load", "told"), [(1.9, False), (2.1, True)])
def test_a_busy_machine_is_told(
    load: float, told: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "load_average", lambda: load)
    monkeypatch.setattr(host, "usable_cores", lambda: 4)
    assert main(["plan", *QUICK, "--link", "300kbit", "--step-seconds", "0.05", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["recommended"] == "LocalSGD(period=8)"
    assert ("a load of 2.1 on 4 cores" in " ".join(printed.err.split())) is told


def test_a_slow_link_gets_a_recipe_that_sends_less_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *QUICK, "--link", "300kbit", "--step-seconds", "0.05"]) == 0
    printed = capsys.readouterr().out
    assert "\nLocalSGD(period=8)\nAllReduce() would wait" in printed
    assert "What would change that: above " in printed and "python -m benchmarks.accuracy" in printed


def test_a_fast_link_gets_all_reduce(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, *QUICK, "--link", "100gbit", "--latency", "10us", "--step-seconds", "0.005")
    assert found["recommended"] == "AllReduce()"
    assert found["crossings"][0]["side"] == "slower"  # type: ignore


ONE_SLOW = [*QUICK, "--link", "100mbit,3:30kbit", "--step-seconds", "0.5"]


def test_a_link_that_differs_is_printed_and_what_would_change_the_choice_is_told_of_all_links(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", *ONE_SLOW]) == 0
    printed = capsys.readouterr().out
    assert "4 workers, 100 Mbit/s, 100 µs one way; rank 3: 30 kbit/s\n" in printed
    assert "What would change that: if all links were " in printed and " times as fast, AllReduce()." in printed
    assert main(["plan", *ONE_SLOW, "--strategies", "AllReduce()"]) == 0
    assert "were all links between 0.100 and 1000 times as fast" in capsys.readouterr().out


def test_json_has_the_links_that_differ_and_the_factor_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, *ONE_SLOW)
    (slow,) = found["workers_that_differ"]  # type: ignore
    assert (slow["ranks"], slow["bits_per_second"]) == ([3], 3e4)
    (crossing,) = found["crossings"]  # type: ignore
    assert crossing["factor"] == pytest.approx(crossing["bits_per_second"] / 1e8)


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


def test_the_step_of_a_model_is_timed_here(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, *QUICK, "--link", "1gbit", "--workers", "2")
    step = found["step"]
    assert isinstance(step, dict) and step["forward"] > 0 and len(step["ready"]) == len(step["shapes"])


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
    assert found["step"]["name"] == "mine" and found["recommended"] == "LocalSGD(period=8)"  # type: ignore
    # Of another number of workers it is not known which are slow, and that is said.
    slow = [replace(pair, **dict.fromkeys(("there", "back", "both", "several"), 1e6)) for pair in pairs[1:]]
    path.write_text(json.dumps({**asdict(replace(seen, pairs=[pairs[0], *slow])), "findings": [], "strategies": []}))
    assert main(["plan", "--doctor", str(path), "--workers", "4", *QUICK[2:]]) == 0
    words = " ".join(capsys.readouterr().err.split())
    assert "--workers 4: the doctor examined 3, of which rank 2: 1" in words and "are taken to be alike" in words


@pytest.mark.slow
def test_a_picture_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    options = ["--link", "100mbit", "--step-seconds", "0.05", "--plot", str(path), "--plot-workers", "4"]
    assert main(["plan", *QUICK, *options]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "no network: give --link 100mbit"),
        (["--link", "100mbit", "--doctor", "x.json"], "--link and --doctor: give one of them"),
        (["--doctor", "no.json"], "no.json: cannot be read"),
        (["--link", "100mbit", "--workers", "1"], "--workers 1: a plan is for 2 to 4096"),
        (["--link", "100mbit", "--step-seconds", "-1"], "--step-seconds -1.0: must be positive"),
        (["--link", "100mbit", "--plot", "plan.txt"], "must end in .png"),
        (
            ["--link", "100mbit", "--plot", f"{__file__}/plan.png"],
            "test_plan.py/plan.png: cannot be written (Not a dir",
        ),
        (["--link", "100mbit", "--plot-workers", "5000"], "--plot-workers 5000: must be 2 to 4096"),
        (["--link", "100mbit", "--strategies", "ddp"], "torch's own method"),
        (["--link", "100mbit", "--strategies", "LocalSDG()"], "LocalSGD"),
        (["--link", "100mbit", "--model", "train:make", "--task", "text"], "instead of --task"),
        (["--link", "100mbit", "--optimizer", "lion"], "must be sgd or adamw"),
        (["--network", "no.toml"], "no.toml: cannot be read"),
        (["--link", "100mbit", "--workers", "0"], "--workers 0: a plan is for 2 to 4096"),
        (["--link", "100mbit", "--model", "train:make", "--batch-size", "4"], "your function makes the batches"),
        (["--link", "100mbit", "--model", "train:make", "--data", "x"], "--data x with --model: your function reads"),
        (["--doctor", "x.json", "--batch-size", "4"], "its step was timed already; give --task too"),
        (["--doctor", "x.json", "--model-size", "6m"], "its step was timed already; give --task too"),
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
        ('compute = {time = "lognormal(50ms, 0.2)"}', "[compute]: the step takes what --step-seconds says"),
        ("deaths = [{rank = 1, step = 3}]", "[[deaths]]: a plan is for workers that live"),
        ('pauses = [{rank = 1, at = "2s", for = "1s"}]', "[[pauses]]: a plan is for every step alike"),
    ],
)
def test_entries_of_a_network_file_that_would_be_ignored_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, entry: str, words: str
) -> None:
    (tmp_path / "network.toml").write_text(entry)
    assert main(["plan", *QUICK, "--network", str(tmp_path / "network.toml"), "--step-seconds", "0.05"]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_picture_that_cannot_be_drawn_is_refused_before_the_plan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "thinwire.report.crossover", None)
    monkeypatch.setattr("thinwire.plan.search.Planner.options", lambda _: pytest.fail("it has begun to plan"))
    options = ["--link", "100mbit", "--step-seconds", "0.05", "--plot", str(tmp_path / "plan.png")]
    assert main(["plan", *QUICK, *options]) == 2
    assert "--plot needs" in capsys.readouterr().err


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
