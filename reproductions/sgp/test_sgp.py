# SPDX-License-Identifier: Apache-2.0
"""What the reproduction of stochastic gradient push makes of its runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reproductions.sgp.claim import CLAIM, CONDITIONS, OVERLAP, REFERENCE, SGP, SILENT, Curves, judge
from reproductions.sgp.pictures import loss_picture, pace_picture
from reproductions.shared.curves import Curve, curves_of
from thinwire.runs.comparison import Comparison


def curve(last_loss: float, seconds: float) -> Curve:
    """Three evaluations, evenly in time, the loss falling from 5 along a straight line."""
    return Curve(
        steps=(0, 10, 20),
        seconds=(0.0, seconds / 2, seconds),
        losses=(5.0, (5 + last_loss) / 2, last_loss),
        seconds_per_step=seconds / 20,
        exposed_seconds_per_step=seconds / 40,
        bytes_per_step=2e6,
    )


def curves(loss: float, seconds: float) -> Curves:
    """AllReduce reaches 2.00, and in another round 2.01, in 10 seconds; SGP alike in half of that; and Overlap SGP."""
    return {
        (condition, name): [curve(last, time), curve(last + 0.01, time)]
        for condition in CONDITIONS
        for name, last, time in ((REFERENCE, 2.0, 10.0), (SGP, 2.0, 5.0), (OVERLAP, loss, seconds))
    }


ACCURACIES = {REFERENCE: [0.95, 0.97], SGP: [0.95, 0.95], OVERLAP: [0.96, 0.96], SILENT: [0.8, 0.8]}


@pytest.mark.parametrize(
    ("loss", "seconds", "holds"),
    [
        (2.0, 4.0, True),
        (2.059, 4.0, True),
        (2.07, 4.0, False),
        (1.9, 4.0, True),
        (2.0, 10.0, False),
        (2.03, 9.9, False),
    ],
)
def test_the_claim_holds_where_a_step_teaches_as_much_and_a_second_more(
    loss: float, seconds: float, holds: bool
) -> None:
    result = judge(curves(loss, seconds), ACCURACIES, "100mbit", [])
    assert result.holds is holds
    assert list(result.parts) == list(CLAIM.parts)
    assert result.value == pytest.approx(seconds / 10)
    assert result.least == result.most == result.value


def test_a_loss_beside_the_yardstick_is_told_even_where_the_verdict_is_the_other() -> None:
    details = judge(curves(2.07, 12.0), ACCURACIES, None, ["loss.png"]).details
    assert details[f"{OVERLAP}, one worker 3x slower"] == "NOT level per step, ahead per second in 0 of 2 rounds"
    assert details[f"{SGP}, all workers alike"] == "level per step, ahead per second in 2 of 2 rounds"
    assert REFERENCE in details["better than Overlap SGP after the same steps"]
    assert details["pictures"] == "![loss.png](loss.png)"
    assert details["all workers alike: AllReduce"] == (
        "500 ms a step, of which 250 ms waiting; 2.00 MB sent; held-out loss 2.0050 (2.0000 to 2.0100)"
    )


def test_rounds_that_differ_are_noise_and_unlike_data_decide_where_silence_loses() -> None:
    mixed = curves(2.0, 4.0)
    mixed["all workers alike", OVERLAP][1] = curve(2.02, 10.5)
    result = judge(mixed, ACCURACIES, None, [])
    assert result.parts["Overlap SGP: per second"] == "within noise"
    worse = judge(curves(2.0, 4.0), {**ACCURACIES, SGP: [0.9, 0.9]}, None, [])
    assert worse.parts["SGP: unlike data"] == "does not hold"
    easy = judge(curves(2.0, 4.0), {**ACCURACIES, SILENT: [0.95, 0.95]}, None, [])
    assert easy.parts["SGP: unlike data"] == "cannot be decided here"


def test_a_loss_between_evaluations_lies_on_the_line_between_them() -> None:
    found = curve(3.0, 8.0)
    assert [found.loss_at(seconds) for seconds in (-1.0, 0.0, 2.0, 6.0, 8.0, 99.0)] == [5.0, 5.0, 4.5, 3.5, 3.0, 3.0]


def test_curves_are_read_from_the_folders_of_a_comparison(tmp_path: Path) -> None:
    names = {"AllReduce": ["AllReduce", "AllReduce.2"], "PushSum": ["PushSum", "PushSum.2"]}
    (tmp_path / "comparison.json").write_text(json.dumps({"rounds": names}))
    for number, name in enumerate(name for rounds in names.values() for name in rounds):
        lines = [
            {"step": 0, "seconds": 0.0, "eval_loss": 5.0},
            {"step": 1, "seconds": 0.5, "loss": 4.0},
            {"step": 1, "seconds": 0.5, "eval_loss": 4.0 - number},
        ]
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {"seconds_per_step": 0.5, "exposed_seconds_per_step": 0.1, "payload_bytes_per_worker_per_step": 8}
    done = Comparison(tmp_path, ("AllReduce()", "PushSum()"), ((summary, summary), (summary, summary)))
    found = curves_of(done)
    assert [[each.last_loss for each in rounds] for rounds in found] == [[4.0, 3.0], [2.0, 1.0]]
    assert found[0][0] == Curve((0, 1), (0.0, 0.5), (5.0, 4.0), 0.5, 0.1, 8.0)


def test_both_pictures_show_every_method_under_both_conditions(tmp_path: Path) -> None:
    for picture in (loss_picture(curves(2.0, 4.0)), pace_picture(curves(2.0, 4.0))):
        assert len(picture.figure.axes) == len(CONDITIONS)
        assert all(name in picture.description for name in (REFERENCE, SGP, OVERLAP))
        assert picture.png(tmp_path).read_bytes().startswith(b"\x89PNG")
