# SPDX-License-Identifier: Apache-2.0
"""The weights are taken out by the model's own names, from a worker or from a checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import thinwire
from tests.battery.cases import STRATEGIES, is_first
from tests.battery.runs import Case, begin, go_on, smallest, with_
from tests.engine import Mixed, attach, batches, drawn, net, sgd, steps
from tests.grids import fast_where
from tests.problems import Irregular
from thinwire import (
    AcSA,
    AllReduce,
    CheckpointError,
    Comm,
    ConfigError,
    LocalSGD,
    NonFiniteError,
    PushSum,
    SlowMo,
    Star,
    Strategy,
    Worker,
    run_threads,
)
from thinwire.cli import main
from thinwire.lab.runs.exporting import export_checkpoint


class Tied(nn.Module):
    """Two names for one parameter, batch statistics, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.last = nn.Linear(3, 2)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(self.norm(self.first(x))))) * self.scale


def trained(comm: Comm, strategy: Strategy, model: Callable[[], nn.Module]) -> Worker:
    return steps(attach(comm, strategy, model=model()), batches(comm.rank, 5))


@pytest.mark.parametrize("model", [lambda: drawn(Tied()), lambda: drawn(Mixed())], ids=["tied", "mixed"])
@pytest.mark.parametrize("strategy", [AllReduce(), SlowMo(PushSum(Star("push-sum"), staleness=1), period=3)], ids=repr)
def test_the_consensus_model_is_loaded_by_load_state_dict(
    strategy: Strategy, model: Callable[[], nn.Module], tmp_path: Path
) -> None:
    def work(comm: Comm) -> dict[str, Tensor]:
        worker = trained(comm, strategy, model)
        assert worker.export(tmp_path / "folder" / "model.safetensors") == tmp_path / "folder" / "model.safetensors"
        worker.save(tmp_path / "run" / "checkpoints")
        with worker.consensus() as agreed:
            return {name: x.clone() for name, x in agreed.state_dict().items()}

    expected = run_threads(3, work)[0]
    export_checkpoint(tmp_path / "run", tmp_path / "offline.safetensors")
    for path in (tmp_path / "folder" / "model.safetensors", tmp_path / "offline.safetensors"):
        fresh = model()
        assert str(fresh.load_state_dict(load_file(path))) == "<All keys matched successfully>"
        for name, x in fresh.state_dict().items():
            torch.testing.assert_close(x, expected[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "each", fast_where(is_first, [each for each in STRATEGIES if "Irregular" not in str(each)]), ids=str
)
def test_a_checkpoint_of_every_strategy_is_exported_as_its_workers_would_evaluate_it(
    each: Case, tmp_path: Path
) -> None:
    setting = with_(each, size=smallest(each), dtype=torch.float32)

    def work(comm: Comm) -> dict[str, Tensor]:
        worker = go_on(begin(comm, setting), setting, 7)
        worker.save(tmp_path / "checkpoints")
        with worker.consensus() as model:
            found = {name: x.clone() for name, x in model.state_dict().items()}
        worker.detach()
        return found

    expected = run_threads(setting.size, work, timeout=20)[0]
    found = export_checkpoint(tmp_path / "checkpoints", tmp_path / "model.safetensors")
    assert (found.step, found.workers, found.elements) == (7, setting.size, 34)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors.keys() == expected.keys()
    for name, x in tensors.items():
        torch.testing.assert_close(x, expected[name], rtol=2e-6, atol=2e-7)


def test_two_workers_of_one_model_export_inside_the_consensus_of_the_other(tmp_path: Path) -> None:
    def work(comm: Comm) -> dict[str, Tensor]:
        model = net()
        one, other = (attach(comm, LocalSGD(4), model=model, optimizer=lambda _, i=i: sgd(model[i])) for i in (0, 2))
        for x, y in batches(comm.rank, 3):
            model.zero_grad()
            (model(x) - y).square().mean().backward()
            one.optimizer.step()
            other.optimizer.step()
        with pytest.raises(ConfigError, match=r"another worker trains a part.*inside the other worker's consensus"):
            one.export(tmp_path / "model.safetensors")
        with other.consensus():
            one.export(tmp_path / "model.safetensors")
            with one.consensus():
                return {name: x.clone() for name, x in model.state_dict().items()}

    expected = run_threads(2, work)[0]
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys() and all(torch.equal(x, expected[name]) for name, x in found.items())


class WithText(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def get_extra_state(self) -> Any:
        return "text"

    def set_extra_state(self, state: Any) -> None: ...


def test_what_cannot_be_exported_is_refused_on_all_ranks(tmp_path: Path) -> None:
    def work(comm: Comm) -> None:
        worker = trained(comm, AllReduce(), WithText)
        with pytest.raises(CheckpointError, match="_extra_state in the model's state_dict is a str"):
            worker.export(tmp_path / "model.safetensors")
        worker.save(tmp_path / "checkpoints")
        with pytest.raises(CheckpointError, match="Is a directory"):
            trained(comm, AllReduce(), net).export(tmp_path)
        bad = trained(comm, LocalSGD(100), net)
        if comm.rank == 1:
            bad.replicas[0].x[3] = torch.nan
        with pytest.raises(NonFiniteError, match=r"rank 0: .* is not finite"):
            bad.export(tmp_path / "model.safetensors")

    run_threads(2, work)
    assert not (tmp_path / "model.safetensors").exists()
    with pytest.raises(CheckpointError, match="'_extra_state' is not a parameter or buffer"):
        export_checkpoint(tmp_path / "checkpoints", tmp_path / "model.safetensors")


def test_an_optimizer_with_a_result_of_its_own_exports_it_and_its_checkpoint_is_refused(tmp_path: Path) -> None:
    model = net()
    worker = attach(None, AllReduce(), model=model, optimizer=lambda m: AcSA(m.parameters(), 0.05))
    steps(worker, batches(0, 3))
    tensors = load_file(worker.export(tmp_path / "model.safetensors"))
    for name, parameter in model.named_parameters():
        assert torch.equal(tensors[name], worker.optimizer.state[parameter]["aggregate"])
    worker.save(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match="the optimizer evaluates other parameters than it trains"):
        export_checkpoint(tmp_path / "checkpoints", tmp_path / "other.safetensors")


def test_a_recipe_of_classes_that_are_not_registered_is_exported_by_its_own_program_only(tmp_path: Path) -> None:
    run_threads(3, lambda comm: trained(comm, PushSum(Irregular()), net).save(tmp_path / "checkpoints"))
    with pytest.raises(CheckpointError, match=r"'Irregular' is unknown.*Export from the training program"):
        export_checkpoint(tmp_path / "checkpoints", tmp_path / "model.safetensors")


def test_the_command_line_exports_a_run_or_one_of_its_checkpoints(tmp_path: Path, capsys: Any) -> None:
    run = tmp_path / "run"
    run_threads(2, lambda comm: trained(comm, LocalSGD(3), net).save(run / "checkpoints"))
    for source in (run, run / "checkpoints", run / "checkpoints" / "step-00000005"):
        assert main(["export", str(source), str(tmp_path / "out.safetensors")]) == 0
        words = " ".join(capsys.readouterr().out.split())
        assert "step 5 of 2 workers under LocalSGD(period=3)" in words and "32 numbers in 4 tensors" in words
        net().load_state_dict(load_file(tmp_path / "out.safetensors"))


def test_the_command_line_refuses_what_holds_no_model(tmp_path: Path, capsys: Any) -> None:
    run_threads(2, lambda comm: trained(comm, LocalSGD(3), net).save(tmp_path / "damaged"))
    file = next((tmp_path / "damaged" / "step-00000005").glob("rank-0001-*"))
    file.write_bytes(file.read_bytes()[:-1])
    run_threads(2, lambda comm: trained(comm, LocalSGD(3), net).save(tmp_path / "lacking"))
    (tmp_path / "lacking" / "step-00000005" / "rank-0001.json").unlink()
    shutil.copytree(tmp_path / "damaged", tmp_path / "blocks" / "shard-0-of-2")
    for folder, code, words in (
        ("nowhere", 2, "nowhere: no such folder"),
        ("lacking", 1, "holds no complete checkpoint"),
        ("damaged", 1, "is damaged"),
        ("blocks", 1, "holds the blocks of a sharded model"),
    ):
        assert main(["export", str(tmp_path / folder), str(tmp_path / "out.safetensors")]) == code
        assert words in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out.safetensors").exists()
    assert main(["export", str(tmp_path / "damaged"), str(tmp_path / "out.bin")]) == 2
    assert "must end in .safetensors" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_an_export_is_loaded_by_from_pretrained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # a thread that would be left behind

    def work(comm: Comm) -> dict[str, Tensor]:
        torch.manual_seed(comm.rank)
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16))
        worker = thinwire.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "LocalSGD(period=4)", comm=comm)
        ids = torch.arange(6)[None] + comm.rank
        model(input_ids=ids, labels=ids).loss.backward()
        worker.optimizer.step()
        worker.export(tmp_path / "model.safetensors")
        if comm.rank == 0:
            model.config.save_pretrained(tmp_path)
        with worker.consensus() as agreed:
            return {name: x.clone() for name, x in agreed.state_dict().items()}

    want = run_threads(2, work)[0]
    found = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).state_dict()
    assert want.keys() == found.keys() and all(torch.equal(x, found[name]) for name, x in want.items())


