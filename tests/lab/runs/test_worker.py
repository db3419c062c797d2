# SPDX-License-Identifier: Apache-2.0
"""One rank's run, in this process and in pairs of real ones."""

import json

import pytest

from tests.pool import run_processes
from tests.rules import refusals
from thinwire.errors import CheckpointError, ConfigError, NonFiniteError
from thinwire.lab.runs import RunFolder, Settings, resolve, work
from thinwire.lab.runs.recipes import BASELINES

SUMMARY = {
    "strategy",
    "task",
    "workers",
    "link",
    "steps",
    "seconds",
    "seconds_per_step",
    "payload_bytes_per_worker_per_step",
    "wire_bytes_per_worker_per_step",
    "compute_seconds_per_step",
    "exposed_seconds_per_step",
    "train_loss",
    "eval_loss",
    "eval_metric",
    "metric",
    "seconds_to_target",
    "target_loss",
}


def fields_of(**others):
    return {"task": "digits", "strategy": "LocalSGD(period=4)", "steps": 12, "eval_limit": 64, "seed": 3, **others}


def train(folder, resume=False, **others):
    return work(resolve(fields_of(**others)), folder, resume=resume)


def train_as_rank(folder, fields, resume):
    return work(Settings.from_json(fields), folder, resume=resume)


def train_pair(folder, *, resume=False, **others):
    settings = resolve(fields_of(workers=2, **others))
    folder.mkdir(exist_ok=True)
    return run_processes(2, train_as_rank, folder, settings.to_json(), resume)[0]


def lines(folder, key):
    return [line for line in RunFolder(folder).lines("metrics.jsonl") if key in line]


def tensors(folder, rank):
    (path,) = folder.glob(f"checkpoints/step-00000012/rank-{rank:04d}*.safetensors")
    return path


def test_a_worker_alone_writes_the_whole_folder(tmp_path):
    events = []
    summary = work(resolve(fields_of(eval_every=6)), tmp_path, emit=events.append)
    assert set(summary) >= SUMMARY
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    steps = lines(tmp_path, "loss")
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert set(steps[0]) == {
        "step",
        "seconds",
        "loss",
        "payload_bytes",
        "compute_seconds",
        "exposed_seconds",
        "step_seconds",
    }
    assert [line["step"] for line in lines(tmp_path, "eval_loss")] == [0, 6, 12]
    assert lines(tmp_path, "eval_loss")[-1]["eval_loss"] == summary["eval_loss"]
    config = json.loads((tmp_path / "config.json").read_text())
    assert {"thinwire", "torch", "python", "parameters", "paper", "host", "command", "lr"} <= set(config)
    assert {span["kind"] for span in RunFolder(tmp_path).lines("timeline.jsonl")} == {"compute"}
    assert [event["event"] for event in events][:2] == ["start", "evaluation"]


def test_training_seconds_never_go_back_and_leave_evaluation_out(tmp_path):
    train(tmp_path, eval_every=3)
    seconds = [line["seconds"] for line in lines(tmp_path, "loss")]
    assert seconds == sorted(seconds)
    steps = sum(line["step_seconds"] for line in lines(tmp_path, "loss"))
    assert seconds[-1] >= steps * 0.999


def test_a_target_ends_the_run_at_the_evaluation_that_reaches_it(tmp_path):
    summary = train(tmp_path, target_loss=2.0, eval_every=2, steps=200)
    assert summary["steps"] < 200
    reached = next(line for line in lines(tmp_path, "eval_loss") if line["eval_loss"] <= 2.0)
    assert (reached["step"], reached["seconds"]) == (summary["steps"], summary["seconds_to_target"])


def test_a_budget_of_seconds_ends_the_run(tmp_path):
    summary = train(tmp_path, steps=None, seconds=0.3)
    assert summary["steps"] > 1
    assert 0.2 < summary["seconds"] < 3


