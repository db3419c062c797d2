# SPDX-License-Identifier: Apache-2.0
"""What integrations refuse, and what they say then."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from thinwire import CheckpointError, ConfigError
from thinwire.integrations.session import Session, plain_model, plain_optimizer

pytestmark = pytest.mark.slow  # the tools take seconds to import


def test_a_trainer_that_resumes_needs_the_state_of_the_workers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from thinwire.integrations.transformers import loaded_from

    written = {"global_step": 4, "log_history": [{"step": 4, "loss": 0.1}]}
    state = SimpleNamespace(**json.loads(json.dumps(written)))
    arguments = SimpleNamespace(resume_from_checkpoint=None, output_dir=str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"resumes at step 4, and .*/checkpoint-4 holds no state .*resume_from=folder"
    ):
        loaded_from(arguments, state, None)
    (tmp_path / "elsewhere" / "thinwire").mkdir(parents=True)
    (tmp_path / "elsewhere" / "trainer_state.json").write_text(json.dumps(written))
    given = str(tmp_path / "elsewhere")
    assert loaded_from(arguments, state, given) == given


def test_a_module_with_several_optimizers_is_refused() -> None:
    pytest.importorskip("lightning")
    from thinwire.integrations.lightning import Callback

    with pytest.raises(ConfigError, match="2 optimizers"):
        Callback("AllReduce()").on_fit_start(SimpleNamespace(optimizers=[1, 2], precision_plugin=None), None)


def test_a_wrong_recipe_is_refused_before_ray_starts_workers() -> None:
    pytest.importorskip("ray.train", reason="needs ray[train]")
    from thinwire.integrations.ray_train import Config

    with pytest.raises(ConfigError, match="DiLoKo"):
        Config("DiLoKo()")


def test_a_checkpoint_without_workers_says_what_it_has(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), "LocalSGD(period=2)", {})
    with pytest.raises(CheckpointError, match=r"holds no complete checkpoint .*the weights that workers agree on"):
        session.load(tmp_path)
    session.finish()


def test_wrappers_are_looked_through_and_nothing_else() -> None:
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapper = type("LightningOptimizer", (), {"_optimizer": inner})()
    assert plain_optimizer(wrapper) is inner and plain_optimizer(inner) is inner
    with pytest.raises(ConfigError, match="is a Linear"):
        plain_optimizer(model)
    assert plain_model(torch.compile(model, backend="eager")) is model and plain_model(model) is model
