# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer with a thinwire strategy is the plain loop, bit for bit."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.small import BATCH, HALF, RATE, STEPS, Net, Rows, equal, optimizer_of, plain_loop, weights
from tests.pool import run_processes

pytestmark = pytest.mark.skipif(
    not (find_spec("transformers") and find_spec("accelerate")), reason="needs transformers and accelerate"
)


def trainer_of(folder: str, recipe: str, steps: int, *, width: int = 16, **settings: Any) -> Any:
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments

    from thinwire.integrations.transformers import Callback

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: object) -> Any:
            return SequentialSampler(Rows())

    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to=[],
        logging_steps=10,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **{"save_strategy": "no", **settings},
    )
    model = Net(width)
    return InOrder(
        model,
        arguments,
        train_dataset=Rows(),
        eval_dataset=Rows(8),
        optimizers=(optimizer_of(model), None),
        callbacks=[Callback(recipe)],
    )


def whole_and_resumed(folder: str, recipe: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    plain, half = plain_loop(recipe, clip=1.0), plain_loop(recipe, clip=1.0, steps=HALF)
    whole = trainer_of(f"{folder}/whole", recipe, STEPS)
    whole.train()
    saving = {"save_strategy": "steps", "save_steps": HALF, "eval_strategy": "steps", "eval_steps": HALF}
    first = trainer_of(f"{folder}/parts", recipe, STEPS, **saving)
    first.train()
    second = trainer_of(f"{folder}/parts", recipe, STEPS, **saving)
    second.train(resume_from_checkpoint=f"{folder}/parts/checkpoint-{HALF}")
    checkpoint = load_file(f"{folder}/parts/checkpoint-{HALF}/model.safetensors")
    return {
        "whole": equal(weights(whole.model), plain),
        "evaluated and saved on the way": equal(weights(first.model), plain),
        "resumed": equal(weights(second.model), plain),
        "the checkpoint": equal([checkpoint[name] for name in whole.model.state_dict()], half),
        "logged": [row["thinwire/bytes"] for row in whole.state.log_history if "thinwire/bytes" in row],
        "losses": [row["eval_loss"] for row in first.state.log_history if "eval_loss" in row],
    }


@pytest.mark.parametrize("recipe", ["DiLoCo(period=8)", pytest.param("AllReduce()", marks=pytest.mark.slow)])
def test_training_and_resuming_are_the_plain_loop_bit_for_bit(recipe: str, tmp_path: Path) -> None:
    results = run_processes(2, whole_and_resumed, str(tmp_path), recipe, seconds=110)
    for found in results:
        assert all(value for value in found.values()), found
        assert len(found["logged"]) == STEPS // 10 and found["logged"] == sorted(found["logged"])
    assert results[0]["losses"] == results[1]["losses"]
