# SPDX-License-Identifier: Apache-2.0
"""What trainers do besides training, with one worker: best models, callbacks in any order, several models."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

import thinwire
from tests.integrations.small import Net, Rows, optimizer_of, weights
from thinwire.errors import CheckpointError, ConfigError


@pytest.fixture(autouse=True)
def left_as_it_was() -> Iterator[None]:
    """Trainers set environment variables, and leave their process group."""
    before = dict(os.environ)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


# -- Hugging Face Trainer ----------------------------------------------------------------------------------------------


def trained(
    folder: Path, *callbacks: Any, resume: str | None = None, seed: int = 1, model: Any = None, **settings: Any
) -> Any:
    pytest.importorskip("transformers", reason="needs transformers")
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        learning_rate=0.05,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=seed,
        **{"max_steps": 4, "logging_steps": 1, "save_strategy": "no", **settings},
    )
    scores = iter(range(100, 0, -1))
    trainer = Trainer(
        model or Net(),
        arguments,
        train_dataset=Rows(),
        eval_dataset=Rows(8),
        callbacks=list(callbacks),
        compute_metrics=lambda _: {"score": next(scores)},
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def asks_at(step: int, *, stops: bool) -> Any:
    from transformers import TrainerCallback

    class Asks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == step:
                control.should_evaluate, control.should_training_stop = True, stops

    return Asks()


def test_the_best_model_stays_where_the_last_evaluation_was_not_saved(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    from safetensors.torch import load_file

    from thinwire.integrations.transformers import Callback

    every = {
        f"{what}_{name}": value for what in ("eval", "save") for name, value in (("strategy", "steps"), ("steps", 4))
    }
    best = {"load_best_model_at_end": True, "metric_for_best_model": "score", "greater_is_better": True}
    trainer = trained(tmp_path, asks_at(6, stops=True), Callback("LocalSGD(period=2)"), max_steps=40, **every, **best)
    assert trainer.state.global_step == 6 and trainer.state.best_global_step == 4
    saved = load_file(tmp_path / "checkpoint-4" / "model.safetensors")
    assert all(torch.equal(x, saved[name]) for name, x in trainer.model.state_dict().items())


def test_an_evaluation_asked_for_behind_the_callback_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    from thinwire.integrations.transformers import Callback

    with pytest.raises(ConfigError, match=r"an evaluation, which got the parameters of one worker.*last in the list"):
        trained(tmp_path, Callback("LocalSGD(period=2)"), asks_at(2, stops=False))
    trained(tmp_path, Callback("LocalSGD(period=2)"), eval_on_start=True, eval_strategy="steps", eval_steps=2)


@pytest.mark.slow
def test_resuming_takes_the_checkpoint_that_the_trainer_has_loaded(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    from thinwire.integrations.transformers import Callback

    saving = {"save_strategy": "steps", "save_steps": 2}
    for name, seed in (("a", 1), ("b", 2)):
        trained(tmp_path / name, Callback("LocalSGD(period=2)"), max_steps=2, seed=seed, **saving)
    there = str(tmp_path / "a" / "checkpoint-2")
    with pytest.raises(ConfigError, match=r"checkpoint-2 holds no state of the workers there. Pass Callback"):
        trained(tmp_path / "b", Callback("LocalSGD(period=2)"), resume=there, **saving)
    callback = Callback("LocalSGD(period=2)", resume_from=there)
    trained(tmp_path / "b", callback, resume=there, **saving)
    # The same script goes on later from what it has saved itself.
    steps: list[int] = []
    callback = Callback("LocalSGD(period=2)", resume_from=there)
    begin = callback.on_train_begin

    def noted(*given: Any, **more: Any) -> None:
        begin(*given, **more)
        assert callback.session is not None
        steps.append(callback.session.worker.step)

    callback.on_train_begin = noted  # type: ignore[method-assign]
    trained(tmp_path / "b", callback, resume=str(tmp_path / "b" / "checkpoint-4"), max_steps=6, **saving)
    assert steps == [4]


def test_a_model_whose_training_was_interrupted_can_be_trained_by_another_trainer(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    from transformers import TrainerCallback

    from thinwire.integrations.transformers import Callback

    class Interrupts(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            raise KeyboardInterrupt

    model, first = Net(), Callback("LocalSGD(period=2)")
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, first, Interrupts(), model=model)
    assert first.session is not None
    again = trained(tmp_path, Callback("LocalSGD(period=2)"), model=model)
    assert again.model is model and again.state.global_step == 4


def test_callbacks_in_front_find_the_agreed_model_when_training_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    from transformers import TrainerCallback

    from thinwire.integrations.transformers import Callback

    found: list[Any] = []

    class Uploads(TrainerCallback):
        """As W&B's does at the end, where WANDB_LOG_MODEL asks for it."""

        def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            found.extend(weights(more["model"]))

    # So that weights tell whether they are those that workers agree on. Right after an average nobody would ask.
    monkeypatch.setattr(thinwire.LocalSGD, "average", lambda self, r, at="now": torch.full_like(r.x, 7.0))
    trainer = trained(tmp_path, Uploads(), Callback("LocalSGD(period=3)"), save_strategy="steps", save_steps=4)
    assert found and all(bool((x == 7).all()) for x in (*found, *weights(trainer.model)))


