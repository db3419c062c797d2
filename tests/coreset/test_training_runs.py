# SPDX-License-Identifier: Apache-2.0
"""Runs that train on chosen examples only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.pool import run_processes
from tests.rules import refusals
from thinwire.coreset.baselines import Random
from thinwire.coreset.craig import Craig
from thinwire.errors import ConfigError
from thinwire.lab.runs import RunFolder, Settings, resolve, work
from thinwire.lab.runs.coreset import POLICIES, ChosenData, parse_policy
from thinwire.lab.tasks import Defaults, Task, load
from thinwire.lab.tasks.base import ACCURACY
from thinwire.lab.tasks.data.examples import Images, labelled
from thinwire.lab.tasks.models.classifiers import Logistic


def request(**others: Any) -> dict[str, Any]:
    return {"task": "digits", "strategy": "LocalSGD(period=4)", "steps": 12, "eval_limit": 64, "seed": 3, **others}


def train_as_rank(folder: Path, fields: dict[str, Any], resume: bool) -> Any:
    return work(Settings.from_json(fields), folder, resume=resume)


def train(folder: Path, *, resume: bool = False, workers: int = 1, **others: Any) -> Any:
    settings = resolve(request(workers=workers, **others))
    folder.mkdir(exist_ok=True)
    if workers == 1:
        return work(settings, folder, resume=resume)
    return run_processes(workers, train_as_rank, folder, settings.to_json(), resume)[0]


def lines(folder: Path, key: str) -> list[Any]:
    return [line for line in RunFolder(folder).lines("metrics.jsonl") if key in line]


def test_a_run_reports_what_it_chose_and_how_long_that_took(tmp_path: Path) -> None:
    summary = train(tmp_path, coreset="Craig(fraction=0.1, every=2)", steps=24)
    assert summary["coreset"] == repr(Craig(fraction=0.1, every=2))
    assert summary["coreset_points"] == 144
    assert summary["selections"] == 3, "24 steps of 32 are 4.8 epochs of 144 points"
    assert 0 < summary["selection_seconds"] < summary["seconds"]


def test_choosing_counts_as_training_time(tmp_path: Path) -> None:
    summary = train(tmp_path, coreset="Craig(fraction=0.1, every=1)")
    steps = lines(tmp_path, "loss")
    assert steps[0]["step_seconds"] > summary["selection_seconds"] / summary["selections"] / 10
    assert sum(line["step_seconds"] for line in steps) > summary["selection_seconds"]
    assert steps[-1]["seconds"] > summary["selection_seconds"]


def test_a_run_without_a_coreset_reports_none(tmp_path: Path) -> None:
    assert "coreset" not in train(tmp_path, steps=2)


@pytest.mark.parametrize("coreset", ["Craig(fraction=0.1, every=1)", "Craig(fraction=0.2, mode='strata', every=2)"])
def test_a_run_that_resumes_is_bitwise_the_run_that_did_not_stop(tmp_path: Path, coreset: str) -> None:
    kept = {"coreset": coreset, "save_every": 7, "eval_every": 7, "workers": 1}
    train(tmp_path / "whole", steps=14, **kept)
    train(tmp_path / "parts", steps=7, **kept)
    train(tmp_path / "parts", steps=14, resume=True, **kept)
    one, other = (model_of(tmp_path / name) for name in ("whole", "parts"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    whole, parts = lines(tmp_path / "whole", "loss"), lines(tmp_path / "parts", "loss")
    assert [(line["step"], line["loss"]) for line in whole] == [(line["step"], line["loss"]) for line in parts]


def model_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    (path,) = folder.glob("checkpoints/step-00000014/rank-0000*.safetensors")
    return load_file(path)


@pytest.mark.parametrize("name", list(POLICIES))
def test_every_policy_trains_the_digits_better_than_chance(tmp_path: Path, name: str) -> None:
    summary = train(tmp_path, coreset=f"{name}(fraction=0.2)", steps=30)
    assert summary["eval_metric"] > 0.5


@pytest.mark.slow
def test_torch_s_own_methods_train_on_chosen_examples_too(tmp_path: Path) -> None:
    summary = train(tmp_path, coreset="Craig", strategy="ddp", workers=2)
    assert summary["selections"] == 1


@pytest.mark.parametrize("text", [repr(kind()) for kind in POLICIES.values()])
def test_a_policy_s_repr_makes_it_again(text: str) -> None:
    assert repr(parse_policy(text)) == text


test_a_policy_that_cannot_be_read_is_refused = refusals(
    [
        ("Crag(fraction=0.1)", "did you mean Craig"),
        ("Craig(fractoin=0.1)", "has no 'fractoin'"),
        ("Craig(fraction=", "Write it like"),
        ("Craig(fraction=open('x'))", "'open' is unknown"),
        ("Craig(**{})", "is not understood"),
        ("LocalSGD()", "is a LocalSGD, not a coreset"),
        ("Craig(fraction=2.0)", "fraction=2.0"),
        ("Craig(every='often')", "every"),
    ],
    lambda text: resolve(request(coreset=text)),
)


def test_gradients_are_scaled_by_the_moments_of_adam_alone() -> None:
    text = "Craig(fraction=0.2, preconditioned=True)"
    for optimizer in ("sgd", "lamb", None):  # that of the task is sgd
        with pytest.raises(ConfigError, match="preconditioned=True is for adamw"):
            resolve(request(coreset=text, optimizer=optimizer))
    assert resolve(request(coreset=text, optimizer="adamw")).coreset == repr(Craig(fraction=0.2, preconditioned=True))


def test_tasks_without_separate_examples_refuse_a_coreset() -> None:
    with pytest.raises(ConfigError, match="no separate examples"):
        resolve(request(task="text", coreset="Craig"))


# -- the data of one rank ----------------------------------------------------------------------------------------------


def pictures(n: int = 40) -> Task:
    """Pictures that augmentation mirrors and shifts."""
    draw = np.random.default_rng(0)
    pixels, labels = draw.integers(0, 256, (n, 1, 8, 8)).astype(np.uint8), np.arange(n) % 2
    sets = Images(pixels, labels, shift=2)
    return Task("pictures", "", ACCURACY, {"l": lambda: Logistic(64, 2)}, labelled(sets, sets), (Defaults(),))


def chosen_data(task: Task, policy: Any, *, workers: int = 1, batch_size: int = 4) -> tuple[ChosenData, nn.Module]:
    model = task.model("l" if task.name == "pictures" else "mlp", seed=0)
    shard = task.shards(workers, split="iid", seed=0)[workers - 1]
    rest: dict[str, Any] = {"batch_size": batch_size, "seed": 0, "rank": workers - 1}
    return ChosenData(policy, task, shard, model=model, optimizer=None, **rest), model


def test_proxies_are_taken_from_pictures_as_they_are_and_training_sees_them_augmented() -> None:
    task = pictures()
    data, _ = chosen_data(task, Craig(fraction=0.5, every=1))
    table = data.examples.train
    plain, _ = table.take(np.arange(40))
    assert torch.equal(data.selector.points.features, plain.flatten(1)), "proxies were augmented"
    (x, _), _ = data.batch(0)
    places = data.sampler.places()[:4]
    rows = data.sampler.subset.indices[places]
    assert not torch.equal(x, plain[rows]), "training was not augmented"


def test_a_rank_trains_on_its_own_shard_alone() -> None:
    task = load("digits")
    data, _ = chosen_data(task, Craig(fraction=0.2), workers=3, batch_size=8)
    table = data.examples.train
    mine = {tuple(row.tolist()) for row in table.take(data.shard.indices)[0].flatten(1)}
    for step in range(20):
        (x, _), _ = data.batch(step)
        assert all(tuple(row.tolist()) in mine for row in x.flatten(1))


def test_an_epoch_visits_every_chosen_example_and_weights_have_mean_one() -> None:
    data, _ = chosen_data(load("digits"), Craig(fraction=0.1, every=1), batch_size=36)
    labels, weights = [], []
    for step in range(4):
        (_, y), w = data.batch(step)
        labels.append(y)
        weights.append(w)
    assert len(data.sampler.subset) == 144
    assert float(torch.cat(weights).mean()) == pytest.approx(1, rel=1e-5)
    wanted = data.selector.points.labels[data.sampler.subset.indices]
    assert sorted(torch.cat(labels).tolist()) == sorted(wanted.tolist())


def test_the_weighted_loss_of_even_weights_is_the_task_s_loss() -> None:
    task = load("digits")
    data, model = chosen_data(task, Random(fraction=0.5))
    batch, weights = data.batch(0)
    assert torch.allclose(weights, torch.ones(4))
    assert torch.allclose(data.loss(model, 0), task.loss(model, batch))


def test_weights_are_in_the_loss() -> None:
    task = load("digits")
    data, model = chosen_data(task, Craig(fraction=0.1))
    (x, y), weights = data.batch(0)
    assert float(weights.max() - weights.min()) > 0.1
    losses = torch.nn.functional.cross_entropy(model(x), y, reduction="none")
    assert torch.allclose(data.loss(model, 0), (losses * weights).mean())
