# SPDX-License-Identifier: Apache-2.0
"""`thinwire train --elastic`: real workers, one of which is killed, and what its folder and report say of it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.rules import refusals
from thinwire.cli.commands import parse
from thinwire.cli.progress import restart_in_words, view_in_words
from thinwire.cli.train import Train
from thinwire.errors import ConfigError, ThinwireError
from thinwire.lab.report.page import write
from thinwire.lab.runs import RunFolder, launch, resolve

Pids = Callable[[], tuple[int, ...]]
STEPS = 60
QUICK = {"task": "digits", "workers": 3, "eval_limit": 64, "threads": 1, "steps": STEPS, "elastic": True}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["AllReduce()", "LocalSGD(period=4)"])
def test_a_run_goes_on_when_rank_0_is_killed_and_its_report_names_it(strategy: str, tmp_path: Path, pids: Pids) -> None:
    folder, events = tmp_path / "run", list[dict[str, Any]]()

    def kill_at_the_first_step(event: dict[str, Any]) -> None:
        events.append(event)
        if sum(each["event"] == "step" for each in events) == 1 and event["event"] == "step":
            os.kill(pids()[0], signal.SIGKILL)

    # Slowed down, so that steps are left when the first ones have been told.
    settings = resolve({**QUICK, "strategy": strategy, "stall": "1:20ms"})
    summary = launch(settings, folder, listener=kill_at_the_first_step)
    assert summary["steps"] == STEPS and summary["eval_loss"] < 2.3
    first, second = summary["views"]
    assert len(first["members"]) == 3 and len(second["members"]) == 2
    lost = first["members"][0]
    assert second["lost"] == [lost] and lost.startswith("0-")
    assert 0 < summary["goodput"] < 1
    rows = [row["step"] for row in RunFolder(folder).lines("metrics.jsonl") if "loss" in row]
    assert rows == list(range(1, STEPS + 1))
    page = write(folder).report.read_text()
    assert "Who came and went" in page and lost in page and "Goodput" in page
    assert any(each["event"] == "view" and each["lost"] == [lost] for each in events)


@pytest.mark.slow
def test_a_run_in_which_all_workers_are_killed_fails_and_says_so(tmp_path: Path, pids: Pids) -> None:
    def kill_all(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            for pid in pids():
                os.kill(pid, signal.SIGKILL)

    settings = resolve({**QUICK, "workers": 2, "strategy": "AllReduce()", "stall": "1:20ms"})
    with pytest.raises(ThinwireError, match="SIGKILL"):
        launch(settings, tmp_path / "run", listener=kill_all)


@pytest.mark.slow
def test_a_killed_worker_is_started_again_and_joins(tmp_path: Path, pids: Pids) -> None:
    """Until it has come again the others train on; the view after that has as many as at the start."""
    folder, events = tmp_path / "run", list[dict[str, Any]]()

    def kill_once(event: dict[str, Any]) -> None:
        events.append(event)
        if event["event"] == "step" and sum(each["event"] == "step" for each in events) == 1:
            os.kill(pids()[1], signal.SIGKILL)

    settings = resolve({**QUICK, "strategy": "LocalSGD(period=4)", "steps": 500, "stall": "1:20ms", "restarts": 2})
    summary = launch(settings, folder, listener=kill_once)
    assert summary["steps"] == 500
    first, second, third = summary["views"]
    assert second["lost"] == [first["members"][1]]
    assert len(third["members"]) == 3 and third["joined"][0].startswith("1-")
    (restart,) = summary["restarts"]
    assert restart["rank"] == 1 and "SIGKILL" in restart["how"]
    (told,) = [each for each in events if each["event"] == "restart"]
    assert (told["after"], told["left"]) == (1.0, 1)
    assert "Started again: worker 1 was ended by SIGKILL" in write(folder).report.read_text()
    rows = [row["step"] for row in RunFolder(folder).lines("metrics.jsonl") if "loss" in row]
    assert rows == list(range(1, 501))


@pytest.mark.slow
def test_a_worker_with_notice_leaves_and_the_summary_says_why(tmp_path: Path, pids: Pids) -> None:
    events = list[dict[str, Any]]()

    def give_notice(event: dict[str, Any]) -> None:
        events.append(event)
        if event["event"] == "step" and sum(each["event"] == "step" for each in events) == 1:
            os.kill(pids()[0], signal.SIGUSR1)

    asked = {"strategy": "PushSum(staleness=1)", "steps": 200, "stall": "1:20ms", "on_notice": "leave", "restarts": 3}
    summary = launch(resolve({**QUICK, **asked}), tmp_path / "run", listener=give_notice)
    first, second = summary["views"]
    assert summary["steps"] == 200 and second["step"] % 10 == 0
    assert second["left"] == {first["members"][0]: "SIGUSR1"} and second["lost"] == []
    assert summary["costs"] == {"lost_weight": 0.0} and summary["restarts"] == []
    assert f"{first['members'][0]} (SIGUSR1)" in write(tmp_path / "run").report.read_text()


test_what_an_elastic_run_cannot_do_is_refused_before_it_starts = refusals(
    [
        ({"strategy": "ADPSGD()", "workers": 4}, "elastic=True with ADPSGD"),
        ({"strategy": "ddp"}, "ddp: is torch's own method, which ends with any worker"),
        ({"link": "100mbit"}, "link='100mbit' with elastic"),
        ({"save_every": 5}, "save_every=5 with elastic: checkpoints are of a fixed number"),
        ({"steps": None, "seconds": 3.0}, "seconds=3.0 with elastic"),
        ({"on_notice": "save"}, "on_notice='save' with elastic"),
        ({"on_notice": "leave", "elastic": False}, "on_notice='leave': only elastic runs"),
        ({"restarts": 3, "elastic": False}, "restarts=3: only elastic runs"),
        ({"restarts": 0}, "restarts=0: must be at least 1"),
        (
            {"on_notice": "save", "elastic": False, "strategy": "ddp"},
            "ddp: is torch's own method, which cannot be saved",
        ),
        ({"on_notice": "go"}, "on_notice='go': must be one of save, leave"),
        ({"split": "label"}, "split='label' with elastic"),
    ],
    lambda asked: resolve({**QUICK, **asked}),
)


def test_a_change_of_view_is_told_in_words() -> None:
    view = {"step": 8, "members": ["1-a"], "lost": ["0-b"], "joined": [], "left": {}}
    assert view_in_words(view) == "step 8: 1 worker continues, without 0-b"
    assert view_in_words({**view, "members": ["1-a", "2-c"], "lost": [], "joined": ["2-c"]}).endswith(
        "continue, with 2-c"
    )
    left = view_in_words({**view, "lost": [], "left": {"0-b": "SIGTERM"}})
    assert left == "step 8: 1 worker continues, without 0-b, which left with SIGTERM"


def test_a_restart_is_told_in_words() -> None:
    event = {"how": "worker 1 was ended by SIGKILL", "after": 2.0, "left": 1}
    assert restart_in_words(event).endswith("SIGKILL; it is started again in 2 s, and 1 more restart is left")
    assert "not started again" in restart_in_words({**event, "after": None, "left": 0})


LATE = {**QUICK, "strategy": "LocalSGD(period=4)", "late": "late(quorum=0.5)", "eval_every": 40}


@pytest.mark.slow
def test_a_slow_worker_counts_late_and_the_run_resumes(tmp_path: Path) -> None:
    folder, events = tmp_path / "run", list[dict[str, Any]]()
    settings = resolve({**LATE, "steps": 120, "stall": "1:10ms", "slow": "2:5x", "save_every": 20})
    summary = launch(settings, folder, listener=events.append)
    assert summary["steps"] >= 120 and summary["eval_loss"] < 2.0 and 0 < summary["goodput"] < 1.2
    assert len(summary["views"][0]["members"]) == 3
    taken = {name for line in RunFolder(folder).lines("workers.jsonl") for name in line["workers"]}
    assert {name.partition("-")[0] for name in taken} == {"0", "1", "2"}  # all workers have taken steps
    saves = RunFolder(folder).checkpoints
    assert sorted(each.name for each in saves.iterdir()) == ["worker-0000", "worker-0001", "worker-0002"]
    steps = [row["step"] for row in RunFolder(folder).lines("metrics.jsonl") if "loss" in row]
    assert steps == sorted(set(steps))
    page = write(folder).report.read_text()
    assert "Who came and went" in page and "Goodput" in page

    events.clear()
    more = launch(replace(settings, steps=200), folder, listener=events.append, resume=True)
    assert next(each["step"] for each in events if each["event"] == "start") >= 80
    rows = [row for row in RunFolder(folder).lines("metrics.jsonl") if "loss" in row]
    assert more["steps"] >= 200 and [row["step"] for row in rows] == sorted({row["step"] for row in rows})
    assert rows[0]["step"] == steps[0] and rows[-1]["step"] >= 200  # those of the first part are kept
    assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)


def test_late_rounds_are_read_from_the_command_line() -> None:
    for words, elastic, late in (
        (["--elastic", "late"], True, "late"),
        (["--elastic=late(quorum=0.5)"], True, "late(quorum=0.5)"),
        (["--elastic", "--late", "late"], True, "late"),
        (["--elastic", "on", "--steps", "3"], True, None),
        (["--elastic", "off"], False, None),
        (["--elastic", "--steps", "3"], True, None),
        ([], False, None),
    ):
        found = parse(["train", *words])
        assert isinstance(found, Train)
        assert (found.elastic, found.late) == (elastic, late)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"late": "late(quorum=2)"}, "quorum=2"),
        ({"late": "never"}, "late 'never'"),
        ({"late": "late(grace=1)"}, "has no 'grace'"),
        ({"strategy": "AllReduce()"}, "need local steps and one plain mean"),
        ({"elastic": False}, "Add elastic"),
        ({"late": None, "save_every": 5}, "checkpoints are of a fixed number of workers"),
    ],
)
def test_late_rounds_that_do_not_fit_are_refused(settings: dict[str, Any], words: str) -> None:
    assert resolve({**LATE, "save_every": 5}).late == "late(quorum=0.5)"
    with pytest.raises(ConfigError, match=re.escape(words)):
        resolve({**LATE, **settings})
