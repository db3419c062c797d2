"""The claim about arrays of models is judged by its figures, whatever they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from laconic.runs.claims.hfta import CLAIM, LEAST_SPEEDUP, MOST_DIFFERENCE, judge
from laconic.runs.studies.fused_networks import PointClassifier, Workload, clouds, workloads
from laconic.runs.studies.fused_training import WAYS, Pace, curves, largest_difference, main

Found = Mapping[str, Mapping[int, Mapping[str, Pace]]]


def found(fused: float, others: float = 1.0) -> Found:
    """One network whose array is so many times as fast as one process, at eight models."""
    paces = {way: Pace(others, 100) for way in WAYS} | {"array": Pace(fused, 400), "process": Pace(1.0, 100)}
    return {"Net": {1: dict.fromkeys(WAYS, Pace(1.0, 100)), 8: paces}}


def test_a_fast_array_with_the_same_losses_holds() -> None:
    result = judge(found(5.0), {"Net": 1e-5}, {})
    assert result.holds
    assert (result.value, result.least, result.most) == (5.0, 5.0, 5.0)
    assert "x 5.00 one process after another" in result.details["Net, 8 models"]
    assert "memory per model x 0.50" in result.details["Net, 8 models"]
    assert result.details["less than the paper's least"] == "none"


@pytest.mark.parametrize(("fused", "difference"), [(LEAST_SPEEDUP - 0.1, 0.0), (5.0, 2 * MOST_DIFFERENCE)])
def test_a_slow_array_or_other_losses_do_not_hold(fused: float, difference: float) -> None:
    assert not judge(found(fused), {"Net": difference}, {}).holds


def test_an_array_that_another_way_beats_is_named() -> None:
    result = judge(found(3.0, others=4.0), {"Net": 0.0}, {})
    assert result.holds
    assert "Net (x 0.75 of " in result.details["slower than the best other way, at the most models"]


def in_double(workload: Workload) -> Workload:
    """The same in fp64: in fp32 rounding grows from step to step."""

    def batch(number: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        (points,), targets = workload.batch(number)
        return (points.double(),), targets

    return replace(workload, make=lambda: workload.make().double(), batch=batch)


def test_losses_of_an_array_are_those_of_separate_runs() -> None:
    losses = curves(in_double(workloads()["pointnet-cls"]), 2, 2)
    assert largest_difference(losses) < 1e-10
    assert [len(every) for every in losses.values()] == [2, 2]
    losses["array"][1][0] += 0.5
    assert largest_difference(losses) > 0.1


def test_a_way_is_measured_by_models_and_bytes() -> None:
    held = torch.get_num_threads()
    pace = Pace(**json.loads(main(["pointnet-cls", "loop", "2", "0.01", str(held)])))
    assert pace.models_per_second > 0
    assert pace.nbytes > 1 << 20


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
