# SPDX-License-Identifier: Apache-2.0
"""A task made of a user's own functions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from thinwire.errors import ConfigError
from thinwire.lab.tasks import Task
from thinwire.lab.tasks.own import OwnFunctions, check_own, own_task


def linear() -> nn.Module:
    return nn.Linear(4, 3)


def rows(count: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(4.0 * count).view(count, 4), torch.arange(count) % 3


def shuffled(rank: int, size: int, seed: int) -> DataLoader:
    return DataLoader(TensorDataset(*rows()), batch_size=2, shuffle=True)


def task_of(model=linear, data=shuffled, loss=F.cross_entropy, size: int = 2, seed: int = 0) -> Task:
    functions = OwnFunctions(model, data, loss, "train:model", "train:data", "train:loss" if loss else None)
    return own_task(functions, size=size, seed=seed)


def batch(task: Task, step: int, rank: int = 0):
    return task.batch(task.shards(2)[rank], step, batch_size=1, seed=0, rank=rank)


def test_shuffled_batches_are_a_function_of_seed_rank_and_step() -> None:
    one, other = task_of(), task_of()
    seen = [batch(one, step)[1].tolist() for step in range(7)]
    # A resumed run begins in the middle of the third pass.
    assert batch(other, 6)[1].tolist() == seen[6]
    # Passes are shuffled anew, and each has all examples.
    passes = [[label for labels in part for label in labels] for part in (seen[0:3], seen[3:6])]
    assert passes[0] != passes[1] and sorted(passes[0]) == sorted(passes[1]) == [0, 0, 1, 1, 2, 2]
    assert [batch(one, step, rank=1)[1].tolist() for step in range(3)] != seen[:3]
    assert [batch(one, step)[1].tolist() for step in range(7)] == seen


def test_a_loader_with_a_generator_of_its_own_is_resumed_where_it_was() -> None:
    def own_order(rank: int, size: int, seed: int) -> DataLoader:
        order = torch.Generator().manual_seed(seed)
        return DataLoader(TensorDataset(*rows()), batch_size=2, shuffle=True, generator=order)

    one, other = task_of(data=own_order), task_of(data=own_order)
    seen = [batch(one, step)[0].tolist() for step in range(8)]
    assert batch(other, 7)[0].tolist() == seen[7]


def test_a_generator_that_ends_is_started_again() -> None:
    def generated(rank: int, size: int, seed: int):
        for number in range(2):
            yield torch.full((1, 4), float(number)), torch.tensor([0])

    task = task_of(data=generated)
    assert [float(batch(task, step)[0][0, 0]) for step in range(5)] == [0, 1, 0, 1, 0]
    again = task_of(data=generated)
    assert float(batch(again, 3)[0][0, 0]) == 1


def test_a_loader_without_length_works() -> None:
    class Endless(IterableDataset):
        def __iter__(self):
            return ((torch.full((4,), float(number)), torch.tensor(0)) for number in range(1000))

    task = task_of(data=lambda rank, size, seed: DataLoader(Endless(), batch_size=2))
    assert float(batch(task, 3)[0][0, 0]) == 6


def test_the_model_follows_from_the_seed_and_the_global_generator_does_not_move() -> None:
    state = torch.random.get_rng_state()
    one, same, other = (task_of().model(seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.weight, same.weight) and not torch.equal(one.weight, other.weight)
    check_own(task_of(), seed=0)
    assert torch.equal(state, torch.random.get_rng_state())


def test_held_out_batches_are_evaluated_by_the_users_loss() -> None:
    inputs, targets = rows()
    held_out = [(inputs[:4], targets[:4]), (inputs[4:], targets[4:])]
    task = task_of(data=lambda rank, size, seed: ([(inputs, targets)], iter(held_out)))
    model = task.model(seed=0)
    found = task.evaluate(model)
    assert found.loss == pytest.approx(F.cross_entropy(model(inputs), targets).item(), rel=1e-5)
    assert found.metric == pytest.approx((model(inputs).argmax(1) == targets).float().mean().item())
    assert found.targets == 6 and task.evaluate(model).loss == found.loss
    assert task.evaluate(model, limit=4).targets == 4


class Words(nn.Module):
    """Logits of 3 classes for each of 5 positions, [batch, 3, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 15)

    def forward(self, inputs):
        return self.inner(inputs).view(-1, 3, 5)


