# SPDX-License-Identifier: Apache-2.0
"""The uneven track: a slow worker, and one that is killed once."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from thin_gpt.checks import verify
from thin_gpt.racers import RACERS, missing
from thin_gpt.referee import Entry, Run, run
from thin_gpt.task import REPLAYED, WORKERS, Text, load_text

pytestmark = pytest.mark.emulation
HONEST = str(Path(__file__).parent / "cheats" / "honest.py")
SURVIVES = str(Path(RACERS["ddp"].file).with_name("elastic_ddp.py"))


@pytest.fixture(scope="module")
def text() -> Text:
    return load_text()


def race(entry: Entry, track: str = "1gbit/uneven", *, local: float = 0.03, steps: int = 60, workers: int = 4) -> Run:
    rates = {"rate": 3e-3, "outer": 0.7 if entry.outer else None}
    shape = {"trunk": steps - 20, "decay": 20, "every": 10, "workers": workers}
    return Run(entry, "toy", track, local=local, patience=60.0, **rates, **shape)


def test_a_racer_is_restarted_as_a_whole_from_the_last_snapshot(text: Text) -> None:
    plan = race(RACERS["ddp"])
    record = run(plan, text)
    assert verify(record, plan.entry, text) == {}
    assert record["killed"] and record["restarted_at"] == REPLAYED
    assert record["handed"] == [plan.trunk + plan.decay - REPLAYED] * WORKERS
    # The slow worker's sleep of two local steps, in the steps that were lost too.
    assert record["seconds"] > 2 * plan.local * record["steps"]
    assert len(record["step_ends"]) == record["steps"]
    # The time of the restart is that of one step.
    gaps = [b - a for a, b in itertools.pairwise(record["step_ends"])]
    assert gaps.index(max(gaps)) == REPLAYED - 1
    uninterrupted = run(race(plan.entry, "1gbit/equal"), text)
    assert record["final"] == pytest.approx(uninterrupted["final"], abs=1e-3)


def test_a_racer_on_plain_torch_survives(text: Text) -> None:
    plan = race(Entry("survives", SURVIVES, elastic=True))
    record = run(plan, text)
    assert verify(record, plan.entry, text) == {}
    assert record["killed"] and not record["restarted_at"] and record["spread"] == 0
    kept = [rank for rank in range(WORKERS) if rank != 2]
    assert all(record["steps"] <= record["handed"][rank] <= record["steps"] + 1 for rank in kept)
    assert record["handed"][2] < record["steps"]
    uninterrupted = run(race(plan.entry, "1gbit/equal"), text)
    assert record["final"] == pytest.approx(uninterrupted["final"], rel=0.02)


def test_a_racer_that_cannot_continue_has_failed(text: Text, tmp_path: Path) -> None:
    """It says that it is elastic, and does not notice that a worker is gone."""
    file = tmp_path / "racer.py"
    file.write_text(
        Path(SURVIVES)
        .read_text()
        .replace("except RuntimeError:", "except KeyError:")
        # The new worker would wait for the others longer than the test.
        .replace("seconds=600", "seconds=5")
    )
    plan = race(Entry("fails", str(file), elastic=True))
    record = run(plan, text)
    assert re.match("worker [013]: RuntimeError: .*by peer", record["failed"]), record["failed"]
    assert "completed" in verify(record, plan.entry, text)


def test_a_racer_that_holds_its_progress_back_has_failed(text: Text, tmp_path: Path) -> None:
    file = tmp_path / "racer.py"
    file.write_text(Path(HONEST).read_text().replace("sent = 0.0", "sent, progress = 0.0, 1"))
    file.write_text(
        file.read_text().replace("self.model, self", 'dist.init_process_group("gloo"); self.model, self', 1)
    )
    plan = race(Entry("holds", str(file), elastic=True), "1gbit/equal", steps=30, workers=2)
    assert "got 50 batches, and its progress is 1 steps" in run(plan, text)["failed"]


ELASTIC = [name for name, entry in RACERS.items() if entry.elastic]


@pytest.mark.slow
@pytest.mark.parametrize("name", ELASTIC)
def test_an_elastic_racer_takes_part(name: str, text: Text) -> None:
    if library := missing(name):
        pytest.skip(f"{library} is not installed")
    entry = RACERS[name]
    plan = race(entry, "100mbit-50ms/uneven", local=0.1, steps=140)
    record = run(plan, text)
    assert verify(record, entry, text) == {}
    assert record["killed"] and not record["restarted_at"]
    assert record["final"] < record["curve"][0][1]
    assert 0 < record["handed"][2] < record["steps"]
