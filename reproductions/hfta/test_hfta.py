# SPDX-License-Identifier: Apache-2.0
"""The claim about arrays of models is judged by its figures, whatever they are."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from reproductions.hfta import gpu, on_gpu
from reproductions.hfta.bytes import ByteCounter
from reproductions.hfta.claim import CLAIM, LEAST_SPEEDUP, judge
from reproductions.hfta.losses import in_double, largest, losses, nudged
from reproductions.hfta.networks import PointClassifier
from reproductions.hfta.on_gpu import in_turns_on_gpu, stays
from reproductions.hfta.training import WAYS, Pace, Paces, Step, forked, in_turns, made, main, measure, ratios
from reproductions.hfta.workloads import clouds, paper_workloads, workloads
from thinwire import ThinwireError
from thinwire.arrays.fusion import autotune, autotune_cache

pytestmark = pytest.mark.usefixtures("fresh_autotune_cache")


def found(fused: float, others: float = 1.0) -> Paces:
    """One network whose array is so many times as fast as one process, at eight models and in each of three rounds."""
    paces = {way: Pace(others, 100) for way in WAYS} | {"array": Pace(fused, 400), "process": Pace(1.0, 100)}
    # In the second round the machine is ten times as fast; in the third twice, and for the array four times.
    rounds = {way: [pace, replace(pace, models_per_second=10 * pace.models_per_second)] for way, pace in paces.items()}
    third = {way: replace(pace, models_per_second=2 * pace.models_per_second) for way, pace in paces.items()}
    third["array"] = replace(paces["array"], models_per_second=4 * fused)
    return {"Net": {1: {way: [Pace(1.0, 100)] for way in WAYS}, 8: {way: [*rounds[way], third[way]] for way in WAYS}}}


def apart(exact: float) -> Mapping[str, float]:
    """Losses so far apart in fp64; in fp32 rounding may do what it does."""
    return {"fp64": exact, "rounding in fp64": 2e-13, "fp32": 0.24, "rounding": 0.3}


def test_a_fast_array_with_the_same_losses_holds() -> None:
    result = judge({}, found(5.0), {"Net": apart(1e-13)}, {})
    assert result.verdict == "holds in part: same losses; speed: cannot be decided here"
    assert (result.value, result.least, result.most) == (5.0, 5.0, 5.0)
    assert "x 5.00 (5.00 to 10.00) one process after another" in result.details["Net, 8 models"]
    assert "x 1.00 one process after another" in result.details["Net, 1 models"]
    assert "memory per model x 0.50" in result.details["Net, 8 models"]
    assert result.details["less than the paper's least"] == "none"
    words = result.details["Net, largest difference of the loss curves"]
    assert "1e-13 of the first loss in fp64" in words and "differ by 2e-13; 0.24 in fp32" in words and "0.3" in words


@pytest.mark.parametrize(
    ("fused", "difference"),
    [(LEAST_SPEEDUP - 0.1, 0.0), (5.0, 11 * 2e-13), (5.0, math.nan)],
)
def test_other_losses_do_not_hold_and_a_processor_s_speed_decides_nothing(fused: float, difference: float) -> None:
    result = judge({}, found(fused), {"Net": apart(difference)}, {})
    assert result.parts == {
        "same losses": "does not hold" if difference else "holds",
        "speed": "cannot be decided here",
    }
    assert result.details["less than the paper's least"] == ("Net" if fused < LEAST_SPEEDUP else "none")
    assert result.details["other losses than separate runs, in fp64"] == ("Net" if difference else "none")


@pytest.mark.parametrize(("fused", "outcome"), [(2.5, "holds"), (2.0, "within noise"), (1.0, "does not hold")])
def test_on_a_gpu_every_round_of_every_network_decides(fused: float, outcome: str) -> None:
    # In its third round the network of `found` gains twice as much as in the others.
    own = found(fused) | {"Fast": found(9.0)["Net"]}
    result = judge(own, found(1.0), {"Net": apart(0.0)}, {}, "cuda")
    assert result.parts["speed"] == outcome
    assert judge({}, own, {"Net": apart(0.0)}, {}, "cuda").parts["speed"] == "cannot be decided here"


def test_networks_of_the_paper_have_as_many_parameters_as_published() -> None:
    counts = {name: sum(p.numel() for p in each.make().parameters()) for name, each in paper_workloads(0.01).items()}
    published = {
        # Sums over the layers of Qi et al. (2017), of Radford et al. (2016) and of Howard et al. (2019), table 1.
        "paper-pointnet-cls": 3.47e6,
        "paper-dcgan": 3.58e6 + 2.77e6,
        "paper-resnet18": 11.17e6,
        "paper-mobilenet": 4.2e6,
        # Two tables of 33,278 words and 128 features, and two small layers.
        "paper-transformer": 2 * 33278 * 128 + 33278 + 0.2e6,
    }
    for name, number in published.items():
        assert counts[name] == pytest.approx(number, rel=0.01), name


@pytest.mark.parametrize("name", paper_workloads())
def test_a_network_of_the_paper_is_the_same_as_an_array(name: str) -> None:
    workload = paper_workloads(0.01)[name]
    if "pointnet" in name:
        workload = replace(workload, batch=partial(clouds, parts=name.endswith("seg"), samples=2, points=32))
    told = largest({"Net": losses(workload, 2, 2)})["Net"]
    assert told["fp64"] < 1e-9


def test_an_array_that_another_way_beats_is_named() -> None:
    result = judge({}, found(3.0, others=4.0), {"Net": apart(0.0)}, {})
    assert "Net (x 0.75 of " in result.details["slower than the best other way, at the most models"]


def test_losses_of_an_array_are_those_of_separate_runs_but_for_rounding() -> None:
    workload = workloads()["pointnet-cls"]
    found = losses(workload, 2, 3)
    assert [len(every) for every in (found.array, found.separate, found.nudged, found.short_nudged)] == [3] * 4
    told = largest({"Net": found})["Net"]
    assert told["fp64"] < 1e-10
    # Adam divides by gradients that are nothing but rounding where a norm follows a bias, and fp32 shows it.
    assert 1e-9 < told["fp32"] < 0.1 and 1e-9 < told["rounding"] < 0.1
    other = replace(found, array=[list(each) for each in found.separate])
    other.array[1][0] += 0.5  # type: ignore[index]
    assert other.difference.tolist()[0] == 0 and other.difference[1] > 0.1
    assert torch.equal(other.short_drift, found.short_drift)


def test_parameters_are_moved_by_one_rounding() -> None:
    workload = workloads()["pointnet-cls"]
    for before, after in zip(made(workload, 2), nudged(workload, 2), strict=True):
        for a, b in zip(before.parameters(), after.parameters(), strict=True):
            up, down = (torch.nextafter(a, torch.full_like(a, end)) for end in (torch.inf, -torch.inf))
            assert ((b == up) | (b == down)).all()
        moved = torch.cat([(b > a).flatten() for a, b in zip(before.parameters(), after.parameters(), strict=True)])
        assert 0.4 < moved.double().mean() < 0.6


def test_a_workload_in_double_is_the_same_in_double() -> None:
    workload = workloads()["pointnet-seg"]
    (points,), (parts,) = in_double(workload).batch(3)
    (short,), (same,) = workload.batch(3)
    assert points.dtype == torch.float64 and torch.equal(points.float(), short) and torch.equal(parts, same)
    assert {p.dtype for p in in_double(workload).make().parameters()} == {torch.float64}


def test_a_way_is_measured_by_models_and_bytes() -> None:
    pace = forked(partial(measure, "pointnet-cls", "loop", 2, 0.01, 1))
    assert pace.models_per_second > 0
    assert pace.nbytes > 1 << 20


def test_ways_take_turns_round_by_round_each_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*given: object) -> Pace:
        assert (given[0], *given[2:]) == ("net", 4, 0.5, 2)
        return Pace(list(WAYS).index(str(given[1])), os.getpid())

    monkeypatch.setattr("reproductions.hfta.training.measure", measured)
    turns = [json.loads(line) for line in main(["net", "4", "0.5", "2", "2"])]
    assert [way for turn in turns for way in turn] == [*WAYS, *reversed(WAYS)]
    assert all(pace["models_per_second"] == list(WAYS).index(way) for turn in turns for way, pace in turn.items())
    processes = {pace["nbytes"] for turn in turns for pace in turn.values()}
    assert len(processes) == len(turns) and os.getpid() not in processes


def test_turns_are_collected_by_way_and_round() -> None:
    paces = in_turns("pointnet-cls", 1, 0.01, 1, rounds=2)
    assert list(paces) == list(WAYS)
    assert all(pace.models_per_second > 0 for each in paces.values() for pace in each)
    assert {len(each) for each in paces.values()} == {2}


def test_processes_that_stay_take_their_turns() -> None:
    # As on a GPU, without one.
    rounds = {"pointnet-cls": {1: 1, 2: 2}, "transformer": {2: 1}}
    found = in_turns_on_gpu(rounds, 0.01, "cpu")
    assert {name: list(sizes) for name, sizes in found.items()} == {name: list(each) for name, each in rounds.items()}
    for name, sizes in found.items():
        for size, paces in sizes.items():
            assert list(paces) == list(WAYS)
            assert {len(each) for each in paces.values()} == {rounds[name][size]}
            assert all(pace.models_per_second > 0 for each in paces.values() for pace in each)


@pytest.mark.parametrize("way", ["captured", "array on device", "process", "array", "captured, channels last"])
def test_a_cell_of_the_gpu_s_protocol_is_measured(way: str) -> None:
    line = gpu.Ways("cpu", 0.01, 2).cell("dcgan", "tf32", way)
    assert line["models"] == (2 if way.startswith("array") else 1) and line["models_per_s"] > 0
    assert (way == "captured") == ("flops" in line)
    if way == "captured":
        assert line["flops"] > 1e6 and line["bytes"] > 1e5


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_cells_that_fail_are_lines_and_others_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = [("transformer", "tf32", "processes"), ("no-such-network", "bf16", "captured"), ("dcgan", "tf32", "array")]
    monkeypatch.setattr(gpu, "cells", lambda only: every)
    monkeypatch.setattr(gpu, "_CELL_SECONDS", 240.0)
    path = tmp_path / "out.jsonl"
    with path.open("w") as out:
        lines = gpu.run(out, 300, device="cpu", models=2, seconds=0.01)
    assert [json.loads(line) for line in path.read_text().splitlines()] == lines
    assert [line["way"] for line in lines] == ["peaks", "processes", "processes captured", "captured", "array"]
    assert "KeyError" in lines[3]["error"] and not any("error" in line for line in lines if line is not lines[3])
    with path.open("w") as out:
        lines = gpu.run(out, -1.0, device="cpu", models=2, seconds=0.01)
    assert [line.get("error") for line in lines[1:]] == ["no time was left"] * 3


def test_ratios_and_shares_of_the_peaks_are_in_the_table() -> None:
    cell = {"name": "paper-resnet18", "precision": "bf16"}
    lines = [
        {"way": "peaks", "flops bf16": 1e15, "flops tf32": 5e14, "bytes": 3e12},
        {**cell, "way": "captured", "models_per_s": 200.0, "flops": 2e12, "bytes": 3e9},
        {**cell, "way": "array on device", "models_per_s": 300.0},
        {**cell, "way": "process", "models_per_s": 100.0},
        {**cell, "way": "array", "models_per_s": 250.0},
        {"name": "dcgan", "precision": "tf32", "way": "array on device", "models_per_s": 9.0},
        {"name": "dcgan", "precision": "tf32", "way": "processes", "models_per_s": 3.0},
        {"name": "dcgan", "precision": "tf32", "way": "processes captured", "error": "no result within 60 s"},
    ]
    table = gpu.table(lines)
    assert "| paper-resnet18 | bf16 | 2.50 | 1.50 | 60 %, 40 % | 30 %, 20 % |" in table
    assert "| dcgan | 3.00 | - |" in table
    assert [each[:2] for each in gpu.cells(["dcgan"])] == [("dcgan", "tf32")] * 4


def test_bytes_are_those_that_operations_read_and_write() -> None:
    x, row = torch.zeros(10, 10), torch.zeros(10)
    with ByteCounter() as moved:
        x.view(100)[:50].t()
    assert moved.nbytes == 0
    with ByteCounter() as moved:
        x.add_(row.expand(10, 10))  # x is read and written, the row is there once
    assert moved.nbytes == 400 + 40 + 400


class Fails:
    """Ends when it is told to."""

    def end(self) -> None:
        os._exit(1)


def test_a_process_that_stays_and_fails_is_told_of() -> None:
    with pytest.raises(ThinwireError, match=r"no-such-network:1:1: the process ended without a result[^$]*KeyError"):
        in_turns_on_gpu({"no-such-network": {1: 1}}, 0.01, "cpu")
    with pytest.raises(ThinwireError, match="ended without a result"), stays(Fails) as process:
        process.call("end")


def test_a_way_beside_the_array_may_fail_and_neither_the_array_nor_a_process_by_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> Step:
        raise RuntimeError("no such operation")

    four = on_gpu._Four(0.01, "cpu")
    monkeypatch.setattr(on_gpu, "STEPS", {"vmap": fails})
    four.make("pointnet-cls", 2)
    assert four.turn("vmap") == {"models_per_second": 0.0, "nbytes": 0}
    assert "no such operation" in capsys.readouterr().err
    for way in ("array", "process"):
        monkeypatch.setattr(on_gpu, "STEPS", {way: fails})
        with pytest.raises(RuntimeError, match="no such operation"):
            four.make("pointnet-cls", 2)


def test_a_way_that_fails_is_infinitely_slow() -> None:
    paces = {"array": [Pace(3.0, 1), Pace(3.0, 1)], "vmap": [Pace(0.0, 1), Pace(2.0, 1)]}
    assert ratios(paces, "array", "vmap") == [math.inf, 1.5]
    own = found(3.0)
    rounds = own["Net"][8] | {"vmap": [Pace(0.0, 0)] * 3}
    result = judge({"Net": {8: rounds}}, {}, {"Net": apart(0.0)}, {}, "cuda")
    assert "torch.func.vmap failed, x 3.00" in result.details["Net, 8 models"]


def test_what_a_forked_process_measured_is_known_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(autotune.DETERMINISTIC, raising=False)
    assert not autotune_cache.cache_path().exists()
    forked(partial(measure, "pointnet-cls", "array", 2, 0.01, 1))
    assert json.loads(autotune_cache.cache_path().read_text())


def test_a_process_that_fails_is_told_of_and_one_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ThinwireError, match="ended without a result"):
        forked(lambda: Pace(1.0))  # type: ignore[call-arg]
    with pytest.raises(ThinwireError, match=r"no-such-network 1 0\.01 1 1: the process ended without a result"):
        in_turns("no-such-network", 1, 0.01, 1, rounds=1)
    monkeypatch.setattr("reproductions.hfta.training._TIMEOUT_SECONDS", 0.05)
    start = time.monotonic()
    with pytest.raises(ThinwireError, match=r"no result within 0\.05 s"):
        forked(lambda: time.sleep(600) or Pace(1.0, 1))
    assert time.monotonic() - start < 60


def test_points_of_a_cloud_lie_on_its_surface() -> None:
    (points,), (kinds,) = clouds(0, parts=False)
    assert kinds.tolist() == [0, 1, 2, 3] * 2
    radii = points[0].norm(dim=0)
    torch.testing.assert_close(radii, radii[:1].expand_as(radii))
    _, (parts,) = clouds(0, parts=True)
    assert torch.equal(parts // 2, kinds.unsqueeze(1).expand_as(parts))
    assert PointClassifier()(points).shape == (8, 4)


def test_the_claim_says_whose_it_is() -> None:
    assert (CLAIM.name, "2102.02344" in CLAIM.paper) == ("hfta", True)
