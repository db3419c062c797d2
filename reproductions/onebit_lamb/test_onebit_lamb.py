# SPDX-License-Identifier: Apache-2.0
"""1-bit LAMB in whole runs: its optimizers by name, and what its claim makes of a run's records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from reproductions.onebit_lamb.claim import (
    ALONE,
    DDP,
    FORGETFUL,
    OURS,
    POWER,
    QUICK,
    Scale,
    judge,
    warm_up,
)
from reproductions.onebit_lamb.stages import stages_of, step_seconds, volume_by_formula
from reproductions.shared.claims import claim
from tests.engine import net
from thinwire.lab.runs import Comparison, Settings
from thinwire.lab.runs.optimizer import make_optimizer
from thinwire.methods.optimizers.lamb import Lamb
from thinwire.methods.optimizers.one_bit_adam import OneBitAdam
from thinwire.methods.optimizers.one_bit_lamb import OneBitLamb


@pytest.mark.parametrize(("name", "kind"), [("lamb", Lamb), ("onebit-lamb", OneBitLamb), ("onebit-adam", OneBitAdam)])
def test_runs_know_the_optimizers_by_name(name: str, kind: type) -> None:
    settings = Settings("text", "0.5m", "AllReduce()", steps=1, optimizer=name, lr=0.25, weight_decay=0.5)
    optimizer = make_optimizer(net(), settings)
    assert type(optimizer) is kind
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (0.25, 0.5)


def recorded(folder: Path, steps: int, warm_steps: int, paces: Sequence[Sequence[float]] = ((1,),)) -> Comparison:
    """A comparison of strategies: 100 bytes and 4 s a step at first, 3 bytes and these seconds later, in each round."""
    names = {f"run{place}": [f"run{place}.{number}" for number in range(len(each))] for place, each in enumerate(paces)}
    folder.mkdir(exist_ok=True)
    (folder / "comparison.json").write_text(json.dumps({"rounds": names}))
    for name, seconds in zip(chain(*names.values()), chain(*paces), strict=True):
        home = folder / name
        home.mkdir()
        lines: list[dict[str, float]] = [{"step": 0, "eval_loss": 5.0}]
        for step in range(1, steps + 1):
            payload = 100 * min(step, warm_steps) + 3 * max(0, step - warm_steps)
            pace = 4 if step <= warm_steps else seconds
            lines.append({"step": step, "loss": 1.0, "payload_bytes": payload, "step_seconds": pace})
        lines.append({"step": steps, "seconds": 1.0, "eval_loss": 2.0})
        lines[0]["seconds"] = 0.0
        (home / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    figures = ("seconds_per_step", "exposed_seconds_per_step", "payload_bytes_per_worker_per_step")
    summary: dict[str, Any] = dict.fromkeys(figures, 1.0)
    summaries = tuple((summary,) * len(each) for each in paces)
    return Comparison(folder, tuple(names), summaries)


def test_stages_are_told_apart_in_bytes_and_seconds(tmp_path: Path) -> None:
    done = recorded(tmp_path, 12, 2)
    (stages,) = stages_of(done, 0, 2)
    assert (stages.warm_bytes, stages.coded_bytes, stages.coded_volume) == (100, 3, 100 / 3)
    assert (stages.warm_seconds, stages.coded_seconds) == (4, 1)
    assert stages.volume == pytest.approx(volume_by_formula(2 / 12, 100 / 3))
    assert step_seconds(done, 0, 2) == [1]


# A step without communication, DDP's, DDP's with PowerSGD, and 1-bit LAMB's, in three rounds.
PACES = ((1.0, 1.0, 2.0), (8.0, 8.0, 16.0), (2.0, 2.0, 4.0), (1.2, 1.25, 2.2))
LATE = (*PACES[:3], (1.2, 1.4, 2.8))
LATER = (*PACES[:3], (1.4, 1.4, 2.8))


@pytest.mark.parametrize(
    ("slow", "fast", "outcomes"),
    [
        (PACES, PACES, ("holds", "holds")),
        (LATE, PACES, ("within noise", "holds")),
        (LATER, PACES, ("does not hold", "holds")),
        (PACES, PACES[:1] * 4, ("holds", "does not hold")),
    ],
)
def test_steps_are_compared_within_rounds_and_every_round_counts(
    slow: Sequence[Sequence[float]], fast: Sequence[Sequence[float]], outcomes: tuple[str, str], tmp_path: Path
) -> None:
    scale = replace(Scale(), steps=12, timed_steps=12)
    learned = recorded(tmp_path / "learning", 12, 2, ((1,), (1,), (1,)))
    timed = {link: recorded(tmp_path / link, 12, 2, each) for link, each in (("100mbit", slow), ("1gbit", fast))}
    found = judge(learned, timed, scale)
    assert (found.parts["slow link"], found.parts["fast link"]) == outcomes
    if found.holds:
        assert "over 100mbit a step takes 1.20 times one without communication" in found.measured
        assert found.details["over 100mbit, by round: of a step without communication"] == "1.20, 1.25, 1.10"
        assert found.details["over 1gbit, by round: times faster than DDP"] == "6.67, 6.40, 7.27"


def test_the_quick_form_tells_its_pace_without_ddp_s(tmp_path: Path) -> None:
    scale = replace(QUICK, steps=12, timed_steps=12)
    learned = recorded(tmp_path / "learning", 12, 2, ((1,), (1,), (1,)))
    timed = {"100mbit": recorded(tmp_path / "100mbit", 12, 2, (PACES[0], PACES[-1]))}
    found = judge(learned, timed, scale)
    assert (found.parts["slow link"], found.parts["fast link"]) == ("holds", "cannot be decided here")
    assert "DDP" not in found.measured + str(found.details)


def test_a_loss_that_is_too_high_or_bytes_that_are_too_many_do_not_hold(tmp_path: Path) -> None:
    learned = recorded(tmp_path / "learning", 12, 2, ((1,), (1,), (1,)))
    found = judge(learned, {}, replace(Scale(), steps=12))
    assert found.verdict.startswith("holds in part: loss, payload; slow link: cannot be decided here")
    lines = (tmp_path / "learning" / "run1.0" / "metrics.jsonl").read_text()
    (tmp_path / "learning" / "run1.0" / "metrics.jsonl").write_text(
        lines.replace('"eval_loss": 2.0', '"eval_loss": 2.1')
    )
    assert judge(learned, {}, replace(Scale(), steps=12)).parts["loss"] == "does not hold"
    (tmp_path / "learning" / "run1.0" / "metrics.jsonl").write_text(
        lines.replace('"payload_bytes": 230', '"payload_bytes": 250')
    )
    assert judge(learned, {}, replace(Scale(), steps=12)).parts["payload"] == "does not hold"


def test_runs_that_diverge_are_told_and_such_a_seed_of_1_bit_lamb_does_not_hold(tmp_path: Path) -> None:
    scale = replace(Scale(), steps=12)
    learned = recorded(tmp_path / "learning", 12, 2, ((1, 1), (1, 1), (1, 1)))
    ended = learned.rounds[0][0]
    lost = {**ended, "steps": 9, "seconds": 9.0, "diverged": "step 9: the gradient is NaN"}
    found = judge(replace(learned, rounds=(*learned.rounds[:2], (lost, lost))), {}, scale)
    assert (found.parts["loss"], found.details[f"held-out loss, {FORGETFUL}"]) == ("holds", "2 of 2 diverged")
    found = judge(replace(learned, rounds=(learned.rounds[0], (ended, lost), (ended, ended))), {}, scale)
    assert (found.parts["loss"], found.details[f"held-out loss, {OURS}"]) == (
        "does not hold",
        "2.0000, 1 of 2 diverged",
    )


def test_the_paper_s_volume_follows_from_its_warm_up_and_bf16_gradients() -> None:
    assert volume_by_formula(1000 / 5993, 16) == pytest.approx(4.57, abs=0.01)
    assert volume_by_formula(1.0, 31) == 1


def test_the_claim_is_found_by_its_name_and_warms_up_for_a_sixth() -> None:
    assert claim("onebit-lamb").name == "onebit-lamb"
    assert [warm_up(steps) for steps in (600, 120, 30, 6)] == [100, 20, 5, 2]


def test_torch_s_own_methods_stand_between_silence_and_ours() -> None:
    assert Scale().timed == (ALONE, DDP, POWER, OURS)
    assert QUICK.timed == (ALONE, OURS)