class Masked(nn.Module):
    """A mask of infinities, which is a constant, and statistics of a norm, which are not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 2), nn.BatchNorm1d(2)
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))


def test_a_mask_of_infinities_is_exported(tmp_path: Path) -> None:
    def work(comm: Comm) -> None:
        worker = trained(comm, LocalSGD(3), lambda: drawn(Masked()))
        worker.export(tmp_path / "model.safetensors")
        worker.save(tmp_path / "checkpoints")

    run_threads(2, work)
    export_checkpoint(tmp_path / "checkpoints", tmp_path / "saved.safetensors")
    for name in ("model", "saved"):
        found = load_file(tmp_path / f"{name}.safetensors")
        assert torch.equal(found["mask"], torch.full((2, 2), -torch.inf).triu(1))


@pytest.mark.parametrize(
    ("name", "value"), [("mask", torch.nan), ("norm.running_var", torch.inf), ("layer.weight", -torch.inf)]
)
def test_what_training_has_made_infinite_is_not_exported(name: str, value: float, tmp_path: Path) -> None:
    worker = steps(attach(None, LocalSGD(3), model=drawn(Masked())), batches(0, 2))
    worker.model.state_dict()[name].view(-1)[0] = value
    with pytest.raises(NonFiniteError, match=f"rank 0: {name} is not finite"):
        worker.export(tmp_path / "model.safetensors")
