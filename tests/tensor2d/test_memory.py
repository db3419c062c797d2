# SPDX-License-Identifier: Apache-2.0
"""What a step holds and sends, counted on processes and by the formulas, in one dimension and in two."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch

from reproductions.optimus.costs import Layer, activations_held, most_tokens, parameters_held, step_peak
from reproductions.optimus.meter import Counted
from reproductions.optimus.race import formula_payload_bytes, formula_peak_bytes
from reproductions.optimus.scaling import scaling
from reproductions.optimus.transformer_layers import SCHEMES, Stem
from reproductions.optimus.worker import Race, run
from tests.oracles.tensor2d import drawn
from tests.pool import run_processes
from tests.tensor2d.helpers import run as run_threads
from thinwire.tensor2d import Mesh2D, Panels, multiply_ab, multiply_abt

RACE = Race(Stem(layers=2, hidden=64, heads=4, length=32, sequences=16), rows=2, columns=2, rounds=0)


def counted() -> dict[str, dict[str, Any]]:
    return {scheme: asdict(counts) for scheme, counts in run(RACE).items()}


@pytest.mark.slow
def test_counted_bytes_and_memory_are_those_of_the_formulas_in_one_dimension_and_in_two() -> None:
    found = run_processes(4, counted)
    losses = [found[0][scheme]["loss"] for scheme in SCHEMES]
    assert max(losses) - min(losses) < 1e-5 * max(losses)
    for scheme in SCHEMES:
        for rank in found:
            assert rank[scheme]["payload_bytes"] == pytest.approx(formula_payload_bytes(RACE, scheme), rel=1e-12)
            assert rank[scheme]["peak_bytes"] == pytest.approx(formula_peak_bytes(RACE, scheme), rel=0.1)
    assert found[0]["2d"]["payload_bytes"] < 0.7 * found[0]["1d"]["payload_bytes"]
    assert found[0]["2d"]["peak_bytes"] < 0.7 * found[0]["1d"]["peak_bytes"]


@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (4, 4), (8, 8), (2, 8)])
def test_activations_fall_as_ranks_are_added(shape: tuple[int, int]) -> None:
    rows, columns = shape
    alone = activations_held(Layer(tokens=4096, hidden=512, rows=1, columns=1), 8)
    layer = Layer(tokens=4096, hidden=512, rows=rows, columns=columns)
    statistics = 4 * layer.tokens / rows
    assert activations_held(layer, 8) - statistics == pytest.approx((alone - 4 * 4096) / layer.ranks)
    whole = 4096 * 512
    assert activations_held(layer, 8, scheme="1d") > 4 * whole
    assert 2 * whole < activations_held(layer, 8, scheme="1d+sequence")


def test_a_step_holds_two_copies_of_the_parameters_and_all_activations() -> None:
    layer = Layer(tokens=4096, hidden=512, rows=2, columns=2)
    one, two = (step_peak(layer, layers, 8) for layers in (1, 2))
    assert two - one == pytest.approx(2 * parameters_held(layer) + activations_held(layer, 8))
    assert step_peak(layer, 1, 8, copies=3) - one == pytest.approx(parameters_held(layer))
    assert one - step_peak(layer, 1, 8, ends=False) == 2 * 4096 * 512 / 4


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_largest_batch_is_the_last_that_fits(scheme: Any) -> None:
    layer, limit = Layer(tokens=1, hidden=256, rows=4, columns=4), 1e8
    most = most_tokens(layer, 4, 8, limit, scheme=scheme)

    def held(tokens: int) -> float:
        return 4 * step_peak(Layer(tokens=tokens, hidden=256, rows=4, columns=4), 4, 8, scheme=scheme)

    assert held(most) <= limit < held(most + 1)
    assert most_tokens(layer, 4, 8, 1.0, scheme=scheme) == 0


def test_sixteen_ranks_fit_a_batch_four_times_as_large_and_sixty_four_eight_times() -> None:
    ratios = {row.ranks: row.batch_ratio for row in scaling()}
    assert ratios[16] >= 4
    assert ratios[64] >= 8
    for row in scaling():
        assert row.payload_bytes["2d"] < min(row.payload_bytes["1d"], row.payload_bytes["2d, paper"])


def test_storages_are_counted_once_and_until_their_end() -> None:
    held = torch.zeros(100)
    with Counted([held], ranks=1) as counts:
        x = torch.ones(1000)
        view = x.view(10, 100)[3:]
        assert counts.nbytes == 4 * 1100
        y = x + 1
        del x
        assert counts.nbytes == 4 * 2100  # the view holds on to it
        del view
        assert counts.nbytes == 4 * 1100
        del y
    assert counts.nbytes == 4 * 100
    assert counts.peak_nbytes == 4 * 2100


@pytest.mark.parametrize("multiply", [multiply_ab, multiply_abt])
def test_no_more_than_two_panels_are_there_at_a_time(multiply: Any) -> None:
    size, panels = 128, 32

    def work(mesh: Mesh2D) -> int:
        a, b = drawn(size // 2, size // 2, seed=1), drawn(size // 2, size // 2, seed=2)
        with Counted([a, b], ranks=4) as counts:
            multiply(a, b, mesh, Panels(panels))
        return counts.peak_nbytes

    own, panel = 8 * (size // 2) ** 2, 8 * (size // 2) * (size // panels)
    for peak in run_threads(2, 2, work):
        # Two operands and the result; then, of two panels, what arrived, what was sent, and terms, which threads
        # hold until the slowest has them.
        assert peak <= 3 * own + 12 * panel