def test_the_accuracy_is_that_of_several_targets_too_without_those_that_are_ignored() -> None:
    inputs, _ = rows()
    targets = torch.arange(30).view(6, 5) % 3
    targets[2:] = -100
    task = task_of(Words, lambda rank, size, seed: [(inputs, targets)])
    model = task.model(seed=0)
    right = model(inputs).argmax(1)[:2] == targets[:2]
    assert 0 < right.sum() < 10 and task.metric == "accuracy"
    assert task.evaluate(model).metric == pytest.approx(right.float().mean().item())
    other = task_of(
        Words, lambda rank, size, seed: [(inputs, targets.clamp(min=0))], nn.CrossEntropyLoss(ignore_index=0)
    )
    kept = targets[:2] > 0
    assert other.evaluate(model).metric == pytest.approx(right[kept].float().mean().item())


def test_the_accuracy_of_probabilities_is_that_of_the_largest() -> None:
    inputs, targets = rows()
    likely = F.one_hot(targets, 3) * 0.7 + 0.1
    task = task_of(data=lambda rank, size, seed: [(inputs, likely)])
    model = task.model(seed=0)
    right = model(inputs).argmax(1) == targets
    assert 0 < right.sum() < 6
    assert task.evaluate(model).metric == pytest.approx(right.float().mean().item())


@pytest.mark.parametrize("kind", ["a list", "a loader", "a generator"])
def test_held_out_data_without_a_batch_are_refused(kind: str) -> None:
    def data(rank: int, size: int, seed: int):
        short = DataLoader(TensorDataset(*rows()), batch_size=8, drop_last=True)
        return [rows()], {"a list": [], "a loader": short, "a generator": iter(())}[kind]

    with pytest.raises(ConfigError, match=r"--data train:data: its held-out batches are empty. Return at least one"):
        # Of a generator it is not known before the first evaluation.
        check_own(task_of(data=data), seed=0) if kind != "a generator" else task_of(data=data).evaluate(linear())


def test_without_held_out_batches_the_first_training_batches_are_evaluated() -> None:
    assert task_of().evaluate(linear()).targets == 6


class Lossy(nn.Module):
    """A model that returns its loss, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, inputs, labels):
        return SimpleNamespace(loss=F.cross_entropy(self.inner(inputs), labels))


def test_a_model_may_return_its_loss_and_take_a_dict() -> None:
    inputs, targets = rows()
    task = task_of(Lossy, lambda rank, size, seed: [{"inputs": inputs, "labels": targets}], None)
    assert task.loss(task.model(seed=0), batch(task, 0)).shape == ()
    assert task.metric == "loss" and check_own(task, seed=0) == 6


WRONG = {
    "no module": ({"model": lambda: 3}, "--model train:model: returned a int. It must return an nn.Module"),
    "model raises": ({"model": lambda: linear(1)}, "--model train:model: calling it failed: TypeError"),
    "no parameters": ({"model": nn.ReLU}, "no parameter that requires a gradient"),
    "data raises": (
        {"data": lambda rank: []},
        "--data train:data: calling it with rank=0, size=2, seed=0 failed: TypeErr",
    ),
    "no data": (
        {"data": lambda rank, size, seed: None},
        "--data train:data: returned None. Return the training batches",
    ),
    "no batches": ({"data": lambda rank, size, seed: []}, "rank 0: --data train:data has no batch for this rank"),
    "one tensor": ({"data": lambda rank, size, seed: rows()[0]}, "its training batches are a float32 tensor [6, 4]"),
    "text batch": (
        {"data": lambda rank, size, seed: ["a"]},
        "rank 0, step 0: --data train:data gave a str. A batch is",
    ),
    "no targets": ({"data": lambda rank, size, seed: [rows()[0]]}, "with --loss a batch is a tuple of the model's arg"),
    "wrong shape": (
        {"data": lambda rank, size, seed: [(torch.ones(2, 5), torch.zeros(2))]},
        "rank 0, step 0: --data train:data gave a tuple of (a float32 tensor [2, 5], a float32 tensor [2]), which "
        "--model train:model does not take: RuntimeError",
    ),
    "wrong targets": (
        {"data": lambda rank, size, seed: [(torch.ones(2, 4), torch.zeros(3, dtype=torch.int64))]},
        "--loss train:loss: cannot compare outputs a float32 tensor [2, 3] with targets a int64 tensor [3]",
    ),
    "loss per example": (
        {"loss": lambda x, y: F.cross_entropy(x, y, reduction="none")},
        "--loss train:loss: the loss of a batch is a float32 tensor [2]. It must be a scalar tensor",
    ),
    "model without loss": (
        {"loss": None, "data": lambda rank, size, seed: [torch.ones(2, 4)]},
        "without --loss the model must return its loss",
    ),
    "detached": ({"loss": lambda x, y: F.cross_entropy(x, y).detach()}, "has no gradient"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_function_is_named(case: str) -> None:
    changes, message = WRONG[case]
    with pytest.raises(ConfigError) as error:
        check_own(task_of(**changes), seed=0)
    assert message in str(error.value)