def test_a_loss_that_is_not_finite_names_rank_and_step_and_the_fix(tmp_path):
    with pytest.raises(NonFiniteError, match=r"rank 0, step \d+: the loss is .*lower --lr"):
        train(tmp_path, lr=1e30)


def loses_its_loss(folder, fields):
    """Rank 1's loss is NaN at step 5, of which the others would know nothing before the average of step 8."""
    from thinwire.lab.runs.training import Training

    take = Training._loss

    def loss(training, step):
        found = take(training, step)
        return found * float("nan") if step == 5 and training.context.control.rank == 1 else found

    Training._loss = loss
    try:
        work(Settings.from_json(fields), folder)
    except NonFiniteError as error:
        return str(error)
    return "done"


def test_a_loss_that_is_not_finite_ends_all_ranks_by_the_name_of_one_or_leaves_out_its_step(tmp_path):
    for policy, wanted in (("raise", "rank 1, step 5: the loss is nan"), ("skip", "done")):
        settings = resolve(fields_of(workers=2, nonfinite=policy))
        (tmp_path / policy).mkdir()
        found = run_processes(2, loses_its_loss, tmp_path / policy, settings.to_json())
        assert all(each.startswith(wanted) for each in found), found
    assert [line["metrics"]["skipped_steps"] for line in lines(tmp_path / "skip", "metrics")] == [1.0]
    assert json.loads((tmp_path / "skip" / "summary.json").read_text())["eval_loss"] < 3


def test_a_policy_that_a_method_does_not_have_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="nonfinite='skip' with ddp: PyTorch's own methods cannot leave out a step"):
        resolve(fields_of(strategy="ddp", nonfinite="skip"))
    with pytest.raises(ConfigError, match="nonfinite='zero': must be one of raise, skip, ignore"):
        resolve(fields_of(nonfinite="zero"))


@pytest.mark.slow
def test_a_run_that_resumes_is_bitwise_the_run_that_did_not_stop(tmp_path):
    train_pair(tmp_path / "whole", save_every=6, eval_every=6)
    train_pair(tmp_path / "parts", save_every=6, eval_every=6, steps=6)
    summary = train_pair(tmp_path / "parts", save_every=6, eval_every=6, resume=True)
    assert summary["steps"] == 12
    for rank in range(2):
        whole, parts = (tensors(tmp_path / name, rank) for name in ("whole", "parts"))
        assert whole.read_bytes() == parts.read_bytes()
    for key in ("loss", "eval_loss", "payload_bytes"):
        whole, parts = lines(tmp_path / "whole", key), lines(tmp_path / "parts", key)
        assert [(line["step"], line[key]) for line in whole] == [(line["step"], line[key]) for line in parts]


