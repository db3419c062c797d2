# SPDX-License-Identifier: Apache-2.0
"""What `python -m benchmarks.race` makes of results, and which run comes next."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers import HERE, LIBRARIES
from benchmarks.race import __main__ as command
from benchmarks.race import jobs, page, planner, results
from benchmarks.race.bars import bars
from benchmarks.race.racers import LINKS, LOCALS, RACERS, WORKS, named
from benchmarks.race.results import curve_of, final, steps_to
from benchmarks.race.runs import settings_of, steps_timed
from benchmarks.race.table import rows, table
from reproductions.shared.committed import Records

MADE = {"when": "2026-11-23 05:00", "torch": "2.13.0", "python": "3.11.7", "cores": 2}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    kept = Records(tmp_path)
    for module in (results, jobs, page, planner):
        monkeypatch.setattr(module, "RESULTS", kept)
    return tmp_path


def write(place: Path, name: str, content: dict[str, object]) -> None:
    Records(place).put(name, {"made": MADE, **content}, file="text")


def write_curve(place: Path, name: str, *, falls: float, payload: float, steps: int = 240) -> None:
    """A held-out loss that falls by `falls` in every ten steps, from 4."""
    marks = list(range(10, steps + 1, 10))
    losses = [4 - falls * step / 10 for step in marks]
    write(
        place,
        f"losses/{name}-0",
        {"steps": marks, "losses": losses, "training": losses, "payload_bytes": [payload * step for step in marks]},
    )


def write_times(
    place: Path, name: str, *, seconds: float, payload: float, where: str = "100mbit-4", spread: float = 0.0
) -> None:
    write(
        place,
        f"times/{where}-{name}",
        {
            "block_seconds": [seconds, seconds - spread, seconds + spread],
            "steps": 37,
            "payload_bytes_per_step": payload,
            "payload_bytes_of_run": 37 * payload,
            "wire_bytes_per_worker_per_step": 1.04 * payload,
            "exposed_seconds_per_step": 0.1,
            "cpu_seconds_per_worker_per_step": 0.3,
            "peak_memory_bytes": 7e8 + payload,
        },
    )


@pytest.fixture
def raced(place: Path) -> Path:
    write_curve(place, "ddp", falls=0.05, payload=40e6)
    write_curve(place, "Overlap-4bit", falls=0.04, payload=1e6, steps=480)
    write_curve(place, "powersgd-4", falls=0.01, payload=1e6, steps=480)
    write_times(place, "Local", seconds=0.6, payload=0.0)
    write_times(place, "ddp", seconds=4.0, payload=40e6)
    write_times(place, "Overlap-4bit", seconds=0.65, payload=1e6)
    write_times(place, "powersgd-4", seconds=0.7, payload=1e6)
    return place


def test_the_target_is_reached_at_the_first_mean_of_three_that_is_no_more() -> None:
    found = {"steps": [10, 20, 30, 40, 50], "losses": [5.0, 1.0, 3.0, 2.0, 2.0], "training": [5.0, 4.0, 3.0, 2.0, 1.0]}
    assert steps_to(found, 2.0) == 40
    assert steps_to(found, 1.0) is None
    assert steps_to(found, 3.0, "training") == 30


def test_a_row_is_steps_times_seconds_beside_the_wall(raced: Path) -> None:
    by_name = {row.racer.name: row for row in rows("100mbit", 4)}
    ddp, ours = by_name["ddp"], by_name["Overlap-4bit"]
    # The mean of the last three of DDP is the one at step 230, which the other reaches, as a mean, at 300.
    assert ddp.steps == (240.0,) and ours.steps == (300.0,)
    assert ddp.to_target == 960 and ours.to_target == pytest.approx(195)
    assert ours.exposed == pytest.approx(0.05) and ours.of_wall == pytest.approx(0.6 / 0.65)
    assert ours.wire == pytest.approx(1.04e6)
    # 40 MB times 240, an eighth of it, are 1,200 MB, more than ours sends in the budget, which ends at step 240; at
    # equal seconds, 144, DDP has done 36 steps.
    assert ours.equal_bytes == pytest.approx((4 - 0.04 * 23,))
    assert ddp.equal_seconds == pytest.approx((4 - 0.05 * 2,))
    assert by_name["DiLoCo"].seconds is None and by_name["DiLoCo"].to_target == float("inf")


def test_the_table_says_what_was_not_reached_and_what_was_not_run(raced: Path) -> None:
    lines = table("100mbit", 4).splitlines()
    first = next(line for line in lines if line.startswith("| Overlap-4bit "))
    assert "| 195 | 4.92 | 300 |" in first
    assert "| not reached |" in next(line for line in lines if line.startswith("| powersgd-4"))
    assert lines[-1].startswith("Not run: ") and "DiLoCo" in lines[-1]
    assert table("20mbit", 4) == "Not run.\n"


def test_first_steps_that_send_everything_are_in_the_product(raced: Path) -> None:
    write_curve(raced, "powersgd-4", falls=0.05, payload=1e6)
    row = next(row for row in rows("100mbit", 4) if row.racer.name == "powersgd-4")
    # Ten steps as long as DDP's, and 230 of its own.
    assert row.start == pytest.approx(10 * (4.0 - 0.7))
    assert row.to_target == pytest.approx(10 * 4.0 + 230 * 0.7)
    kept = raced / "text.jsonl"
    kept.write_text(
        "".join(line for line in kept.read_text().splitlines(keepends=True) if '"times/100mbit-4-ddp"' not in line)
    )
    row = next(row for row in rows("100mbit", 4) if row.racer.name == "powersgd-4")
    assert row.seconds == 0.7 and row.to_target == float("inf")


def test_other_numbers_of_workers_have_steps_and_no_target(raced: Path) -> None:
    for name, seconds in (("Local", 0.6), ("ddp", 6.0), ("Overlap-4bit", 0.64)):
        write_times(raced, name, seconds=seconds, payload=1e6, where="20mbit-8", spread=0.1)
    ours = next(row for row in rows("20mbit", 8) if row.racer.name == "Overlap-4bit")
    assert ours.seconds == 0.64 and ours.steps == () and ours.to_target == float("inf")
    text = page.tables()
    section = text[text.index("## 20 Mbit, 8 workers") :]
    assert "held-out target" not in section[: section.index("\n## ")]
    assert "| Overlap-4bit (thinwire) | 0.640 (0.540 to 0.740) | 94% | 0.040 |" in section
    assert "| `Local()`: nothing is sent | 0.600 (0.500 to 0.700) |" in section
    assert "| 20 Mbit | 8 |" not in page.page()


def test_a_curve_that_failed_is_told_and_counts_for_nothing(raced: Path) -> None:
    write(raced, "losses/Overlap-4bit-0", {"steps": [], "losses": [], "failed": "no answer within 60 s"})
    row = next(row for row in rows("100mbit", 4) if row.racer.name == "Overlap-4bit")
    assert row.steps == () and row.to_target == float("inf")
    assert "A curve of Overlap-4bit failed: no answer within 60 s." in table("100mbit", 4)


def test_bars_are_judged_by_the_first_of_each_kind(raced: Path) -> None:
    found = {bar.what: bar for bar in bars()}
    place = "100mbit, 4 workers"
    step = "time of a step of `Local()` (no communication) divided by its time of a step"
    assert found[f"{place}, Overlap-4bit: {step}"].met
    over = found[f"{place}, Overlap-4bit: seconds to the target of DDP divided by its own"]
    assert over.measured == pytest.approx(960 / 195) and over.met is False and over.asked == "at least 6"
    assert found[f"{place}, Overlap-4bit: seconds to the target of ddp divided by its own"].met
    loss = found[f"{place}, Overlap-4bit: held-out loss at equal tokens divided by DDP's"]
    assert loss.measured == pytest.approx((4 - 0.04 * 23) / (4 - 0.05 * 23)) and loss.met is False
    asked = "fastest thinwire recipe with 4 workers: exposed communication divided by its time of a step"
    what = f"20mbit, 8 workers, {asked}"
    assert found[what].line() == f"| {what} | at most 0.15 |  | not run |"


def test_the_planner_s_answer_stands_beside_the_fastest(raced: Path) -> None:
    assert planner.lines() == []
    assert page.page().partition("## What the planner says")[2].partition("\n## ")[0].endswith("\n\nNot run.\n")
    recipe = "OverlapLocalSGD(period=8, codec=ErrorFeedback(Nearest(bits=4)))"
    answer = {
        "step_seconds": 0.6,
        "loaded_step_seconds": 0.7,
        "recommended": recipe,
        "predicted_seconds_per_step": 0.61,
    }
    other = {**answer, "recommended": "PushSum(staleness=1)"}
    write(raced, planner.NAME, {"links": {"100mbit": answer, "20mbit": other}})
    assert planner.lines() == [
        f"| 100mbit | 0.600 | 0.700 | `{recipe}` | 0.610 | 0.650 | 195 s | Overlap-4bit | 195 s |",
        "| 20mbit | 0.600 | 0.700 | `PushSum(staleness=1)` | 0.610 | not run | not run | not run | not run |",
    ]
    assert planner.lines()[0] in page.page()
    # Below it the step of each racer that is a recipe of the plan.
    predicted = {recipe: 0.7, "PushSum()": 1.0, "AllReduce()": None}
    write(raced, planner.NAME, {"links": {"100mbit": {**answer, "predicted": predicted}}})
    assert planner.step_lines() == ["| Overlap-4bit | 0.700, 0.650 |"] and planner.near() == (1, 1)
    assert "1 of 1 predictions are within 15 %" in page.page()


def test_what_is_asked_of_the_planner_is_the_race_s_work(raced: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        asked.append(command[3:])
        if command[3] == "doctor":
            step = {"forward": 0.1, "backward": 0.4, "update": 0.1}
            said: dict[str, object] = {"steps": {"0": step}, "loaded": {"0": {"seconds": 0.65}}}
        else:
            option = {"recipe": "PushSum()", "seconds_per_step": 0.7, "tensor_parallel": None}
            said = {"recommended": "PushSum()", "options": [option], "contention": 0.08}
        return subprocess.CompletedProcess(command, 0, stdout=json.dumps(said).encode())

    monkeypatch.setattr(planner.subprocess, "run", run)
    planner.ask(["100mbit"])
    doctor, plan = ([word for word in command if not word.startswith("-")] for command in asked)
    assert doctor[:-1] == ["doctor", "text", "6m", "2", "4", "100mbit"] and plan == ["plan", doctor[-1], "adamw"]
    assert planner.lines() == [
        "| 100mbit | 0.600 | 0.650 | `PushSum()` | 0.700 | not run | not run | Overlap-4bit | 195 s |"
    ]
    planner.ask(["20mbit"])
    assert [line.split()[1] for line in planner.lines()] == ["100mbit", "20mbit"]


def test_without_a_limit_all_reduce_is_judged_by_steps_in_turns(raced: Path) -> None:
    def judged() -> bool | None:
        (found,) = (bar for bar in bars() if bar.what.startswith("no limit, 4 workers"))
        return found.met

    assert judged() is None
    for median, met in ((0.979, False), (0.981, True)):
        ours = {"speed_vs_ddp": {"median": median, "low": 0.9, "high": 1.1}}
        write(raced, "times/none-4-paired", {"contenders": {"thinwire": ours}})
        assert judged() is met


def test_rates_are_multiples_of_one_rate_whatever_the_optimizer() -> None:
    by_name = {name: settings_of(named(name), 0.5, None, steps=10) for name in ("ddp", "OneBitAdam")}
    assert by_name["OneBitAdam"].optimizer == "onebit-adam"
    assert by_name["OneBitAdam"].lr == by_name["ddp"].lr == pytest.approx(0.5 * 3e-3)


def test_what_is_timed_trains_as_the_recipe_does_after_its_first_steps() -> None:
    for racer in (*LOCALS.values(), *RACERS):
        assert (racer.timed is None) == (racer.dense_steps == 0) == (racer.dense_as is None)
        # Images need files that may not be here.
        if racer.timed is not None and racer.task == "text":
            assert settings_of(racer, 0.5, None, steps=10, strategy=racer.timed).strategy
            assert named(racer.dense_as or "").dense


def test_everything_else_is_run_where_one_run_fails(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run(job: jobs.Job) -> None:
        ran.append(job.name)
        if job.name.endswith("-ddp"):
            (place / "failed").mkdir(exist_ok=True)
            (place / "failed" / f"{job.name.replace('/', '-')}.txt").write_text("no such link")
            raise RuntimeError("no such link")
        write_times(place, job.name.rpartition("-")[2], seconds=1.0, payload=1e6)

    monkeypatch.setattr(jobs.Job, "run", run)
    monkeypatch.setattr(command, "show", lambda what: ran.append(what))
    assert command.run_all(["times"], ["100mbit/4/ddp", "100mbit/4/LocalSGD"]) == 1
    assert ran == ["times/100mbit-4-ddp", "times/100mbit-4-LocalSGD", "plot", "page"]


def test_the_page_tells_the_first_of_each_kind(raced: Path) -> None:
    text = page.page()
    assert "| 100 Mbit | 4 | Overlap-4bit, 195 s | ddp, 960 s | 960 | 4.92 |" in text
    assert "| 20 Mbit | 4 | not run | not run | not run | not run |" in text
    assert "100 Mbit, 4 workers: powersgd-4" in text


@pytest.mark.slow
def test_the_committed_page_is_what_the_results_say() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "run `python -m benchmarks.race page`"
    assert page.TABLES.read_text(encoding="utf-8") == page.tables(), "run `python -m benchmarks.race page`"
    assert page.README.read_text(encoding="utf-8") == page.readme(), "run `python -m benchmarks.race page`"


def test_the_readme_has_the_fastest_on_each_link_that_was_raced(raced: Path) -> None:
    text = page.readme()
    recipe = "OverlapLocalSGD(period=8, codec=ErrorFeedback(Nearest(bits=4)))"
    assert f"| 100 Mbit | `{recipe}` | 195 s | 960 s | 4.9x | DDP | 4.92x |" in text
    assert "| 20 Mbit |" not in text and "Times are one seed:" in text
    before, _, rest = page.README.read_text(encoding="utf-8").partition("<!-- race -->")
    assert text.startswith(before) and text.endswith(rest.partition("<!-- /race -->")[2])


def test_results_are_lines_of_one_file_for_each_work(place: Path) -> None:
    for racer, task in (("Local", "text"), ("resnet-Local", "cifar10")):
        (job,) = (job for job in jobs.jobs() if job.name == f"times/100mbit-4-{racer}")
        replace(job, make=lambda racer=racer: {"block_seconds": [1.0], "racer": racer}).run()
        assert json.loads((place / f"{task}.jsonl").read_text()) == {
            "name": job.name,
            "block_seconds": [1.0],
            "racer": racer,
        }
        assert job.done
    committed = Path(results.__file__).parents[1] / "results"
    assert not [path for work in ("race", "predicted") for path in (committed / work).rglob("*.json")]


def test_equal_curves_are_run_once(raced: Path) -> None:
    assert curve_of(named("AllReduce"), 0) is curve_of(named("ddp"), 0)
    found = curve_of(named("ddp"), 0)
    assert found is not None and final(found) == pytest.approx(4 - 0.05 * 23)


def test_rates_come_before_the_curves_that_take_them(place: Path) -> None:
    left = [job.name for job in jobs.missing([], [])]
    assert left[:4] == [*(f"tune/ddp-{rate:g}" for rate in WORKS["text"].rates), "losses/ddp-0"]
    first = left.index("tune/LocalSGD-32-0.15")
    assert first < left.index("tune/DiLoCo-4bit-outer-0.4") < left.index("losses/DiLoCo-4bit-0")
    assert left.index("losses/DiLoCo-4bit-0") < left.index("times/100mbit-4-Local") < left.index("times/20mbit-4-Local")
    assert left.index("times/100mbit+50ms-4-ddp") < left.index("checks/100mbit-own") < left.index("losses/ddp-1")
    assert len(left) == len(set(left))


def test_a_pattern_keeps_what_it_names_and_what_that_needs(place: Path) -> None:
    left = [job.name for job in jobs.missing(["losses"], ["*/4/powersgd-4"])]
    assert left[:5] == [
        *(f"tune/powersgd-4-{rate:g}" for rate in WORKS["text"].rates),
        "tune/ddp-0.15",
        "tune/ddp-0.3",
    ]
    assert [job.name for job in jobs.missing(["times"], ["1gbit/8/ddp"])] == ["times/1gbit-8-ddp"]


def test_what_failed_is_not_tried_again_and_holds_up_only_what_needs_it(place: Path) -> None:
    job = next(job for job in jobs.jobs() if job.name == "times/100mbit-4-Local")

    def fail() -> dict[str, object]:
        raise RuntimeError("no such link")

    failing = jobs.Job(job.name, job.group, 1.0, fail)
    with pytest.raises(RuntimeError):
        failing.run()
    assert "no such link" in (place / "failed" / "times-100mbit-4-Local.txt").read_text()
    left = [each.name for each in jobs.missing(["times"], ["100mbit/4/*"])]
    assert "times/100mbit-4-Local" not in left and "times/100mbit-4-ddp" in left


def test_a_library_that_cannot_be_installed_holds_up_nobody_else(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(library: str) -> None:
        raise RuntimeError(f"no wheel of {library}")

    monkeypatch.setattr(jobs, "installed", lambda library: False)
    monkeypatch.setattr(jobs, "install", cannot)
    pattern = ["100mbit/4/torchft"]
    with pytest.raises(RuntimeError, match="no wheel of torchft"):
        jobs.run_next(["times"], pattern)
    assert jobs.missing(["times"], pattern) == []
    assert not jobs.run_next(["times"], pattern)


def test_blocks_are_whole_periods() -> None:
    for racer in RACERS:
        for link in LINKS:
            warm, timed, block = steps_timed(racer, link)
            assert timed % block == 0 and warm > 0
            assert timed >= 30 or (link == "20mbit" and racer.dense)


def test_racers_of_one_task_are_not_compared_with_those_of_another(raced: Path) -> None:
    text = {row.racer.name for row in rows("100mbit", 4)}
    images = {row.racer.name for row in rows("100mbit", 4, "cifar10")}
    assert "ddp" in text and "resnet-ddp" in images and not text & images
    left = [job.name for job in jobs.missing([], ["100mbit/4/resnet-*"])]
    assert left[0] == "tune/resnet-ddp-0.5" and "times/100mbit-4-resnet-Local" in left
    assert not any(name.startswith(("times/20mbit", "losses/ddp")) for name in left)


def test_every_library_that_races_has_its_pins() -> None:
    used = {racer.library for racer in RACERS if racer.library is not None}
    assert used <= set(LIBRARIES)
    for library in LIBRARIES:
        pins = (HERE / f"{library}.txt").read_text()
        assert "==" in pins and all("==" in line for line in pins.split())
