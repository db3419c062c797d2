# SPDX-License-Identifier: Apache-2.0
"""An interrupted sweep is resumed to the same results, bit for bit."""

from __future__ import annotations

import json
import multiprocessing
import os
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.grids import fast_where
from thinwire.arrays.fusion import autotune
from thinwire.arrays.fusion.checkpoints import write
from thinwire.arrays.sweep import sweeping
from thinwire.arrays.sweep.journal import Journal, settings_in
from thinwire.arrays.sweep.plan import Plan
from thinwire.arrays.sweep.sampling import OptunaSampler, RandomSampler, Sampler
from thinwire.arrays.sweep.space import Range, Space, parse_domain
from thinwire.arrays.sweep.sweeping import Progress, sweep
from thinwire.arrays.sweep.training import TrialArray
from thinwire.arrays.sweep.trials import Halving, Outcome
from thinwire.cli import main
from thinwire.core.storage import rank_file
from thinwire.errors import CheckpointError

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

SPACE = Space({"lr": Range(1e-3, 1e-1, "log"), "momentum": Range(0, 0.9), "batch_size": parse_domain("8,16")})


@pytest.fixture(autouse=True)
def no_kernel_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(autotune.DETERMINISTIC, "1")


def planned() -> Plan:
    from thinwire.lab.tasks import load

    return Plan(load("digits"), steps=9, eval_limit=64, schedule="cosine", halving=Halving(first=2, keep=2))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned()


class Interrupted(Exception):
    """An interruption, as by a person or by a fault."""


def interrupt_at(steps: int) -> Any:
    """A callback that interrupts a sweep after a number of steps."""
    seen: list[Progress] = []

    def record(progress: Progress) -> None:
        seen.append(progress)
        if len(seen) == steps:
            raise Interrupted

    return record


def made(name: str) -> Sampler:
    if name == "random":
        return RandomSampler(SPACE, seed=1)
    pytest.importorskip("optuna")
    return OptunaSampler(SPACE, seed=1)


@pytest.mark.parametrize("sampler", ["random", "optuna"])
@pytest.mark.parametrize("steps", fast_where(lambda steps: steps in (4, 13), [1, 4, 9, 13, 20]))
@pytest.mark.slow
def test_a_sweep_that_was_interrupted_ends_as_one_that_was_not(
    sampler: str, steps: int, plan: Plan, tmp_path: Path
) -> None:
    every: list[Progress] = []
    whole = sweep(plan, made(sampler), 7, together=4, callback=every.append)
    for stop in (interrupt_at(steps), interrupt_at(3)):
        resume = (tmp_path / "journal").exists()
        journal = Journal(tmp_path / "journal", {"seed": 1}, resume=resume, every_seconds=0)
        with pytest.raises(Interrupted):
            sweep(plan, made(sampler), 7, together=4, callback=stop, journal=journal)
    rest: list[Progress] = []
    journal = Journal(tmp_path / "journal", {"seed": 1}, resume=True, every_seconds=0)
    assert sweep(plan, made(sampler), 7, together=4, callback=rest.append, journal=journal) == whole
    # An array's last step is repeated where its outcome was not yet written; no other step is.
    assert len(every) <= steps + 3 + len(rest) <= len(every) + 2


def killed(plan: Plan, folder: Path, moment: str, times: int, resume: bool) -> None:
    """A sweep that ends by SIGKILL at the n-th of such moments: no `finally` runs, and nothing is flushed."""
    left = [times]

    def dying(real: Any) -> Any:
        def call(*args: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args)

        return call

    owner, name = {
        "trials stopped, nothing written": (TrialArray, "select"),
        "tensors written, their names not": (rank_file, "write_temporary"),
        "written aside, not in place": (rank_file.RankFile, "commit"),
        "in place, the old not removed": (rank_file.RankFile, "remove_stale"),
    }[moment]
    setattr(owner, name, dying(getattr(owner, name)))
    sweep(plan, made("random"), 7, together=4, journal=Journal(folder, {"seed": 1}, resume=resume, every_seconds=0))


KILLS = [
    ("trials stopped, nothing written", 2),
    ("tensors written, their names not", 4),
    ("written aside, not in place", 3),
    ("in place, the old not removed", 5),
]


def killed_again_and_again(folder: Path) -> None:
    """Each time in a process of its own, a fork of this one: all is loaded once, and nothing has computed yet."""
    os.environ[autotune.DETERMINISTIC] = "1"
    torch.set_num_threads(1)
    plan = planned()
    for place, (moment, times) in enumerate(KILLS):
        process = os.fork()
        if not process:
            killed(plan, folder, moment, times, place > 0)
            os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        assert status == -signal.SIGKILL, (moment, status)