def test_as_many_checkpoints_are_kept_as_asked_for(tmp_path):
    train(tmp_path, save_every=3, eval_every=3, keep=2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000009", "step-00000012"]
    with pytest.raises(ConfigError, match="keep=0: must be at least 1"):
        train(tmp_path, save_every=3, keep=0)


def test_resuming_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        train(tmp_path, resume=True)


def test_resuming_from_a_truncated_checkpoint_names_the_file(tmp_path):
    train(tmp_path, save_every=12)
    part = tensors(tmp_path, 0)
    part.write_bytes(part.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"rank-0000.*\.safetensors.* damaged"):
        train(tmp_path, resume=True)


def test_a_whole_number_of_workers_must_have_started(tmp_path):
    with pytest.raises(ConfigError, match="1 processes were started"):
        train(tmp_path, workers=2)


def test_baselines_are_not_saved(tmp_path):
    baselines = [(name, "baselines") for name in BASELINES]
    refusals(baselines, lambda name: train(tmp_path, strategy=name, save_every=6, steps=6))()


def all_in_turn(folder, rows):
    return [work(Settings.from_json(fields), folder / name) for name, fields in rows]


@pytest.mark.slow
def test_baselines_see_the_same_data_and_count_what_they_send(tmp_path):
    names = {
        "all": "AllReduce()",
        "ddp": "ddp",
        "bf16": "ddp+bf16",
        "power": "ddp+powersgd(start=2)",
        "post": "post-local-sgd(period=2)",
    }
    fields = {
        key: resolve(fields_of(strategy=text, workers=2, steps=4, eval_every=4)).to_json()
        for key, text in names.items()
    }
    for key in names:
        (tmp_path / key).mkdir()
    found = dict(zip(names, run_processes(2, all_in_turn, tmp_path, list(fields.items()))[0], strict=True))
    sent = {key: summary["payload_bytes_per_worker_per_step"] for key, summary in found.items()}
    config = json.loads((tmp_path / "ddp/config.json").read_text())
    assert sent["ddp"] == sent["all"] == 4 * config["parameters"]
    assert sent["bf16"] == sent["ddp"] / 2
    assert sent["post"] == sent["ddp"] / 2
    assert sent["ddp"] / 2 < sent["power"] < sent["ddp"]
    assert found["ddp"]["eval_loss"] == pytest.approx(found["all"]["eval_loss"], rel=1e-5)
    assert found["bf16"]["eval_loss"] == pytest.approx(found["all"]["eval_loss"], rel=1e-2)
    first = {key: lines(tmp_path / key, "loss")[0]["loss"] for key in names}
    assert len(set(first.values())) == 1
    for key in names:
        assert found[key]["exposed_seconds_per_step"] > 0


def differing_seeds(folder, fields, seeds):
    import os

    mine = {**fields, "seed": seeds[int(os.environ["RANK"])]}
    try:
        work(Settings.from_json(mine), folder)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.slow
def test_ranks_with_different_settings_are_refused(tmp_path):
    fields = resolve(fields_of(workers=2)).to_json()
    for kind, words in run_processes(2, differing_seeds, tmp_path, fields, [1, 2]):
        assert kind == "MismatchError"
        assert "seed is 1 on rank 0 and 2 on rank 1" in words


def test_a_straggler_makes_its_own_steps_longer(tmp_path, monkeypatch):
    monkeypatch.setenv("THINWIRE_STALL", "1:20ms")
    monkeypatch.setenv("RANK", "0")
    summary = train(tmp_path, steps=6)
    assert summary["compute_seconds_per_step"] >= 0.02


def test_a_run_switches_on_the_way_and_resumes_with_the_strategy_that_took_over(tmp_path):
    events = []
    switch = "4: AllReduce(); 8: slow-mo(period=2)"
    whole = tmp_path / "whole"
    settings = resolve(fields_of(switch=switch, save_every=4))
    assert settings.switch == "4: AllReduce(); 8: SlowMo(period=2)"
    whole.mkdir()
    work(settings, whole, emit=events.append)
    done = [event for event in events if event["event"] == "switch"]
    assert [(event["step"], event["after"]) for event in done] == [(4, "AllReduce()"), (8, "SlowMo(period=2)")]
    # Saved at steps 4 and 8 by the strategy before, and at 12 by the last one.
    for stop in (4, 7, 8):
        folder = tmp_path / f"stopped-{stop}"
        folder.mkdir()
        train(folder, switch=switch, save_every=stop if stop != 8 else 4, steps=stop)
        again = train(folder, resume=True, switch=switch, save_every=4)
        assert again["steps"] == 12
        assert lines(folder, "eval_loss")[-1]["eval_loss"] == lines(whole, "eval_loss")[-1]["eval_loss"]


test_a_switch_that_cannot_be_read_is_refused = refusals(
    [
        ("SlowMo()", "must be STEP: RECIPE"),
        ("8: SlowMo(); 4: AllReduce()", "must be at least 1 and rise; 4 comes after 8"),
        ("4: ddp", "cannot take over"),
        ("4: SlowMoo()", "unknown"),
    ],
    lambda switch: resolve(fields_of(switch=switch)),
)
