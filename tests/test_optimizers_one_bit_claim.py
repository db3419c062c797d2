"""1-bit LAMB in whole runs: its optimizers by name, and what its claim makes of a run's records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from laconic.optimizers.lamb import Lamb
from laconic.optimizers.one_bit_adam import OneBitAdam
from laconic.optimizers.one_bit_lamb import OneBitLamb
from laconic.runs.claims.onebit_lamb import ALONE, DDP, OURS, POWER, QUICK, Scale, warm_up
from laconic.runs.comparison import Comparison
from laconic.runs.reproductions import claim
from laconic.runs.settings import Settings
from laconic.runs.studies.onebit_stages import stages_of, step_seconds, volume_by_formula
from laconic.runs.worker import make_optimizer
from tests.engine import net


@pytest.mark.parametrize(("name", "kind"), [("lamb", Lamb), ("onebit-lamb", OneBitLamb), ("onebit-adam", OneBitAdam)])
def test_runs_know_the_optimizers_by_name(name: str, kind: type) -> None:
    settings = Settings("text", "0.5m", "AllReduce()", steps=1, optimizer=name, lr=0.25, weight_decay=0.5)
    optimizer = make_optimizer(net(), settings)
    assert type(optimizer) is kind
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (0.25, 0.5)


def recorded(folder: Path, steps: int, warm_steps: int) -> Comparison:
    """A comparison of one strategy with one run: 100 bytes and 4 s a step at first, 5 bytes and 1 s later."""
    home = folder / "run"
    home.mkdir()
    (folder / "comparison.json").write_text(json.dumps({"rounds": {"run": ["run"]}}))
    lines = [{"step": 0, "eval_loss": 5.0}]
    for step in range(1, steps + 1):
        payload = 100 * min(step, warm_steps) + 5 * max(0, step - warm_steps)
        lines.append(
            {"step": step, "loss": 1.0, "payload_bytes": payload, "step_seconds": 4 if step <= warm_steps else 1}
        )
    (home / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Comparison(folder, ("run",), (({},),))


def test_stages_are_told_apart_in_bytes_and_seconds(tmp_path: Path) -> None:
    done = recorded(tmp_path, 12, 2)
    (stages,) = stages_of(done, 0, 2)
    assert (stages.warm_bytes, stages.coded_bytes, stages.coded_volume) == (100, 5, 20)
    assert (stages.warm_seconds, stages.coded_seconds) == (4, 1)
    assert stages.volume == pytest.approx(volume_by_formula(2 / 12, 20))
    assert step_seconds(done, 0, 2) == 1


def test_the_paper_s_volume_follows_from_its_warm_up_and_bf16_gradients() -> None:
    assert volume_by_formula(1000 / 5993, 16) == pytest.approx(4.57, abs=0.01)
    assert volume_by_formula(1.0, 31) == 1


def test_the_claim_is_found_by_its_name_and_warms_up_for_a_sixth() -> None:
    assert claim("onebit-lamb").name == "onebit-lamb"
    assert [warm_up(steps) for steps in (600, 120, 30, 6)] == [100, 20, 5, 2]


def test_torch_s_own_methods_stand_between_silence_and_ours() -> None:
    assert Scale().timed == (ALONE, DDP, POWER, OURS)
    assert QUICK.timed == (ALONE, DDP, OURS)