# -- Accelerate --------------------------------------------------------------------------------------------------------


def test_several_models_each_find_their_own_state_again(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate")
    from accelerate import Accelerator

    from thinwire.integrations.accelerate import attach

    accelerator = Accelerator(cpu=True)

    def prepared(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(4, 1)
        return accelerator.prepare(model, optimizer_of(model))

    first, second = prepared(1), prepared(2)
    workers = [attach(accelerator, *each, "LocalSGD(period=2)") for each in (first, second)]
    before = [weights(model) for model, _ in (first, second)]
    accelerator.save_state(str(tmp_path))
    for model, _ in (first, second):
        nn.init.zeros_(model.weight)
    accelerator.load_state(str(tmp_path))
    for (model, _), kept in zip((first, second), before, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(weights(model), kept, strict=True))
    # Attached again, it is the same place again, and what was detached is asked for nothing.
    workers[0].detach()
    workers[0] = attach(accelerator, *first, "SlowMo(period=2)")
    accelerator.save_state(str(tmp_path))
    accelerator.load_state(str(tmp_path))
    for worker in workers:
        worker.detach()
    assert sorted(each.name for each in tmp_path.iterdir() if each.is_dir()) == ["thinwire", "thinwire-2"]


def test_a_folder_that_was_saved_without_a_worker_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate")
    from accelerate import Accelerator

    from thinwire.integrations.accelerate import attach

    accelerator = Accelerator(cpu=True)
    model = Net()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    accelerator.save_state(str(tmp_path))
    with pytest.raises(ConfigError, match="log_every=0: must be at least 1"):
        attach(accelerator, model, optimizer, "LocalSGD(period=2)", log_every=0)
    worker = attach(accelerator, model, optimizer, "LocalSGD(period=2)")
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(CheckpointError, match=r"no subfolder 'thinwire' .*. Call load_state before attach"):
        accelerator.load_state(str(tmp_path))
    assert optimizer.param_groups[0]["lr"] == 0.5
    worker.detach()
    accelerator.load_state(str(tmp_path))
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_all_weights_are_saved_while_attached_and_after(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate")
    from accelerate import Accelerator
    from safetensors.torch import load_file

    from thinwire.integrations.accelerate import attach

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
            self.last.weight = self.first.weight

        def forward(self, x: Any) -> Any:
            return self.last(self.first(x))

    accelerator = Accelerator(cpu=True)
    models = [accelerator.prepare(each, optimizer_of(each)) for each in (Tied(), Tied())]
    workers = [attach(accelerator, *each, "LocalSGD(period=2)") for each in models]
    names = ["first.bias", "first.weight", "last.bias"]
    with workers[1].consensus():
        accelerator.save_model(models[1][0], str(tmp_path / "attached"))
    accelerator.save_state(str(tmp_path / "state"))
    # The second one is still attached when the first is not.
    workers[0].detach()
    accelerator.save_model(models[1][0], str(tmp_path / "second"))
    workers[1].detach()
    accelerator.save_model(models[1][0], str(tmp_path / "detached"))
    accelerator.save_state(str(tmp_path / "after"))
    assert "get_state_dict" not in vars(accelerator)
    for folder in ("attached", "state", "second", "detached", "after"):
        saved, own = load_file(tmp_path / folder / "model.safetensors"), models[1][0].state_dict()
        assert sorted(saved) == names, folder
        assert folder in ("state", "after") or all(torch.equal(x, own[name]) for name, x in saved.items())
    accelerator.load_state(str(tmp_path / "after"))
