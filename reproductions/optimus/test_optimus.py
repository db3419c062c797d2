# SPDX-License-Identifier: Apache-2.0
"""The verdict on tensor parallelism in two dimensions is computed from the figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reproductions.optimus import claim as optimus
from reproductions.optimus.claim import CLAIM, judge
from reproductions.optimus.race import Finish, formula_payload_bytes, formula_peak_bytes
from reproductions.optimus.scaling import scaling
from reproductions.optimus.transformer_layers import SCHEMES, Scheme, Stem
from reproductions.optimus.worker import Counts, Race
from reproductions.shared.claims import Attempt, Result

RACE = Race(Stem(2, 256, 4, 64, 32), 2, 2, rounds=3, product=64)
SECONDS: dict[Scheme, list[float]] = {"1d": [1.0, 1.1, 1.2], "1d+sequence": [0.9, 1.0, 1.1], "2d": [0.7, 0.8, 0.9]}


def finish(race: Race = RACE, **changes: Any) -> Finish:
    """A race as the formulas and the paper would have it, but for `changes` of two dimensions' counts."""
    counts: dict[Scheme, list[Counts]] = {}
    for scheme in SCHEMES:
        payload, peak = formula_payload_bytes(race, scheme), round(formula_peak_bytes(race, scheme))
        each = Counts(payload, peak, 2.0, SECONDS[scheme])
        counts[scheme] = [replace(each, **(changes if scheme == "2d" else {}))] * (race.rows * race.columns)
    return Finish(race, counts, {"hidden": [(0.1, 1.0)] * 3, "exposed": [(0.4, 1.3)] * 3})


def judged(*finishes: Finish) -> Result:
    return judge(finishes, scaling(), "1gbit", [])


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
    assert judge([finish()], few, None, []).parts["batch at 16 ranks"] == "does not hold"


def test_time_at_sixteen_ranks_is_not_judged() -> None:
    wide = finish(replace(RACE, rows=4, columns=4), seconds=[9.0, 9.0, 9.0])
    assert others_hold(judged(finish(), wide))


def test_a_check_draws_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    begun: list[str] = []
    monkeypatch.setattr(optimus, "run_race", lambda race, link: finish(race))
    attempt = Attempt(tmp_path, quick=True, listener=lambda _: None, begin=lambda what, _: begun.append(what))
    result = CLAIM.run(attempt)
    assert others_hold(result)
    assert begun == ["2x2, 2 layers of 256, 2048 tokens"]
    assert {path.name for path in tmp_path.iterdir()} == {"race.png", "scaling.png"}
