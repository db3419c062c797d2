# SPDX-License-Identifier: Apache-2.0
"""The verdict on tensor parallelism in two dimensions is computed from the figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from reproductions.optimus import claim as optimus
from reproductions.optimus import worker
from reproductions.optimus.claim import CLAIM, judge
from reproductions.optimus.race import Finish, formula_inference_bytes, formula_payload_bytes, formula_peak_bytes
from reproductions.optimus.scaling import row_of, scaling
from reproductions.optimus.transformer_layers import SCHEMES, Scheme, Stem
from reproductions.optimus.worker import Counts, Race
from reproductions.shared.claims import Attempt, Result
from thinwire.tensor2d.panels import Panels

RACE = Race(Stem(2, 256, 4, 64, 32), 2, 2, rounds=3, product=64)
SECONDS: dict[Scheme, list[float]] = {"1d": [1.0, 1.1, 1.2], "1d+sequence": [0.9, 1.0, 1.1], "2d": [0.7, 0.8, 0.9]}


def finish(race: Race = RACE, **changes: Any) -> Finish:
    """A race as the formulas and the paper would have it, but for `changes` of two dimensions' counts."""
    counts: dict[Scheme, list[Counts]] = {}
    for scheme in SCHEMES:
        payload, peak = formula_payload_bytes(race, scheme), round(formula_peak_bytes(race, scheme))
        inferred = formula_inference_bytes(race, scheme)
        each = Counts(payload, peak, 2.0, SECONDS[scheme], inferred, peak // 2, [s / 3 for s in SECONDS[scheme]])
        counts[scheme] = [replace(each, **(changes if scheme == "2d" else {}))] * (race.rows * race.columns)
    return Finish(race, counts, {"hidden": [(0.1, 1.0)] * 3, "exposed": [(0.4, 1.3)] * 3})


def judged(*finishes: Finish) -> Result:
    return judge(finishes, scaling(), "1gbit")


def test_figures_as_the_formulas_have_them_make_the_claim_hold() -> None:
    result = judged(finish())
    assert result.verdict.endswith("; speed at 64 ranks: cannot be decided here")
    assert others_hold(result)
    assert (result.least, result.most) == (0.7, 0.75)
    assert "0.65x the bytes" in result.measured


def others_hold(result: Result) -> bool:
    """Whether all parts hold that can be decided here."""
    return all(outcome == "holds" for name, outcome in result.parts.items() if name != "speed at 64 ranks")


PEAK = formula_peak_bytes(RACE, "2d")


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"loss": 2.1}, "the same model"),
        ({"payload_bytes": formula_payload_bytes(RACE, "2d") + 4}, "bytes"),
        ({"payload_bytes": 2e9}, "bytes"),
        ({"inference_payload_bytes": formula_inference_bytes(RACE, "2d") + 4}, "bytes of inference"),
        ({"inference_payload_bytes": 2e9}, "bytes of inference"),
        ({"peak_bytes": round(1.11 * PEAK)}, "memory"),
        ({"peak_bytes": round(0.89 * PEAK)}, "memory"),
        ({"peak_bytes": 10**12}, "memory"),
        ({"seconds": [1.3, 1.4, 1.5]}, "time at 4 ranks"),
    ],
)
def test_each_figure_can_refute_it(changes: dict[str, Any], verdict: str) -> None:
    result = judged(finish(**changes))
    assert result.parts[verdict] == "does not hold"


def test_overlap_that_hides_less_than_half_refutes_it() -> None:
    result = judged(replace(finish(), waits={"hidden": [(0.25, 1.0)] * 3, "exposed": [(0.4, 1.0)] * 3}))
    assert result.parts["hidden wait"] == "does not hold"


def test_rounds_that_differ_about_the_time_are_noise() -> None:
    assert judged(finish(seconds=[0.95, 1.01, 1.2])).parts["time at 4 ranks"] == "within noise"


def test_a_batch_that_is_not_four_times_as_large_refutes_it() -> None:
    rows = scaling(limit_nbytes=1e12)
    few = [replace(row, most_tokens={**row.most_tokens, "2d": row.most_tokens["1d"]}) for row in rows]
    parts = judge([finish()], few, None).parts
    assert parts["batch at 16 ranks"] == parts["batch at 64 ranks"] == "does not hold"


def test_the_paper_s_batch_at_64_ranks_is_asked_for_at_both_of_its_widths() -> None:
    strong = row_of(64, 3072, 64)
    assert judge([finish()], [*scaling(), strong], None).parts["batch at 64 ranks"] == "holds"
    few = replace(strong, most_tokens={**strong.most_tokens, "2d": 7 * strong.most_tokens["1d"]})
    assert judge([finish()], [*scaling(), few], None).parts["batch at 64 ranks"] == "does not hold"


def test_the_paper_s_table_is_told_beside_the_formulas() -> None:
    told = judged(finish()).details["the paper's weak scaling, 64 GPUs"]
    assert [round(each, 2) for each in told.values()][:3] == [12.8, 1.48, 1.79]
    assert told["by formula: largest batch without recomputation, which the paper has"] == pytest.approx(15.7, abs=0.05)


def test_overlap_takes_turns_with_none_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    ways: list[bool] = []

    def multiplied(a: Tensor, b: Tensor, mesh: object, panels: Panels) -> Tensor:
        ways.append(panels.overlap)
        return a @ b

    monkeypatch.setattr(worker, "multiply_ab", multiplied)
    monkeypatch.setattr(worker, "_exposed", lambda mesh: 0.0)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    found = worker.waits(SimpleNamespace(rows=1, columns=1), 4, 2, rounds=3)  # type: ignore[arg-type]
    assert ways == [True, False, False, True] * 2
    assert {way: len(each) for way, each in found.items()} == {"hidden": 3, "exposed": 3}


def test_time_at_sixteen_ranks_is_not_judged() -> None:
    wide = finish(replace(RACE, rows=4, columns=4), seconds=[9.0, 9.0, 9.0])
    assert others_hold(judged(finish(), wide))


def test_a_check_draws_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    begun: list[str] = []
    monkeypatch.setattr(optimus, "run_race", lambda race, link: finish(race))
    attempt = Attempt(tmp_path, quick=True, listener=lambda _: None, on_begin=lambda what, _: begun.append(what))
    result = CLAIM.run(attempt)
    assert others_hold(result)
    assert begun == ["2x2, 2 layers of 256, 2048 tokens"]
    assert {path.name for path in tmp_path.iterdir()} == {"race.png", "scaling.png"}
