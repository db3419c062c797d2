# SPDX-License-Identifier: Apache-2.0
"""Settings, recipes, synchronisation points and figures of a run."""

import dataclasses
import json
import math
import tomllib

import pytest

from tests.rules import for_each, refusals
from thinwire import AllReduce, LocalSGD
from thinwire.core.comm.threads import run_threads
from thinwire.core.comm.work import Interval
from thinwire.errors import CheckpointError, ConfigError
from thinwire.lab.emulate import Traffic
from thinwire.lab.report.labels import as_folder, name
from thinwire.lab.report.runs import Step, Totals
from thinwire.lab.runs import Settings, parse_recipe, resolve
from thinwire.lab.runs.measure import InterfaceCounter, Timeline, share
from thinwire.lab.runs.recipes import describe, split_recipes
from thinwire.lab.runs.settings import as_toml, read_settings, settings_as_toml
from thinwire.lab.runs.training import SyncSchedule


def settings(**others):
    return Settings(**{"task": "digits", "model": "mlp", "strategy": "AllReduce(codec=None)", "steps": 100, **others})


def test_options_of_any_text_are_read_back():
    given = {"data": '/home/\U00020bb7\u7530/\x7f \\ "d"\n\t', "lr": 0.1, "elastic": True}
    assert tomllib.loads(as_toml(given, head="an example")) == given


def test_settings_survive_json():
    one = settings(seconds=3.5, link="100mbit,0:10mbit", slow="1:2x", eval_every=7, workers=2)
    assert Settings.from_json(json.loads(json.dumps(one.to_json()))) == one


