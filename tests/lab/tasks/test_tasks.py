# SPDX-License-Identifier: Apache-2.0
"""What a training loop may expect of every task, on the two tasks that need no files."""

from __future__ import annotations

import math
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.errors import ConfigError
from thinwire.lab import tasks
from thinwire.lab.tasks import Task
from thinwire.lab.tasks.language import text

FROM_FILES = ["mnist", "cifar10", "shakespeare", "wikitext2", "agnews", "a9a"]


@pytest.fixture(scope="module", params=["text", "digits"])
def task(request: pytest.FixtureRequest) -> Task:
    return tasks.load(request.param)


@pytest.fixture(scope="module")
def library() -> Task:
    return tasks.load("text")


@pytest.fixture(scope="module")
def digits() -> Task:
    return tasks.load("digits")


def same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def parameters(model: nn.Module) -> list[Tensor]:
    return list(model.state_dict().values())


def test_an_unknown_task_is_refused_with_the_names_and_the_closest_one() -> None:
    with pytest.raises(ConfigError, match=r"task='minst': unknown. The tasks are text, digits, .* mean 'mnist'\?"):
        tasks.load("minst")


def test_every_name_is_a_task() -> None:
    assert tasks.names() == ("text", "digits", *FROM_FILES)


@pytest.mark.parametrize("name", FROM_FILES)
def test_without_a_folder_the_error_shows_how_to_name_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THINWIRE_DATA", raising=False)
    monkeypatch.setattr("thinwire.lab.tasks.classification.hub_installed", lambda: False)
    with pytest.raises(ConfigError, match=rf"THINWIRE_DATA is not set, and task '{name}' reads .*. Set THINWIRE_DATA="):
        tasks.load(name)


