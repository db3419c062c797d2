# SPDX-License-Identifier: Apache-2.0
"""Each command that README.md prints runs, at a toy size."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import thin_gpt.__main__ as command
from thin_gpt import jobs, results
from thin_gpt.page import table
from thin_gpt.racers import ALL, RACERS, missing
from thin_gpt.referee import Entry, Record, Run, run
from thin_gpt.task import RANKED, SEEDS, load_text
from thin_gpt.verdicts import RATIOS

pytestmark = pytest.mark.emulation
README = Path(command.__file__).with_name("README.md").read_text(encoding="utf-8")


def printed() -> list[list[str]]:
    """The arguments of all commands in code blocks."""
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    lines = [line.partition("#")[0].split() for block in blocks for line in block.splitlines()]
    return [words[3:] for words in lines if words[:3] == ["python", "-m", "thin_gpt"]]


def call(words: Sequence[str], folder: Path) -> int:
    return command.main([words[0], "--size", "toy", "--results", str(folder), *words[1:]])


def test_the_readme_prints_every_command() -> None:
    assert {words[0] for words in printed()} == {"run", "submit", "verify", "table", "page", "rank"}


def test_submit_verify_table_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    (tmp_path / "my_racer.py").write_text(code)
    submitted, shown, drawn = printed()[:3]
    words = [str(tmp_path / word) if word == "my_racer.py" else word for word in submitted]
    assert call([*words, "--workers", "2", "--rate", "3e-3"], tmp_path) == 0
    assert "thin-gpt/1 20mbit/equal: final loss" in capsys.readouterr().out
    assert call(shown, tmp_path) == 0
    assert "my_racer" in capsys.readouterr().out
    assert call(["verify"], tmp_path) == 0
    assert "my_racer 20mbit/equal seed 0: counts" in capsys.readouterr().out
    # Whoever verifies needs no options, and what a file may do is with its record.
    assert json.loads((tmp_path / results.FILE).read_text())["allow"] == []
    assert call(drawn, tmp_path) == 0
    assert {path.name for path in tmp_path.glob("*.svg")} == {"times.svg", "losses.svg", "bytes.svg"}
    assert "not run" in (tmp_path / "page.md").read_text()


def test_the_plan_and_a_sitting_that_is_too_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["run", "--plan"], tmp_path) == 0
    assert "toy 20mbit/equal: about" in capsys.readouterr().out
    assert call(["run", "--minutes", "0"], tmp_path) == 0
    assert "runs are known to be left" in capsys.readouterr().out and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_sitting_runs_ddp_from_tuning_to_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["run", "--racer", "ddp", "--track", "1gbit/equal"], tmp_path) == 0
    assert "nothing is left to run" in capsys.readouterr().out
    found = results.Results(tmp_path, load_text().fingerprint)
    kinds = [each["kind"] for each in found.records]
    assert kinds.count("tune") >= 7 and kinds.count("curve") >= 3 and kinds.count("whole") == len(SEEDS)
    assert not any(each["checks"] for each in found.records if each["kind"] != "curve")
    assert "| ddp" in table(found, "toy", "1gbit/equal")


# -- the queue, without runs -------------------------------------------------------------------------------------------


def pretend(job: jobs.Job, text: object, local: float) -> Record:
    """A record as a run would make it: the best rate of every racer is 2e-3, and its loss falls linearly."""
    plan, name = job.run, job.run.entry.name
    steps = min(plan.trunk + plan.decay, plan.stop or 1 << 60)
    slow = 1 + list(RACERS).index(name) / 40
    wrong = abs(plan.rate - 2e-3) * 100 + abs((plan.outer or 0.7) - 0.6)
    marks = range(plan.every, steps + 1, plan.every) if plan.every else range(0)
    return {
        "kind": job.kind,
        "racer": name,
        "text": "text",
        "checks": {},
        "final": 1.0 + wrong,
        "curve": [[mark, 5 - mark / 10 / slow, mark / 10] for mark in marks],
        "step_ends": [0.1 * slow * (step + 1) for step in range(steps)],
        "training": [1.0] * steps,
        "steps": steps,
        "seconds": steps / 10 * slow,
        "step_seconds": 0.1 * slow,
        "memory": 1e8,
        "claimed": [1e6] * 4,
        "wire": [1000] * 4,
        "cpu_seconds": 1.0,
        "machine": {"cores": 2, "torch": "2"},
        **{key: getattr(plan, key) for key in ("size", "track", "seed", "rate", "outer", "trunk", "decay")},
        "local": 0.1,
    }


def test_the_queue_ends_and_continues_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "run_job", pretend)
    monkeypatch.setattr(jobs, "local_step_seconds", lambda *_, **__: 0.1)
    names = [entry.name for entry in ALL]
    found = results.Results(tmp_path, "text")
    for _ in range(3):
        found.append(pretend(next(jobs.pending(found, "toy", names)), None, 0.1))
    with found.path.open("a") as file:
        file.write('{"kind": "tu')  # a process was stopped here
    again = results.Results(tmp_path, "text")
    assert again.records == json.loads(json.dumps(found.records))
    assert next(jobs.pending(again, "toy", names)) == next(jobs.pending(found, "toy", names))
    assert jobs.work(again, "toy", names, None, minutes=1e9) == 0  # type: ignore[arg-type]
    last = results.Results(tmp_path, "text")
    assert last.records == json.loads(json.dumps(again.records))
    for name in names:
        chosen = last.rates(RACERS[name], "toy")
        assert chosen is not None and not chosen[2] and chosen[0] == pytest.approx(2e-3, rel=0.35)
        tries = [len(last.tries(name, "toy", outer=outer)) for outer in (False, True)]
        assert tries == [7, 5 if RACERS[name].outer else 0]
    for track in RANKED:
        whole = [each["racer"] for each in last.records if each["kind"] == "whole" and each["track"] == track]
        elastic = [name for name in names[5:] if RACERS[name].elastic]
        best = names[:5] + (elastic if track.endswith("uneven") else [])
        assert sorted(whole) == sorted(best * len(SEEDS))
    assert last.ranking("toy", RANKED[0])[:5] == names[:5]
    # DDP's loss at the end of its trunk of 24 steps, as a mean of three, is that of step 16.
    assert last.target("toy", 0) == pytest.approx(5 - 1.6)
    assert last.seconds("ddp", "toy", RANKED[0]) == pytest.approx(2.4)
    assert "~" in table(last, "toy", RANKED[0]) and set(RATIOS) == set(RANKED)
    assert {"page.md"} < {path.name for path in command.page(last, "toy", tmp_path)}
    assert "**not met**" in (tmp_path / "page.md").read_text()


def test_two_days_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second day is the first one, but for two neighbors of which one was slow."""
    (words,) = (words for words in printed() if words[0] == "rank")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jobs, "run_job", pretend)
    monkeypatch.setattr(jobs, "local_step_seconds", lambda *_, **__: 0.1)
    names = [entry.name for entry in ALL][:8]
    first = results.Results(words[1], "text")
    assert jobs.work(first, "toy", names, None, minutes=1e9) == 0  # type: ignore[arg-type]
    text = first.path.read_text()
    Path(words[2]).write_text(text)
    rank = [*words, "--size", "toy"]
    assert command.main(rank) == 0
    assert (
        f"{RANKED[0]}: Kendall's tau 1.00 of 8 racers; of the first eight 1.00, at least 0.9" in capsys.readouterr().out
    )

    def slower(name: str, factor: float) -> str:
        records = [json.loads(line) for line in text.splitlines()]
        for each in records:
            if each["racer"] == name and each["track"] == RANKED[0] and each["kind"] in ("whole", "time"):
                each["step_seconds"] *= factor
                each["step_ends"] = [end * factor for end in each["step_ends"]]
        return "".join(json.dumps(each) + "\n" for each in records)

    Path(words[2]).write_text(slower(names[5], 1.06))
    assert command.main(rank) == 0
    told = capsys.readouterr().out
    assert "Kendall's tau 0.93 of 8 racers" in told and f"\n  {names[5]}, {names[6]}: " in told
    Path(words[2]).write_text(slower(names[0], 100))
    assert command.main(rank) == 1
    assert "0.50, not at least 0.9" in capsys.readouterr().out
    Path(words[2]).write_text(text.replace('"text": "text"', '"text": "other"'))
    with pytest.raises(ValueError, match="same --text"):
        command.main(rank)
    Path(words[2]).write_text("")
    Path(words[1]).write_text("")
    assert command.main(rank) == 1 and "0 racers have a time in both" in capsys.readouterr().out


# -- racers ------------------------------------------------------------------------------------------------------------

# Libraries take seconds to import, in each worker.
FAST = {"ddp", "ddp-bf16", "powersgd-4", "post-local-sgd", "thinwire-localsgd-8-4bit"}
CASES = [pytest.param(e, id=e.name, marks=[] if e.name in FAST else pytest.mark.slow) for e in ALL]


@pytest.mark.parametrize("entry", CASES)
def test_a_racer_runs_ten_steps(entry: Entry) -> None:
    if library := missing(entry.name):
        pytest.skip(f"{library} is not installed")
    shorter = {"post-local-sgd": {"start": 2}, "powersgd-4": {"start": 2}}.get(entry.name, {})
    settings = {**entry.settings, **shorter}
    own = replace(entry, settings=settings)
    plan = Run(own, "toy", outer=0.7 if entry.outer else None, rate=1e-3, trunk=8, decay=2, every=5, workers=2)
    record = run(plan)
    assert "failed" not in record, record["failed"]
    assert record["spread"] < 1e-6 and record["violations"] == []
    assert record["updates"] == record["forwards"] == [10, 10]
    assert min(record["claimed"]) > 0