@for_each(
    [
        ("steps", 0),
        ("workers", 0),
        ("lr", -1.0),
        ("lr", math.nan),
        ("momentum", 1.0),
        ("optimizer", "adam"),
        ("schedule", "step"),
        ("eval_every", 0),
        ("weight_decay", -0.1),
        ("timeout", 0.0),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(case):
    name, value = case
    with pytest.raises(ConfigError, match=f"{name}="):
        settings(**{name: value})


def test_momentum_of_an_optimizer_that_has_none_is_refused_and_not_saved():
    with pytest.raises(ConfigError, match=r"momentum=0\.5 with the optimizer adamw: is the momentum of sgd"):
        resolve({"task": "digits", "optimizer": "adamw", "momentum": 0.5})
    for optimizer in ("adamw", "sgd"):
        saved = tomllib.loads(settings_as_toml(resolve({"task": "digits", "optimizer": optimizer})))
        assert ("momentum" in saved) is (optimizer == "sgd")


def test_a_run_without_an_end_is_refused():
    with pytest.raises(ConfigError, match="nothing would end the run"):
        settings(steps=None)


def test_settings_of_another_version_are_refused_by_the_field():
    with pytest.raises(ConfigError, match="'colour'"):
        Settings.from_json({**settings().to_json(), "colour": 1})


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="holds no run"):
        read_settings(tmp_path / "settings.json")


def test_the_learning_rate_warms_up_and_follows_the_cosine():
    one = settings(lr=1.0, warmup_steps=10, schedule="cosine")
    rates = [one.lr_at(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == pytest.approx(1.0)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert one.lr_at(100) == pytest.approx(0.1)


def test_what_is_left_open_is_filled_in_by_the_task():
    one = resolve({"task": "digits", "strategy": "LocalSGD", "steps": 50, "workers": 2})
    assert (one.strategy, one.optimizer, one.eval_every) == ("LocalSGD()", "sgd", 5)
    assert one.batch_size > 0 and one.model == "mlp"


def test_the_help_says_how_many_checkpoints_are_kept():
    assert resolve({"task": "digits"}).keep == 3
    assert "older ones are removed. 3 unless given." in (Settings.__doc__ or "")


def test_a_target_alone_ends_in_finite_time():
    # As the help says.
    assert resolve({"task": "digits", "target_loss": 0.1}).seconds == 900
    assert "900 where target_loss alone is given" in (Settings.__doc__ or "")


@for_each(["ddp", "ddp+bf16", "ddp+powersgd(rank=2)", "post-local-sgd(period=4, start=3)", "LocalSGD(period=4)"])
def test_a_recipe_or_baseline_is_read_back_from_its_text(text):
    assert describe(parse_recipe(text)) == text


def test_arguments_that_are_the_usual_ones_are_left_out():
    assert describe(parse_recipe("ddp+powersgd(rank=1)")) == "ddp+powersgd"


def test_a_bare_name_is_a_recipe():
    assert parse_recipe("AllReduce") == AllReduce()
    assert parse_recipe(" LocalSGD(period=3) ") == LocalSGD(3)


test_a_wrong_baseline_is_refused_with_the_fix = refusals(
    [
        ("dpp", "did you mean"),
        ("ddp+fp16", "did you mean .*ddp\\+bf16"),
        ("ddp+powersgd(1, rank=1)", "was given 'rank' twice"),
        ("ddp() + (1)", "neither a literal nor a known name"),
        ("ddp+powersgd(rank=----1)", "neither a literal nor a known name"),
        ("ddp+powersgd(rank=True)", "whole number"),
        ("ddp+powersgd(rank='x')", "whole number"),
        ("ddp+powersgd(**{})", "is not understood"),
        ("ddp+powersgd(rank=1, rank=2)", "given 'rank' twice"),
        ("SlowMo(base=ddp)", "base must be a Strategy"),
        ("ddp+powersgd(rank=1.5)", "whole number"),
        ("ddp+powersgd(rang=1)", "has no 'rang'"),
        ("ddp(rank=1)", "takes no arguments"),
        ("ddp+powersgd(rank=__import__('os'))", "'__import__' is unknown"),
        ("post-local-sgd(period=1)", "period=1"),
        ("ddp+powersgd(start=1)", "start=1"),
    ],
    parse_recipe,
)


def test_recipes_are_separated_by_semicolons():
    assert split_recipes("ddp; AllReduce(); ") == ["ddp", "AllReduce()"]


test_a_wrong_list_of_recipes_is_refused = refusals(
    [
        (" ; ", "at least one"),
        ("ddp; AllReduce; AllReduce()", "twice"),
        ("AllReduce(), LocalSGD(period=8)", "Separate several strategies by semicolons"),
    ],
    split_recipes,
)


def test_folders_are_named_after_what_distinguishes_recipes():
    assert as_folder(name("SlowMo(base=PushSum(topology=OnePeerExponential()), period=48)")) == "SlowMo-PushSum"
    assert as_folder("ddp+bf16") == "ddp-bf16"
    assert as_folder("post-local-sgd(period=4)") == "post-local-sgd-period-4"


def sync_steps(schedule, pace, step=0, seconds=0.0):
    """The steps after which workers synchronise that take `pace` seconds a step."""
    found = []
    while not schedule.is_over(step, seconds):
        following = schedule.next_sync(step, seconds)
        seconds += (following - step) * pace
        step = following
        found.append(step)
        schedule.evaluation_is_due(step, seconds)
    return found


def test_a_budget_of_seconds_ends_at_the_nearest_step_after_few_synchronisations():
    found = sync_steps(SyncSchedule(settings(steps=None, seconds=60.0), 0, 0.0), 0.013)
    assert abs(found[-1] * 0.013 - 60.0) <= 0.013
    assert len(found) < 60


def test_steps_end_at_the_step_and_evaluations_fall_on_their_multiples():
    found = sync_steps(SyncSchedule(settings(steps=95, eval_every=10, save_every=25), 0, 0.0), 0.001)
    assert found[-1] == 95
    assert {*range(10, 95, 10), 25, 50, 75} <= set(found)


def test_a_resumed_run_synchronises_at_the_same_multiples():
    found = sync_steps(SyncSchedule(settings(steps=40, eval_every=10), 25, 3.0), 0.1, 25, 3.0)
    assert {30, 40} <= set(found) and found[-1] == 40


def test_evaluations_of_a_budget_come_about_ten_times():
    schedule, due, step, seconds = SyncSchedule(settings(steps=None, seconds=20.0), 0, 0.0), 0, 0, 0.0
    while not schedule.is_over(step, seconds):
        following = schedule.next_sync(step, seconds)
        step, seconds = following, following * 0.05
        due += schedule.evaluation_is_due(step, seconds)
    assert 8 <= due <= 11


def test_workers_share_means_and_the_time_of_the_last():
    def one(comm):
        mine = [Step(1, 1.0 + comm.rank, 2.0 * comm.rank, 10.0, 0.5, 0.25)]
        return share(comm, mine, "cpu")

    first, second = run_threads(2, one)
    records, workers = first
    assert first == second
    assert records == [Step(1, 2.0, 1.0, 10.0, 0.5, 0.25)]
    assert records[0].compute_seconds == 0.25
    assert workers == {rank: {"step_seconds": 0.5, "exposed_seconds": 0.25, "data_seconds": 0.0} for rank in ("0", "1")}


def test_time_per_step_counts_what_is_sent_only_every_few_steps():
    totals = Totals()
    times = [1.0 if step % 8 else 9.0 for step in range(1, 81)]
    totals.add([Step(i + 1, 0.0, 1.0, 8.0 * ((i + 1) // 8), t, t - 1.0) for i, t in enumerate(times)])
    summary = totals.summary()
    assert summary["seconds_per_step"] == pytest.approx(2.0)
    assert summary["median_seconds_per_step"] == 1.0
    assert summary["exposed_seconds_per_step"] == pytest.approx(1.0)
    assert summary["payload_bytes_per_worker_per_step"] == 1.0


def test_a_run_without_steps_has_no_figures():
    assert set(Totals().summary().values()) == {None}


class Traced:
    """An engine that has recorded some intervals."""

    intervals = (
        Interval("communication", "all_reduce", 11.0, 13.0, 5),
        Interval("wait", "all_reduce", 12.0, 13.0, 5),
        Interval("wait", "evaluation", 15.0, 16.0, 5),
    )

    def trace(self, on):
        self.on = on


def test_computation_is_what_is_left_between_waits():
    timeline = Timeline(Traced(), 3, 0, 4, origin=10.0)
    timeline.end(5, 11.0, 14.0)
    (spans,) = run_threads(1, lambda comm: timeline.gather(comm, 8, last=False))
    found = [(span["kind"], span["start"], span["end"]) for span in spans]
    assert found == [("compute", 1.0, 2.0), ("communication", 1.0, 3.0), ("wait", 2.0, 3.0), ("compute", 3.0, 4.0)]
    assert {span["rank"] for span in spans} == {3}
    assert run_threads(1, lambda comm: timeline.gather(comm, 9, last=True)) == [[]]


def test_the_window_of_the_timeline_opens_after_the_first_steps():
    engine = Traced()
    timeline, seen = Timeline(engine, 0, 100, 2), []
    for step in range(100, 110):
        timeline.begin(step)
        seen.append(engine.on)
    assert [100 + i for i, on in enumerate(seen) if on] == [104, 105]


def test_an_interface_is_counted_only_between_start_and_stop(monkeypatch):
    readings = iter([Traffic(10, 1), Traffic(15, 2), Traffic(50, 9), Traffic(51, 9)])
    monkeypatch.setattr("thinwire.lab.runs.measure.read_counters", lambda _: next(readings))
    counter = InterfaceCounter("eth0")
    for _ in range(2):
        counter.start()
        counter.stop()
    assert counter.total == Traffic(6, 1)


def test_without_an_interface_of_its_own_a_worker_counts_no_wire_bytes():
    for counter in (InterfaceCounter(None), InterfaceCounter("no-such-interface")):
        counter.start()
        counter.stop()
        assert counter.total is None


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings().steps = 3


@for_each([80, 83, 87])
def test_payload_is_that_of_whole_periods_wherever_the_clock_stops(steps: int) -> None:
    totals = Totals()
    # A round of 80 bytes every 8 steps, and a byte at every step.
    totals.add([Step(i, 0.0, 1.0, 80.0 * (i // 8) + i, 1.0, 0.0) for i in range(1, steps + 1)])
    assert totals.summary()["payload_bytes_per_worker_per_step"] == 11.0


def test_payload_of_a_run_that_has_just_begun_or_sends_nothing_is_its_mean() -> None:
    for sent in ([5.0], [5.0, 10.0], [0.0] * 9):
        totals = Totals()
        totals.add([Step(i, 0.0, 1.0, x, 1.0, 0.0) for i, x in enumerate(sent, 1)])
        assert totals.summary()["payload_bytes_per_worker_per_step"] == sent[-1] / len(sent)


def test_auto_is_for_attach_and_the_error_says_what_recommends_a_recipe() -> None:
    with pytest.raises(ConfigError, match=r"strategy='auto'.*`thinwire plan` recommends"):
        resolve({"task": "digits", "strategy": "auto", "workers": 2})
