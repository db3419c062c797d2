# SPDX-License-Identifier: Apache-2.0
"""Comparisons of several rounds: the seed of each, and one row of figures over the same seeds for each strategy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from thinwire.cli.compare import show
from thinwire.errors import NonFiniteError
from thinwire.lab.report import read, rows
from thinwire.lab.runs import RunFolder, Settings, resolve
from thinwire.lab.runs.comparison import Comparison, compare

NAMES = ("ddp", "LocalSGD(period=4)")
# Of each seed from 5: the seconds of a step of both strategies. The second round is the fastest of ddp, the third that
# of LocalSGD(), and the first has the median of both together.
PACES = {5: (0.3, 0.2), 6: (0.1, 0.3), 7: (0.6, 0.1)}
LOSSES = {5: (2.0, 4.0), 6: (2.5, 4.5), 7: (3.0, 4.1)}


class Runs:
    """Runs that take no time.

    Args:
        diverging: the strategy and the seed of a run that diverges.
    """

    def __init__(self, diverging: tuple[str, int] | None = None) -> None:
        self.diverging = diverging
        self.seen: list[tuple[str, int]] = []

    def __call__(self, settings: Settings, folder: Path, **_: Any) -> dict[str, Any]:
        self.seen.append((settings.strategy, settings.seed))
        home = RunFolder(folder)
        home.create()
        if self.seen[-1] == self.diverging:
            raise NonFiniteError("the loss is nan")
        place = NAMES.index(settings.strategy)
        summary = {
            "strategy": settings.strategy,
            "seed": settings.seed,
            "seconds_per_step": PACES[settings.seed][place],
            "eval_loss": LOSSES[settings.seed][place],
            "target_loss": 1.0,
            "seconds_to_target": None if place else 10.0 * settings.seed,
        }
        home.write("summary.json", summary)
        home.append("metrics.jsonl", [])
        return summary


def compared(folder: Path, runs: Runs, rounds: int = 3) -> Comparison:
    settings = resolve({"task": "digits", "strategy": "ddp", "workers": 2, "steps": 2, "seed": 5})
    return compare(settings, NAMES, folder, rounds=rounds, start=runs)


def test_each_round_has_its_own_seed_which_is_that_of_all_strategies(tmp_path: Path) -> None:
    runs = Runs()
    done = compared(tmp_path, runs)
    assert runs.seen == [(name, seed) for seed in (5, 6, 7) for name in NAMES]
    assert [[each["seed"] for each in rounds] for rounds in done.rounds] == [[5, 6, 7], [5, 6, 7]]


def test_curves_are_of_the_median_round_which_is_the_same_for_all_strategies(tmp_path: Path) -> None:
    compared(tmp_path, Runs())
    content = json.loads((tmp_path / "comparison.json").read_text())
    assert content["runs"] == ["ddp", "LocalSGD"]
    assert [run.summary["seed"] for run in read(tmp_path).runs] == [5, 5]
    # Of two rounds it is the faster one: a report shows a run that took place.
    compared(tmp_path / "two", Runs(), rounds=2)
    assert json.loads((tmp_path / "two" / "comparison.json").read_text())["runs"] == ["ddp.2", "LocalSGD.2"]


def test_losses_are_means_with_deviations_and_other_figures_true_medians(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = compared(tmp_path, Runs())
    ddp, local = done.summaries
    assert (ddp["seconds_per_step"], local["seconds_per_step"]) == (0.3, 0.2)
    assert (ddp["eval_loss"], ddp["eval_loss_deviation"]) == pytest.approx((2.5, 0.5))
    assert local["eval_loss"] == pytest.approx(4.2)
    assert ddp["seeds"] == local["seeds"] == [5, 6, 7]
    assert (ddp["seconds_to_target"], local["seconds_to_target"]) == (60.0, None)
    assert [row["held-out loss"] for row in rows(done.summaries)] == ["2.500 ± 0.500", "4.200 ± 0.265"]
    # The report has the same figures as the command line.
    assert read(tmp_path).summaries == done.summaries
    show(done)
    assert "losses: mean ± standard deviation over seeds 5, 6, 7; other figures: medians" in capsys.readouterr().out
    compared(tmp_path / "two", Runs(), rounds=2)
    assert [each["seconds_per_step"] for each in read(tmp_path / "two").summaries] == pytest.approx([0.2, 0.25])


def test_a_strategy_that_diverged_in_a_round_has_no_mean_over_the_other_seeds(tmp_path: Path) -> None:
    done = compared(tmp_path, Runs(diverging=(NAMES[0], 5)))
    ddp, local = done.summaries
    assert ddp["eval_loss"] is None and ddp["diverged"] == "in 1 of 3 rounds: the loss is nan"
    assert local["eval_loss"] == pytest.approx(4.2)
    assert json.loads((tmp_path / "ddp" / "summary.json").read_text())["seed"] == 5
    assert [row["held-out loss"] for row in rows(done.summaries)] == ["diverged", "4.200 ± 0.265"]
    # The others are 0.4 s and 0.7 s of both together.
    assert json.loads((tmp_path / "comparison.json").read_text())["runs"] == ["ddp.2", "LocalSGD.2"]


def test_a_comparison_that_was_interrupted_has_rows_of_the_same_seeds(tmp_path: Path) -> None:
    class Interrupted(Runs):
        def __call__(self, settings: Settings, folder: Path, **_: Any) -> dict[str, Any]:
            if len(self.seen) == 5:
                raise KeyboardInterrupt
            return super().__call__(settings, folder)

    with pytest.raises(KeyboardInterrupt):
        compared(tmp_path, Interrupted())
    assert [each["seeds"] for each in read(tmp_path).summaries] == [[5, 6], [5, 6]]


def test_runs_of_different_seeds_in_one_report_are_named(tmp_path: Path) -> None:
    compared(tmp_path, Runs())
    (tmp_path / "comparison.json").write_text(json.dumps({"runs": ["ddp", "LocalSGD.2"], "title": ""}))
    assert read(tmp_path).notes == ("The runs have different seeds (5, 6), so that losses differ by chance too.",)
