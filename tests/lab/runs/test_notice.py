# SPDX-License-Identifier: Apache-2.0
"""`--on-notice save`: all workers save after the same step, and the run goes on later as if nothing had been."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lab.runs.test_elastic_run import Pids
from thinwire.cli.progress import notice_in_words
from thinwire.cli.train import Train
from thinwire.elastic.notice import LEFT_WITH_NOTICE
from thinwire.lab.report.page import write
from thinwire.lab.runs import RunFolder, launch, resolve

STEPS = 60
ASKED = {
    "task": "digits",
    "workers": 2,
    "eval_limit": 64,
    "threads": 1,
    "steps": STEPS,
    "eval_every": 30,
    "strategy": "SlowMo(PushSum(staleness=1), period=8)",
    "on_notice": "save",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    launch(resolve({**ASKED}), folder)
    return folder


def losses(folder: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in RunFolder(folder).lines("metrics.jsonl") if "loss" in row}


def notice_at_the_first_step(number: int, pid: Callable[[], int]) -> Any:
    """Sends a signal to a process at the first step that is told."""
    sent = list[int]()

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "step" and not sent:
            sent.append(number)
            os.kill(pid(), number)

    return listen


@pytest.mark.slow
@pytest.mark.parametrize(("number", "rank"), [(signal.SIGUSR1, 1), (signal.SIGTERM, None)], ids=["worker", "launcher"])
def test_a_run_that_was_saved_with_notice_goes_on_bit_for_bit(
    number: signal.Signals, rank: int | None, tmp_path: Path, whole: Path, pids: Pids
) -> None:
    settings = resolve({**ASKED, "stall": "1:20ms"})
    folder = tmp_path / "parts"
    saved = launch(
        settings, folder, listener=notice_at_the_first_step(number, os.getpid if rank is None else lambda: pids()[rank])
    )
    step = saved["notice"]["step"]
    assert 0 < step < STEPS and step % 10 == 0 and saved["steps"] == step
    assert saved["notice"]["reasons"] == {str(r): number.name for r in ([rank] if rank is not None else [0, 1])}
    assert f"Saved and ended after step {step}, as rank" in write(folder).report.read_text()
    ended = launch(settings, folder, resume=True)
    assert "notice" not in ended and ended["steps"] == STEPS
    assert losses(folder) == losses(whole)
    uninterrupted = RunFolder(whole).summary()
    assert uninterrupted is not None and ended["eval_loss"] == uninterrupted["eval_loss"]


def test_the_command_ends_with_a_code_of_its_own(tmp_path: Path) -> None:
    summary: dict[str, Any] = {"steps": 40, "notice": {"step": 40, "reasons": {"1": "SIGUSR1"}}}
    assert Train(json=True)._show(summary, tmp_path) == LEFT_WITH_NOTICE == 75
    del summary["notice"]
    assert Train(json=True)._show(summary, tmp_path) == 0
    assert notice_in_words({"step": 40, "reasons": {"0": "SIGTERM", "1": "SIGUSR1"}}) == (
        "step 40, as rank 0 got SIGTERM and rank 1 got SIGUSR1"
    )
