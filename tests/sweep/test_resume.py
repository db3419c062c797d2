"""A sweep that was interrupted goes on to the same results, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from thinwire.cli import main
from thinwire.errors import CheckpointError
from thinwire.fusion import autotune as choice
from thinwire.fusion.checkpoints import write
from thinwire.sweep import sweeping
from thinwire.sweep.journal import Journal, facts_in
from thinwire.sweep.plan import Plan
from thinwire.sweep.sampling import OptunaSampler, RandomSampler, Sampler
from thinwire.sweep.space import Range, Space, parse_domain
from thinwire.sweep.sweeping import News, sweep
from thinwire.sweep.training import Together
from thinwire.sweep.trials import Halving, Outcome

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

SPACE = Space({"lr": Range(1e-3, 1e-1, "log"), "momentum": Range(0, 0.9), "batch_size": parse_domain("8,16")})


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.PIN, "1")


@pytest.fixture(scope="module")
def plan() -> Plan:
    from thinwire.tasks import load

    return Plan(load("digits"), steps=9, eval_limit=64, schedule="cosine", halving=Halving(first=2, keep=2))


class Interrupted(Exception):
    """As by a person or by a fault."""


def interrupt_at(steps: int) -> Any:
    """What is told of a sweep, until it has made so many steps."""
    seen: list[News] = []

    def told(news: News) -> None:
        seen.append(news)
        if len(seen) == steps:
            raise Interrupted

    return told


def made(name: str) -> Sampler:
    if name == "random":
        return RandomSampler(SPACE, seed=1)
    pytest.importorskip("optuna")
    return OptunaSampler(SPACE, seed=1)


@pytest.mark.parametrize("sampler", ["random", "optuna"])
@pytest.mark.parametrize("steps", [1, 4, 9, 13, 20])
def test_a_sweep_that_was_interrupted_ends_as_one_that_was_not(
    sampler: str, steps: int, plan: Plan, tmp_path: Path
) -> None:
    every: list[News] = []
    whole = sweep(plan, made(sampler), 7, together=4, told=every.append)
    for told in (interrupt_at(steps), interrupt_at(3)):
        resume = (tmp_path / "journal").exists()
        journal = Journal(tmp_path / "journal", {"seed": 1}, resume=resume, every_seconds=0)
        with pytest.raises(Interrupted):
            sweep(plan, made(sampler), 7, together=4, told=told, journal=journal)
    rest: list[News] = []
    journal = Journal(tmp_path / "journal", {"seed": 1}, resume=True, every_seconds=0)
    assert sweep(plan, made(sampler), 7, together=4, told=rest.append, journal=journal) == whole
    # An array's last step is made again where the array was not yet judged; no other is.
    assert len(every) <= steps + 3 + len(rest) <= len(every) + 2


def test_an_array_under_way_has_its_parameters_momenta_rates_and_data_again(plan: Plan) -> None:
    trials = RandomSampler(Space({"lr": Range(1e-3, 1e-1)}), seed=0).ask(3)
    run = Together(plan, trials)
    for _ in range(4):
        run.advance()
    run.keep([2, 0])
    run.rates[1] *= 2
    other = Together.restored(plan, run.state())
    assert other.live == run.live == [trials[2], trials[0]]
    for _ in range(3):
        assert run.advance().equal(other.advance())
    assert run.outcomes() == other.outcomes()


def test_room_that_was_measured_is_not_measured_again(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def two(*_: object) -> int:
        asked.append(2)
        return 2

    monkeypatch.setattr(sweeping, "room_for", two)
    with pytest.raises(Interrupted):
        sweep(plan, made("random"), 5, told=interrupt_at(3), journal=Journal(tmp_path, every_seconds=0))
    before = len(asked)
    news: list[News] = []
    journal = Journal(tmp_path, resume=True)
    sweep(plan, made("random"), 5, told=news.append, journal=journal)
    assert before == 1 and len(asked) == 2
    assert max(each.members for each in news) == 2 and journal.seconds > 0


def test_a_sweep_that_has_ended_trains_nothing_again(plan: Plan, tmp_path: Path) -> None:
    found = sweep(plan, made("random"), 4, together=4, journal=Journal(tmp_path))
    news: list[News] = []
    assert sweep(plan, made("random"), 4, together=4, told=news.append, journal=Journal(tmp_path, resume=True)) == found
    assert news == []


def test_another_sweep_is_not_gone_on_with(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        sweep(plan, made("random"), 4, told=interrupt_at(2), journal=Journal(tmp_path, {"seed": 1}, every_seconds=0))
    assert facts_in(tmp_path) == {"seed": 1}
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
        facts_in(tmp_path / "other")


def test_a_sweep_that_has_not_ended_is_lost_only_when_that_is_asked_for(plan: Plan, tmp_path: Path) -> None:
    assert Journal(tmp_path, {"seed": 1}) and Journal(tmp_path, {"seed": 1}), "nothing was done yet"
    with pytest.raises(Interrupted):
        sweep(plan, made("random"), 4, told=interrupt_at(2), journal=Journal(tmp_path, {"seed": 1}, every_seconds=0))
    with pytest.raises(CheckpointError, match="has not ended; go on with it by --resume, take another folder by --out"):
        Journal(tmp_path, {"seed": 2})
    assert facts_in(tmp_path) == {"seed": 1}
    sweep(plan, made("random"), 4, journal=Journal(tmp_path, {"seed": 2}, anew=True))
    assert facts_in(tmp_path) == {"seed": 2}
    sweep(plan, made("random"), 4, journal=Journal(tmp_path, {"seed": 2}, resume=True))
    Journal(tmp_path, {"seed": 3})
    assert facts_in(tmp_path) == {"seed": 3}


def test_a_journal_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written to"):
        Journal(tmp_path / "file" / "journal")


COMMAND = "sweep --task digits --trials 5 --steps 8 --momentum 0:0.9 --eval-limit 64 --together 3 --json"


def test_the_command_goes_on_with_what_it_was_begun_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {}
    for name, steps in (("whole", 1000), ("part", 11)):
        real, stop = Together.advance, interrupt_at(steps)

        def advance(run: Together, real: Any = real, stop: Any = stop) -> Any:
            stop(None)
            return real(run)

        folder = tmp_path / name
        with monkeypatch.context() as patched:
            patched.setattr(Together, "advance", advance)
            usual: Any = Journal.__init__.__kwdefaults__
            patched.setattr(Journal.__init__, "__kwdefaults__", {**usual, "every_seconds": 0.0})
            if name == "part":
                with pytest.raises(Interrupted):
                    main([*COMMAND.split(), "--out", str(folder)])
                capsys.readouterr()
                assert main([*COMMAND.split(), "--out", str(folder)]) == 1
                assert "holds a sweep that has not ended; go on" in " ".join(capsys.readouterr().err.split())
        arguments = [*COMMAND.split(), "--out", str(folder)] if name == "whole" else _resume(folder)
        assert main(arguments) == 0
        told[name] = json.loads(capsys.readouterr().out)
    assert told["part"]["trials"] == told["whole"]["trials"] == json.loads((tmp_path / "part/trials.json").read_text())
    assert main([*_resume(tmp_path / "part"), "--steps", "9"]) == 2
    assert "--steps 9: the sweep was begun with 8" in " ".join(capsys.readouterr().err.split())
    assert main([*_resume(tmp_path / "part"), "--out", "elsewhere"]) == 2
    assert "goes on in its own folder" in " ".join(capsys.readouterr().err.split())
    assert main([*_resume(tmp_path / "part"), "--anew"]) == 2
    assert "to go on and to begin again are two things" in " ".join(capsys.readouterr().err.split())
    assert main(_resume(tmp_path / "nothing")) == 1
    assert "nothing/journal: is not there" in " ".join(capsys.readouterr().err.split())


def _resume(folder: Path) -> list[str]:
    return ["sweep", "--resume", str(folder), "--json"]


def test_outcomes_that_diverged_are_told_again(tmp_path: Path, plan: Plan) -> None:
    wild = Space({"lr": Range(1e20, 1e30, "log")})
    found = sweep(plan, RandomSampler(wild), 2, together=2, journal=Journal(tmp_path))
    again = sweep(plan, RandomSampler(wild), 2, together=2, journal=Journal(tmp_path, resume=True))
    assert [repr(each) for each in found] == [repr(each) for each in again]
    assert all(isinstance(each, Outcome) and each.loss != each.loss for each in again)