@pytest.mark.slow
def test_a_sweep_that_is_killed_again_and_again_ends_as_one_that_ran_through(plan: Plan, tmp_path: Path) -> None:
    # The server that `tests.pool` has torch loaded in, where it was started first.
    process = multiprocessing.get_context("forkserver").Process(target=killed_again_and_again, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    process.close()
    journal = Journal(tmp_path, {"seed": 1}, resume=True)
    assert sweep(plan, made("random"), 7, together=4, journal=journal) == sweep(plan, made("random"), 7, together=4)


def test_a_resumed_array_has_its_parameters_momenta_rates_and_data(plan: Plan) -> None:
    trials = RandomSampler(Space({"lr": Range(1e-3, 1e-1)}), seed=0).ask(3)
    run = TrialArray(plan, trials)
    for _ in range(4):
        run.advance()
    run.select([2, 0])
    other = TrialArray.from_state_dict(plan, run.state_dict())
    assert other.trials == run.trials == [trials[2], trials[0]]
    for _ in range(3):
        assert run.advance().equal(other.advance())
    assert run.outcomes() == other.outcomes()


def test_a_capacity_is_measured_once(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def two(*_: object) -> int:
        tried.append(2)
        return 2

    monkeypatch.setattr(sweeping, "capacity_for", two)
    with pytest.raises(Interrupted):
        sweep(plan, made("random"), 5, callback=interrupt_at(3), journal=Journal(tmp_path, every_seconds=0))
    before = len(tried)
    events: list[Progress] = []
    journal = Journal(tmp_path, resume=True)
    sweep(plan, made("random"), 5, callback=events.append, journal=journal)
    assert before == 1 and len(tried) == 2
    assert max(each.members for each in events) == 2 and journal.seconds > 0


def test_a_finished_sweep_trains_nothing_again(plan: Plan, tmp_path: Path) -> None:
    found = sweep(plan, made("random"), 4, together=4, journal=Journal(tmp_path))
    events: list[Progress] = []
    assert (
        sweep(plan, made("random"), 4, together=4, callback=events.append, journal=Journal(tmp_path, resume=True))
        == found
    )
    assert events == []


def test_another_sweep_is_not_resumed(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        sweep(
            plan, made("random"), 4, callback=interrupt_at(2), journal=Journal(tmp_path, {"seed": 1}, every_seconds=0)
        )
    assert settings_in(tmp_path) == {"seed": 1}
    with pytest.raises(CheckpointError, match="seed was 1 and is 2 now"):
        Journal(tmp_path, {"seed": 2}, resume=True)
    with pytest.raises(CheckpointError, match="other hyperparameters than the sampler proposes"):
        sweep(plan, RandomSampler(SPACE, seed=2), 4, journal=Journal(tmp_path, {"seed": 1}, resume=True))
    with pytest.raises(CheckpointError, match="without a folder"):
        Journal(resume=True)
    with pytest.raises(CheckpointError, match="is not there"):
        Journal(tmp_path / "nothing", resume=True)
    write(tmp_path / "other", {"array": {}})
    with pytest.raises(CheckpointError, match="holds no journal of a sweep"):
        settings_in(tmp_path / "other")


def test_an_unfinished_sweep_is_overwritten_only_on_request(plan: Plan, tmp_path: Path) -> None:
    assert Journal(tmp_path, {"seed": 1}) and Journal(tmp_path, {"seed": 1}), "nothing was done yet"
    with pytest.raises(Interrupted):
        sweep(
            plan, made("random"), 4, callback=interrupt_at(2), journal=Journal(tmp_path, {"seed": 1}, every_seconds=0)
        )
    with pytest.raises(
        CheckpointError, match=r"holds an unfinished sweep. Continue it by --resume, use another folder by --out"
    ):
        Journal(tmp_path, {"seed": 2})
    assert settings_in(tmp_path) == {"seed": 1}
    sweep(plan, made("random"), 4, journal=Journal(tmp_path, {"seed": 2}, overwrite=True))
    assert settings_in(tmp_path) == {"seed": 2}
    sweep(plan, made("random"), 4, journal=Journal(tmp_path, {"seed": 2}, resume=True))
    Journal(tmp_path, {"seed": 3})
    assert settings_in(tmp_path) == {"seed": 3}


def test_a_journal_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written to"):
        Journal(tmp_path / "file" / "journal")


COMMAND = "sweep --task digits --trials 5 --steps 8 --momentum 0:0.9 --eval-limit 64 --together 3 --json"


def test_the_command_resumes_with_the_options_that_it_began_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for name, steps in (("whole", 1000), ("part", 11)):
        real, stop = TrialArray.advance, interrupt_at(steps)

        def advance(run: TrialArray, real: Any = real, stop: Any = stop) -> Any:
            stop(None)
            return real(run)

        folder = tmp_path / name
        with monkeypatch.context() as patched:
            patched.setattr(TrialArray, "advance", advance)
            usual: Any = Journal.__init__.__kwdefaults__
            patched.setattr(Journal.__init__, "__kwdefaults__", {**usual, "every_seconds": 0.0})
            if name == "part":
                with pytest.raises(Interrupted):
                    main([*COMMAND.split(), "--out", str(folder)])
                capsys.readouterr()
                assert main([*COMMAND.split(), "--out", str(folder)]) == 1
                assert "holds an unfinished sweep. Continue it" in " ".join(capsys.readouterr().err.split())
        arguments = [*COMMAND.split(), "--out", str(folder)] if name == "whole" else _resume(folder)
        assert main(arguments) == 0
        found[name] = json.loads(capsys.readouterr().out)
    assert (
        found["part"]["trials"] == found["whole"]["trials"] == json.loads((tmp_path / "part/trials.json").read_text())
    )
    assert main([*_resume(tmp_path / "part"), "--steps", "9"]) == 2
    assert "--steps 9: the sweep began with 8" in " ".join(capsys.readouterr().err.split())
    assert main([*_resume(tmp_path / "part"), "--out", "elsewhere"]) == 2
    assert "is resumed in its own folder" in " ".join(capsys.readouterr().err.split())
    assert main([*_resume(tmp_path / "part"), "--overwrite"]) == 2
    assert "resuming overwrites nothing" in " ".join(capsys.readouterr().err.split())
    assert main(_resume(tmp_path / "nothing")) == 2
    assert "nothing: no such folder" in " ".join(capsys.readouterr().err.split())


def _resume(folder: Path) -> list[str]:
    return ["sweep", "--resume", str(folder), "--json"]


def test_outcomes_that_diverged_are_the_same_after_resuming(tmp_path: Path, plan: Plan) -> None:
    wild = Space({"lr": Range(1e20, 1e30, "log")})
    found = sweep(plan, RandomSampler(wild), 2, together=2, journal=Journal(tmp_path))
    again = sweep(plan, RandomSampler(wild), 2, together=2, journal=Journal(tmp_path, resume=True))
    assert [repr(each) for each in found] == [repr(each) for each in again]
    assert all(isinstance(each, Outcome) and each.loss != each.loss for each in again)


def told(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("thinwire.lab.tasks", "load"),
        ("thinwire.arrays.sweep.sampling", "sampler_of"),
        ("thinwire.arrays.sweep.sweeping", "sweep"),
        ("thinwire.arrays.sweep.sweeping", "capacity_for"),
        ("thinwire.arrays.sweep.journal", "train_together"),
    ],
)
def test_a_sweep_interrupted_in_its_first_seconds_goes_on_as_it_says(
    module: str,
    name: str,
    number: signal.Signals,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def end(*_: object, **__: object) -> None:
        os.kill(os.getpid(), number)
        raise AssertionError("the signal was ignored")

    folder = tmp_path / "my sweep"
    call = ["sweep", "--task", "digits", "--trials", "2", "--steps", "2", "--eval-limit", "8", "--out", str(folder)]
    with monkeypatch.context() as patch:
        patch.setattr(f"{module}.{name}", end)
        assert main(call) == 130
    printed = told(capsys)
    if "to resume: " in printed:
        said = printed.partition("to resume: thinwire ")[2].partition(" thinwire: interrupted")[0]
        assert main(shlex.split(said)) == 0
    else:
        assert "give the same command again" in printed and not (folder / "journal").exists()
        assert main(call) == 0
    assert json.loads((folder / "summary.json").read_bytes())["trials"] == 2
    assert ("to resume: " in printed) == (name in ("sweep", "capacity_for", "train_together"))


def test_a_capacity_that_was_measured_is_kept_at_once(tmp_path: Path) -> None:
    assert Journal(tmp_path).capacity(lambda: 3) == 3
    assert Journal(tmp_path, resume=True).capacity(lambda: 5) == 3