@pytest.mark.parametrize("hub", [False, True])
@pytest.mark.parametrize("name", FROM_FILES)
def test_a_folder_that_is_not_there_is_named(
    name: str, hub: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THINWIRE_DATA", str(tmp_path / "nowhere"))
    monkeypatch.setattr("thinwire.lab.tasks.classification.hub_installed", lambda: hub)
    with pytest.raises(ConfigError, match=rf"nowhere is not a folder, and task '{name}' reads .*. Let THINWIRE_DATA"):
        tasks.load(name)


@pytest.mark.parametrize("name", FROM_FILES)
def test_a_file_that_is_not_there_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.lab.tasks.classification.hub_installed", lambda: False)
    with pytest.raises(ConfigError, match=rf"{tmp_path}/\S+ is missing, and task '{name}' needs it. Put it there"):
        tasks.load(name, data=tmp_path)


def test_a_batch_is_a_function_of_its_arguments_alone(task: Task) -> None:
    shard = task.shards(3, seed=5)[1]
    state = torch.get_rng_state()
    first = task.batch(shard, 7, batch_size=4, seed=1, rank=1)
    task.batch(shard, 8, batch_size=4, seed=1, rank=1)
    again = task.batch(task.shards(3, seed=5)[1], 7, batch_size=4, seed=1, rank=1)
    assert same(first, again)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("change", [{"step": 8}, {"seed": 2}, {"rank": 2}])
def test_another_step_seed_or_rank_draws_another_batch(task: Task, change: dict[str, int]) -> None:
    (shard,) = task.shards(1)
    usual = {"step": 7, "batch_size": 4, "seed": 1, "rank": 1}
    assert not same(task.batch(shard, **usual), task.batch(shard, **(usual | change)))


def test_models_depend_on_size_and_seed_and_leave_the_global_generator_alone(task: Task) -> None:
    for size in task.sizes[:2]:
        torch.manual_seed(1)
        state = torch.get_rng_state()
        first = task.model(size, seed=3)
        assert torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(2)
        again, other = task.model(size, seed=3), task.model(size, seed=4)
        assert all(torch.equal(a, b) for a, b in zip(parameters(first), parameters(again), strict=True))
        assert any(not torch.equal(a, b) for a, b in zip(parameters(first), parameters(other), strict=True))


def test_models_built_by_threads_at_once_are_the_same(library: Task) -> None:
    built: list[nn.Module] = []
    threads = [threading.Thread(target=lambda: built.append(library.model(seed=0))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    first = parameters(built[0])
    assert len(built) == 4
    for model in built[1:]:
        assert all(torch.equal(a, b) for a, b in zip(first, parameters(model), strict=True))


def test_a_model_on_the_meta_device_takes_no_memory(task: Task) -> None:
    with torch.device("meta"):
        model = task.model(task.sizes[-1], seed=0)
    assert all(tensor.is_meta for tensor in parameters(model))


def test_an_unknown_size_is_refused_with_the_sizes(digits: Task) -> None:
    with pytest.raises(ConfigError, match=r"size='huge': must be one of mlp, cnn, logistic"):
        digits.model("huge", seed=0)


def test_an_untrained_language_model_finds_all_bytes_about_equally_likely(library: Task) -> None:
    assert library.evaluate(library.model(seed=0), limit=20).loss == pytest.approx(math.log(256), rel=0.05)


def test_bits_per_byte_is_the_loss_in_bits(library: Task) -> None:
    found = library.evaluate(library.model(seed=0), limit=10)
    assert found.metric == pytest.approx(found.loss / math.log(2))
    assert found.targets == 10 * 128
    assert not library.higher_is_better


def test_a_few_steps_on_digits_bring_the_loss_down(digits: Task) -> None:
    model, defaults = digits.model(seed=0), digits.defaults
    optimizer = torch.optim.SGD(model.parameters(), lr=defaults.lr, momentum=defaults.momentum)
    (shard,) = digits.shards(1)
    before = digits.evaluate(model)
    for step in range(60):
        digits.loss(model, digits.batch(shard, step, batch_size=defaults.batch_size, seed=0, rank=0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = digits.evaluate(model)
    assert after.loss < before.loss / 4
    assert after.metric > 0.85 > before.metric


def test_the_loss_is_the_mean_cross_entropy(digits: Task) -> None:
    model = digits.model(seed=0)
    pixels, labels = digits.batch(digits.shards(1)[0], 0, batch_size=8, seed=0, rank=0)
    assert torch.equal(digits.loss(model, (pixels, labels)), F.cross_entropy(model(pixels), labels))


def test_evaluation_restores_the_mode_of_every_module(digits: Task) -> None:
    model = digits.model("cnn", seed=0)
    model.get_submodule("head").eval()
    before = [module.training for module in model.modules()]
    digits.evaluate(model, limit=10)
    assert [module.training for module in model.modules()] == before


def test_evaluation_sees_the_model_in_evaluation_mode_without_gradients(digits: Task) -> None:
    seen: list[tuple[bool, bool]] = []
    model = digits.model(seed=0)
    handle = model.register_forward_hook(lambda *_: seen.append((model.training, torch.is_inference_mode_enabled())))
    digits.evaluate(model, limit=10)
    handle.remove()
    assert set(seen) == {(False, True)}


def test_a_failing_evaluation_leaves_training_mode_on(digits: Task) -> None:
    model = nn.Sequential(nn.Linear(3, 10))
    with pytest.raises(RuntimeError):
        digits.evaluate(model, limit=10)
    assert model.training
    assert not torch.is_inference_mode_enabled()


def test_a_limited_evaluation_is_always_the_same_and_near_the_full_one(digits: Task) -> None:
    model = digits.model(seed=0)
    some = digits.evaluate(model, limit=100)
    assert some == digits.evaluate(model, limit=100)
    assert some.targets == 100
    assert some.loss == pytest.approx(digits.evaluate(model).loss, rel=0.2)
    assert digits.evaluate(model).targets == digits.evaluate(model, limit=10**9).targets == 359


def test_a_limit_below_one_is_refused(digits: Task) -> None:
    with pytest.raises(ConfigError, match=r"limit=0: an evaluation needs at least 1 example; None takes all"):
        digits.evaluate(digits.model(seed=0), limit=0)


def test_a_batch_size_of_zero_is_refused(digits: Task) -> None:
    with pytest.raises(ConfigError, match=r"batch_size=0: must be at least 1"):
        digits.batch(digits.shards(1)[0], 0, batch_size=0, seed=0, rank=0)


def test_equal_data_has_one_fingerprint_and_other_data_another(task: Task, library: Task) -> None:
    assert task.fingerprint() == tasks.load(task.name).fingerprint()
    assert text(nbytes=1_000_000).fingerprint() != library.fingerprint()


def test_library_text_has_the_requested_length_and_holds_out_whole_packages(library: Task) -> None:
    (everything,) = library.shards(1)
    (half,) = text(nbytes=2_000_000).shards(1)
    assert 3_000_000 < everything.units < 4_000_000
    assert 1_300_000 < half.units < 2_000_000


def test_too_little_library_text_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nbytes=5: must be at least 1,000,000"):
        text(nbytes=5)


def test_a_python_without_its_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    with pytest.raises(ConfigError, match=r"holds no library sources, .* task 'shakespeare'"):
        tasks.load("text")


def test_the_context_can_be_chosen() -> None:
    task = text(context=16, nbytes=1_000_000)
    inputs, targets = task.batch(task.shards(1)[0], 0, batch_size=2, seed=0, rank=0)
    assert inputs.shape == targets.shape == (2, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert task.model(seed=0)(inputs).shape == (2, 16, 256)
    with pytest.raises(ConfigError, match=r"context=0: must be at least 1 byte"):
        text(context=0)


def test_settings_are_known_for_each_optimizer(task: Task) -> None:
    assert task.defaults_for("sgd").optimizer == "sgd"
    assert task.defaults_for("adamw").optimizer == "adamw"
    assert task.defaults in (task.defaults_for("sgd"), task.defaults_for("adamw"))


def test_an_epoch_reads_as_much_as_the_shard_holds(task: Task) -> None:
    (shard,) = task.shards(1)
    read = 128 if task.name == "text" else 1
    steps = task.steps_per_epoch(shard, 16)
    assert (steps - 1) * 16 * read < shard.units <= steps * 16 * read


def test_digits_without_scikit_learn_name_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigError, match=r"task 'digits' comes with scikit-learn: pip install 'thinwire\[data\]'"):
        tasks.load("digits")
