# SPDX-License-Identifier: Apache-2.0
"""Saving and resuming: bit for bit as if the run had never stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import thinwire
from tests.engine import Mixed, adamw, attach, batches, drawn, flat, momentum, net, steps
from tests.pool import run_processes
from tests.problems import Irregular
from tests.rules import for_each
from thinwire import (
    AllReduce,
    CheckpointError,
    Comm,
    ConfigError,
    Gossip,
    LocalSGD,
    MismatchError,
    NonFiniteError,
    PushSum,
    Quantize,
    SlowMo,
    Strategy,
    Worker,
    run_threads,
)
from thinwire.lab.runs.exporting import export_checkpoint
from thinwire.worker.replica_state import pack
from thinwire.worker.worker import internals_of

WHOLE = {"model": True, "optimizer": True}


def two_rates(model: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.02}], lr=0.05, momentum=0.9)


def normed(seed: int = 0) -> nn.Sequential:
    """With a frozen layer and batch statistics."""
    model = drawn(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)), seed)
    model[0].requires_grad_(False)
    return model


def everything(worker: Worker) -> list[Tensor]:
    """All state of a run, as tensors."""
    momenta = [x.float() for state in worker.optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
    states = [x for replica in worker.replicas for x in replica.state.values()]
    return [*(x.clone() for x in worker.model.state_dict().values()), *momenta, *states]


def equal(xs: list[Tensor], ys: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


# -- in memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [LocalSGD(3), SlowMo(PushSum(Irregular()), period=3)], ids=repr)
def test_models_of_several_dtypes_and_rates_resume_bitwise(strategy: Strategy) -> None:
    def work(comm: Comm) -> bool:
        first = steps(attach(comm, strategy, model=drawn(Mixed()), optimizer=two_rates), batches(comm.rank, 4))
        state = first.state_dict(model=True, optimizer=True)
        steps(first, batches(comm.rank, 4, first=4))
        second = attach(comm, strategy, model=drawn(Mixed(), 3), optimizer=two_rates)
        second.load_state_dict(state)
        return equal(everything(steps(second, batches(comm.rank, 4, first=4))), everything(first))

    assert run_threads(3, work) == [True] * 3


def test_a_state_stays_as_it_was_taken() -> None:
    worker = steps(attach(None, SlowMo(period=2), optimizer=adamw), batches(0, 3))
    state = worker.state_dict(model=True, optimizer=True)
    taken = plain(state)
    steps(worker, batches(0, 3))
    assert plain(state) == taken
    worker.load_state_dict(state)
    steps(worker, batches(0, 3))
    assert plain(state) == taken


def plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return [[str(k), plain(v)] for k, v in value.items()]
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


# -- in files ----------------------------------------------------------------------------------------------------------


def interrupted(folder: str, strategies: list[Strategy]) -> list[bool]:
    """One rank: train, save, continue; then the same from the files, with dropout and a schedule."""
    folders = [Path(folder) / str(i) for i in range(len(strategies))]
    return [resumes(home, strategy) for home, strategy in zip(folders, strategies, strict=True)]


def resumes(folder: Path, strategy: Strategy) -> bool:
    def begin(seed: int) -> tuple[Worker, Any]:
        model = drawn(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 2)), seed)
        worker = attach(None, strategy, model=model, optimizer=adamw)
        return worker, torch.optim.lr_scheduler.CosineAnnealingLR(worker.optimizer, 12)

    def train(worker: Worker, schedule: Any, first: int, count: int) -> list[Tensor]:
        for data in batches(worker.comm.rank, count, first=first):
            steps(worker, [data])
            schedule.step()
        return everything(worker)

    worker, schedule = begin(0)
    train(worker, schedule, 0, 5)
    worker.save(folder, extra={"schedule": schedule.state_dict()})
    expected = train(worker, schedule, 5, 5)
    torch.rand(17)
    worker, schedule = begin(1)
    schedule.load_state_dict(worker.load(folder)["schedule"])
    return equal(train(worker, schedule, 5, 5), expected)


def test_processes_with_dropout_and_a_schedule_resume_bitwise(tmp_path: Path) -> None:
    strategies = [AllReduce(), LocalSGD(3), SlowMo(PushSum(), period=3), Gossip(), PushSum(Irregular())]
    assert run_processes(3, interrupted, str(tmp_path), strategies) == [[True] * len(strategies)] * 3


@pytest.mark.parametrize("strategy", [AllReduce(), LocalSGD(2)], ids=repr)
def test_extra_is_restored(strategy: Strategy, tmp_path: Path) -> None:
    def work(comm: Comm) -> bool:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        worker = attach(comm, strategy, scaler=scaler)
        schedule = torch.optim.lr_scheduler.OneCycleLR(worker.optimizer, 0.1, total_steps=20)
        for data in batches(comm.rank, 4):
            steps(worker, [data], scaler=scaler)
            schedule.step()
        extra = {
            "schedule": schedule.state_dict(),
            "scaler": scaler.state_dict(),
            "position": (comm.rank, [1, 2.5, None, True, "end"]),
            "order": torch.arange(4 + comm.rank),
            "by step": {0: 0.5, 1: 0.25},
        }
        worker.save(tmp_path, extra=extra)
        back = worker.load(tmp_path)
        torch.testing.assert_close(back.pop("order"), extra.pop("order"), rtol=0, atol=0)
        return back == extra

    assert run_threads(2, work) == [True, True]


def test_files_are_safetensors_and_json_and_hold_no_pickle(tmp_path: Path) -> None:
    def work(comm: Comm) -> None:
        worker = steps(attach(comm, SlowMo(Gossip(), period=3), optimizer=adamw), batches(comm.rank, 4))
        worker.save(tmp_path, extra={"tensor": torch.ones(2)})

    run_threads(2, work)
    files = sorted((tmp_path / "step-00000004").iterdir())
    assert [file.suffix for file in files] == [".safetensors", ".json"] * 2
    assert sorted({file.stem[:9] for file in files}) == ["rank-0000", "rank-0001"]
    for file in files:
        content = file.read_bytes()
        assert not content.startswith((b"\x80", b"PK")) and b"ctorch" not in content
        if file.suffix == ".json":
            json.loads(content)


# -- which checkpoint --------------------------------------------------------------------------------------------------


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("keep", "kept"), [(1, [6]), (2, [5, 6]), (None, [1, 2, 3, 4, 5, 6])])
def test_as_many_checkpoints_are_kept_as_asked_for(keep: int | None, kept: list[int], tmp_path: Path) -> None:
    worker = attach(None, LocalSGD(2))
    for data in batches(0, 6):
        steps(worker, [data]).save(tmp_path, keep=keep)
    assert names(tmp_path) == [f"step-{step:08d}" for step in kept]
    with pytest.raises(ConfigError, match=r"keep=0: must be at least 1 checkpoint\. None keeps all"):
        worker.save(tmp_path, keep=0)


def test_only_checkpoints_before_those_that_all_ranks_have_are_removed(tmp_path: Path) -> None:
    def work(comm: Comm) -> int:
        worker = attach(comm, LocalSGD(2))
        # Each rank has a disk of its own; that of rank 1 has lost all but the first checkpoint.
        own = tmp_path / str(comm.rank)
        for data in batches(comm.rank, 3):
            steps(worker, [data]).save(own)
        if comm.rank == 1:
            for step in (2, 3):
                (own / f"step-{step:08d}" / "rank-0001.json").unlink()
        comm.all_gather(torch.zeros(1)).wait()
        steps(worker, batches(comm.rank, 1, first=3)).save(own, keep=2)
        if comm.rank == 1:
            (own / "step-00000004" / "rank-0001.json").unlink()
        comm.all_gather(torch.zeros(1)).wait()
        again = attach(comm, LocalSGD(2))
        again.load(own)
        return again.step

    assert run_threads(2, work) == [1, 1]


def test_what_was_just_saved_stays_though_an_earlier_run_went_further(tmp_path: Path) -> None:
    worker = attach(None, LocalSGD(2))
    for data in batches(0, 5):
        steps(worker, [data]).save(tmp_path)
    home = steps(attach(None, LocalSGD(2)), batches(0, 1)).save(tmp_path)
    assert len(names(home)) == 2
    assert names(tmp_path) == [f"step-{step:08d}" for step in (1, 3, 4, 5)]


def test_saving_a_step_twice_keeps_the_second(tmp_path: Path) -> None:
    worker = steps(attach(None, LocalSGD(2)), batches(0, 3))
    worker.save(tmp_path, extra={"try": torch.tensor(1)})
    worker.save(tmp_path, extra={"try": torch.tensor(2)})
    assert int(worker.load(tmp_path)["try"]) == 2
    assert len(names(tmp_path / "step-00000003")) == 2


def test_files_of_a_killed_writer_are_ignored_and_removed(tmp_path: Path) -> None:
    worker = steps(attach(None, LocalSGD(2)), batches(0, 2))
    worker.save(tmp_path)
    killed = tmp_path / "step-00000003"
    killed.mkdir()
    for name in ["rank-0000-0123456789abcdef.safetensors", ".rank-0000.json.x1y2z3"]:
        (killed / name).write_bytes(b"half")
    (tmp_path / "step-00000002" / ".rank-0000.json.a1b2c3").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("not ours")
    assert worker.load(tmp_path) == {}
    assert worker.step == 2
    for data in batches(0, 4, first=2):
        steps(worker, [data]).save(tmp_path)
    assert names(tmp_path) == ["notes.txt", "step-00000004", "step-00000005", "step-00000006"]
    for step in (4, 5, 6):
        assert len(names(tmp_path / f"step-{step:08d}")) == 2


@pytest.mark.parametrize("where", ["nowhere", "file", "empty"])
def test_a_folder_without_a_checkpoint_is_refused(where: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()

    def work(comm: Comm) -> None:
        with pytest.raises(CheckpointError, match=rf"{where} holds no complete checkpoint for ranks 0, 1"):
            attach(comm, LocalSGD(2)).load(tmp_path / where)

    run_threads(2, work)


# -- what does not fit -------------------------------------------------------------------------------------------------


def other(comm: Comm | None, **settings: Any) -> Worker:
    strategy = settings.pop("strategy", LocalSGD(2))
    return attach(comm, strategy, **{"model": normed(), "optimizer": adamw, **settings})


def wider() -> nn.Module:
    model = drawn(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)))
    model[0].requires_grad_(False)
    return model


def thawed() -> nn.Module:
    return normed().requires_grad_(True)


def deeper() -> nn.Module:
    model = normed()
    model.append(nn.Linear(2, 2))
    return model


OTHER_RUNS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "recipe": (
        lambda: {"strategy": LocalSGD(4)},
        r"the strategy is LocalSGD\(period=2\) in the checkpoint and .*=4\) in",
    ),
    "seed": (lambda: {"seed": 3}, r"the seed is 0 in the checkpoint and 3 in this run"),
    "optimizer": (lambda: {"optimizer": momentum}, r"the optimizer is AdamW over groups of \[6\] .* and SGD over"),
    "groups": (
        lambda: {"optimizer": lambda m: torch.optim.AdamW([{"params": [p]} for p in m.parameters()])},
        r"groups of \[6\] parameters in the checkpoint and AdamW over groups of \[1, 1, 1, 1, 1, 1\]",
    ),
    "shape": (
        lambda: {"model": wider()},
        r"parameter 3\.weight is 2x4 float32 in the checkpoint and 3x4 float32 in this",
    ),
    "dtype": (
        lambda: {"model": normed().double()},
        r"1\.weight is 4 float32 in the checkpoint and 4 float64 in this run",
    ),
    "frozen": (
        lambda: {
            "model": thawed(),
            "optimizer": lambda m: torch.optim.AdamW([*m[1:].parameters(), *m[0].parameters()]),
        },
        r"parameter 0\.weight is missing in the checkpoint",
    ),
    "layer": (lambda: {"model": deeper()}, r"groups of \[6\] .* groups of \[8\]"),
}


@pytest.mark.parametrize("kind", list(OTHER_RUNS))
def test_a_checkpoint_of_another_run_is_refused_and_changes_nothing(kind: str, tmp_path: Path) -> None:
    def work(comm: Comm) -> None:
        steps(other(comm), batches(comm.rank, 3)).save(tmp_path)
        make, difference = OTHER_RUNS[kind]
        worker = other(comm, **make())
        before = everything(worker)
        with pytest.raises(CheckpointError, match=difference) as refused:
            worker.load(tmp_path)
        assert "step-00000003" in str(refused.value)
        assert equal(everything(worker), before)

    run_threads(2, work)


@pytest.mark.parametrize("again", [False, True])
def test_parts_of_two_runs_and_of_two_saves_never_load_together(again: bool, tmp_path: Path) -> None:
    def work(comm: Comm, seed: int, folder: Path) -> None:
        worker = steps(other(comm, model=normed(seed)), batches(comm.rank, 3))
        worker.save(tmp_path / "first")
        if again:
            worker.save(tmp_path / "second", extra={"try": 2})

    run_threads(2, lambda comm: work(comm, 0, tmp_path / "first"))
    if not again:
        run_threads(
            2, lambda comm: steps(other(comm, model=normed(1)), batches(comm.rank, 3)).save(tmp_path / "second")
        )
    for path in (tmp_path / "first" / "step-00000003").glob("rank-0001*"):
        path.unlink()
    for path in (tmp_path / "second" / "step-00000003").glob("rank-0001*"):
        path.rename(tmp_path / "first" / "step-00000003" / path.name)

    def load(comm: Comm) -> None:
        worker = other(comm)
        before = everything(worker)
        with pytest.raises(CheckpointError, match="the parts of ranks 0 and 1 are of two saves"):
            worker.load(tmp_path / "first")
        assert equal(everything(worker), before)

    run_threads(2, load)


def test_ranks_at_different_steps_save_nothing(tmp_path: Path) -> None:
    def work(comm: Comm) -> None:
        worker = steps(other(comm, strategy=LocalSGD(8)), batches(comm.rank, 3 + comm.rank))
        with pytest.raises(MismatchError, match=r"rank 0 is in save\(\) at step 3, rank 1 is in save\(\) at step 4"):
            worker.save(tmp_path)

    run_threads(2, work)
    assert not names(tmp_path)


def test_an_optimizer_finds_its_moments_by_name_whatever_the_order_of_its_parameters(tmp_path: Path) -> None:
    def square(model: nn.Module, *, backwards: bool) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        return torch.optim.AdamW(parameters[::-1] if backwards else parameters, lr=0.01)

    def model() -> nn.Sequential:
        return drawn(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)))

    first = steps(
        attach(None, LocalSGD(2), model=model(), optimizer=lambda m: square(m, backwards=False)), batches(0, 3)
    )
    first.save(tmp_path)
    second = attach(None, LocalSGD(2), model=model(), optimizer=lambda m: square(m, backwards=True))
    second.load(tmp_path)
    for worker in (first, second):
        steps(worker, batches(0, 3, first=3))
    assert torch.equal(flat(first.model), flat(second.model))


def test_a_model_in_another_memory_format_is_refused(tmp_path: Path) -> None:
    def begun(memory_format: torch.memory_format) -> Worker:
        model = drawn(nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten()))
        return attach(None, SlowMo(period=2), model=model.to(memory_format=memory_format))

    begun(torch.contiguous_format).save(tmp_path)
    with pytest.raises(CheckpointError, match="another order or memory format"):
        begun(torch.channels_last).load(tmp_path)


def test_torch_and_safetensors_take_a_state_dict_as_it_is(tmp_path: Path) -> None:
    def begun(seed: int) -> Worker:
        model = drawn(nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 2)), seed)
        return attach(None, SlowMo(period=2), model=model.to(memory_format=torch.channels_last), optimizer=adamw)

    draw = torch.Generator().manual_seed(0)
    data = [(torch.randn(2, 2, 3, 3, generator=draw), torch.zeros(2, 2)) for _ in range(6)]
    first = steps(begun(0), data[:3])
    state = first.state_dict(model=True, optimizer=True)
    save_file(state, tmp_path / "state.safetensors")
    torch.save(state, tmp_path / "state.pt")
    expected = everything(steps(first, data[3:]))
    for read in (load_file, lambda path: torch.load(path, weights_only=True)):
        second = begun(1)
        second.load_state_dict(read(tmp_path / ("state.safetensors" if read is load_file else "state.pt")))
        assert equal(everything(steps(second, data[3:])), expected)


def test_a_state_dict_holds_the_strategy_s_state_alone_unless_more_is_asked_for() -> None:
    def work(comm: Comm) -> bool:
        def begun(seed: int) -> Worker:
            return attach(comm, SlowMo(LocalSGD(2), period=4), model=normed(seed), optimizer=adamw)

        first = steps(begun(0), batches(comm.rank, 5))
        state = first.state_dict()
        model, optimizer = (deepcopy(each.state_dict()) for each in (first.model, first.optimizer))
        size = sum(x.numel() for x in first.replicas[0].state.values())
        assert all(isinstance(x, Tensor) for x in state.values())
        assert sum(x.numel() for name, x in state.items() if not name.endswith("/header")) <= size + 2
        expected = everything(steps(first, batches(comm.rank, 4, first=5)))
        first.detach()
        second = begun(1)
        before = everything(second)
        with pytest.raises(CheckpointError, match="Load the model before the worker, each rank its own"):
            second.load_state_dict(state)
        assert equal(everything(second), before)
        second.model.load_state_dict(model)
        second.optimizer.load_state_dict(optimizer)
        second.load_state_dict(state)
        return equal(everything(steps(second, batches(comm.rank, 4, first=5))), expected)

    assert run_threads(3, work) == [True] * 3


def test_another_number_of_workers_needs_the_models_and_optimizers_of_all() -> None:
    def state(comm: Comm, **parts: bool) -> dict[str, Tensor]:
        return steps(other(comm), batches(comm.rank, 3)).state_dict(**parts)

    states = [run_threads(2, lambda comm, parts=parts: state(comm, **parts)) for parts in ({}, WHOLE)]
    alone, whole = ({**first, **second} for first, second in states)
    worker = other(None)
    with pytest.raises(CheckpointError, match=r"[sS]ave worker\.state_dict\(model=True, optimizer=True\)"):
        worker.load_state_dict(alone)
    assert worker.step == 0
    worker.load_state_dict(whole)
    assert worker.step == 3


@for_each(
    [
        (lambda state: {}, "holds no rank's part"),
        (lambda state: {"0.weight": torch.zeros(2)}, "lacks 0.weight/header. Pass the result of Worker.state_dict"),
        (lambda state: {**state, "rank-0000/header": torch.zeros(3)}, "rank-0000: cannot be read"),
        (lambda state: without(state, "/anchor"), "lacks rank-0000/replicas/0/state/anchor. .*dcp.load"),
        (lambda state: {**state, "rank-0000/step": torch.tensor(-1)}, "step=-1: must be a number of steps"),
        (lambda state: with_header(state, format=7, thinwire="9.1"), "format 7, written by thinwire '9.1'"),
        (lambda state: with_header(state, tree=[]), "a rank's part is a list"),
    ]
)
def test_a_damaged_state_dict_is_refused_before_anything_is_changed(case: tuple[Callable[..., Any], str]) -> None:
    change, words = case
    worker = steps(attach(None, SlowMo(period=2)), batches(0, 3))
    state = worker.state_dict()
    before = everything(worker)
    with pytest.raises(CheckpointError, match=words):
        worker.load_state_dict(change(state))
    assert equal(everything(worker), before) and worker.step == 3


def without(state: dict[str, Tensor], end: str) -> dict[str, Tensor]:
    return {name: x for name, x in state.items() if not name.endswith(end)}


def with_header(state: dict[str, Tensor], **changes: Any) -> dict[str, Tensor]:
    header = json.loads(state["rank-0000/header"].numpy().tobytes())
    text = bytearray(json.dumps({**header, **changes}).encode())
    return {**state, "rank-0000/header": torch.frombuffer(text, dtype=torch.uint8)}


def test_a_state_dict_of_an_earlier_version_which_was_nested_is_still_loaded() -> None:
    first = steps(attach(None, SlowMo(period=2), optimizer=adamw), batches(0, 3))
    earlier = {"rank-0000": (pack(internals_of(first)),)}
    second = attach(None, SlowMo(period=2), model=net(5), optimizer=adamw)
    second.load_state_dict(earlier)
    assert equal(everything(second), everything(first)) and second.step == 3


def test_a_checkpoint_without_a_format_is_loaded(tmp_path: Path) -> None:
    worker = steps(attach(None, LocalSGD(2)), batches(0, 3))
    file = worker.save(tmp_path) / "rank-0000.json"
    body = json.loads(file.read_text())
    del body["format"], body["seal"]
    file.write_text(json.dumps({**body, "seal": hashlib.sha256(json.dumps(body).encode()).hexdigest()}))
    again = attach(None, LocalSGD(2), model=net(5))
    again.load(tmp_path)
    assert equal(everything(again), everything(worker))


def test_the_state_of_another_rank_is_refused() -> None:
    states = run_threads(
        2, lambda comm: steps(other(comm), batches(comm.rank, 3)).state_dict(model=True, optimizer=True)
    )

    def work(comm: Comm) -> None:
        with pytest.raises(CheckpointError, match="the rank is"):
            other(comm).load_state_dict(states[1 - comm.rank])

    run_threads(2, work)


def test_optimizer_state_of_a_wider_dtype_than_the_parameters_resumes_bitwise(tmp_path: Path) -> None:
    """Torch casts all state but `step` to the dtype of the parameter when it loads it."""

    def begun(seed: int) -> Worker:
        return attach(None, LocalSGD(2), model=drawn(nn.Linear(3, 2), seed).bfloat16(), optimizer=nadam)

    def nadam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.NAdam(model.parameters(), lr=0.1)

    data = [(x.bfloat16(), y.bfloat16()) for x, y in batches(0, 6)]
    first = steps(begun(0), data[:3])
    first.save(tmp_path)
    steps(first, data[3:])
    second = begun(1)
    second.load(tmp_path)
    assert equal(everything(steps(second, data[3:])), everything(first))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_parameters_that_are_not_finite_are_refused_and_the_last_good_checkpoint_stays(
    value: float, tmp_path: Path
) -> None:
    def work(comm: Comm) -> int:
        worker = steps(attach(comm, LocalSGD(8)), batches(comm.rank, 2))
        worker.save(tmp_path)
        steps(worker, batches(comm.rank, 1))
        if comm.rank == 1:
            worker.replicas[0].x[22] = value
        with pytest.raises(NonFiniteError, match=r"rank 1: parameter 2\.weight is not finite"):
            worker.save(tmp_path)
        worker.load(tmp_path)
        return worker.step

    assert run_threads(2, work) == [2, 2]
    assert names(tmp_path) == ["step-00000002"]


def test_a_checkpoint_is_read_without_the_library_that_wrote_it(tmp_path: Path) -> None:
    worker = steps(thinwire.attach(model := net(), momentum(model), LocalSGD(2)), batches(0, 3))
    home = worker.save(tmp_path)
    tensors = load_file(next(home.glob("*.safetensors")))
    for name, parameter in model.named_parameters():
        assert torch.equal(tensors[f"/state/parameters/{name}"], parameter)


def test_without_any_checkpoint_a_run_starts_where_that_is_allowed(tmp_path: Path) -> None:
    def work(comm: Comm) -> tuple[Any, int, Any, int]:
        worker = attach(comm, LocalSGD(2))
        first, step = worker.load(tmp_path / "run", missing_ok=True), worker.step
        steps(worker, batches(comm.rank, 3)).save(tmp_path / "run", extra={"epoch": 1})
        again = attach(comm, LocalSGD(2))
        return first, step, again.load(tmp_path / "run", missing_ok=True), again.step

    assert run_threads(2, work) == [({}, 0, {"epoch": 1}, 3)] * 2


def test_a_checkpoint_that_only_one_rank_sees_is_not_missing(tmp_path: Path) -> None:
    def work(comm: Comm) -> None:
        steps(attach(comm, LocalSGD(2)), batches(comm.rank, 3)).save(tmp_path / str(comm.rank))
        with pytest.raises(CheckpointError, match="holds no complete checkpoint for"):
            attach(comm, LocalSGD(2)).load(tmp_path / ("0" if comm.rank == 0 else "nowhere"), missing_ok=True)

    run_threads(2, work)


def test_a_url_is_refused_on_all_ranks_and_training_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def work(comm: Comm) -> None:
        worker = attach(comm, LocalSGD(2))
        for call in (worker.save, worker.load, lambda path: worker.export(f"{path}/model.safetensors")):
            with pytest.raises(CheckpointError, match=r"rank 0: s3://bucket/run.* is a URL\. Files are written"):
                call("s3://bucket/run")
        steps(worker, batches(comm.rank, 3)).save(tmp_path / "run")

    run_threads(2, work)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    worker = steps(attach(None, LocalSGD(2)), batches(0, 2))
    assert worker.save("~/run") == tmp_path / "run" / "step-00000002"
    assert worker.load("~/run") == {}
    assert worker.export("~/model.safetensors") == tmp_path / "model.safetensors"


def test_a_checkpoint_of_a_later_format_is_refused(tmp_path: Path) -> None:
    steps(worker := attach(None, LocalSGD(2)), batches(0, 2))
    file = worker.save(tmp_path) / "rank-0000.json"
    content = json.loads(file.read_text()) | {"format": 7, "thinwire": "9.1", "seal": "of another kind"}
    file.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"format 7, written by thinwire '9\.1'\. .* Update thinwire"):
        worker.load(tmp_path)


@pytest.mark.parametrize("part", [True, False])
def test_a_compiled_model_or_part_is_saved_by_its_own_names(part: bool, tmp_path: Path) -> None:
    plain, compiled = net(), net()
    if part:
        compiled[0] = torch.compile(compiled[0], backend="eager")
    else:
        compiled = torch.compile(compiled, backend="eager")
    worker = steps(attach(None, LocalSGD(8, codec=Quantize(4)), model=compiled), batches(0, 2))
    worker.save(tmp_path)
    again = attach(None, LocalSGD(8, codec=Quantize(4)), model=plain)
    again.load(tmp_path)
    assert torch.equal(flat(plain), flat(compiled))
    assert plain.load_state_dict(load_file(worker.export(tmp_path / "model.safetensors")))
    export_checkpoint(tmp_path, tmp_path / "saved.safetensors")
    assert plain.load_state_dict(load_file(tmp_path / "saved.safetensors"))


def test_the_names_of_compiled_models_that_earlier_versions_wrote_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr("thinwire.worker.parameters._COMPILED", "none")
        compiled = torch.compile(net(), backend="eager")
        worker = steps(attach(None, LocalSGD(8), model=compiled), batches(0, 2))
        home = worker.save(tmp_path, extra={"_orig_mod.x": "_orig_mod."})
        assert "_orig_mod.0.weight" in (home / "rank-0000.json").read_text()
    again = attach(None, LocalSGD(8))
    assert again.load(tmp_path) == {"_orig_mod.x": "_orig_mod."}
    assert torch.equal(flat(again.model), flat(compiled))


class Graph(nn.Module):
    """A layer behind a sparse matrix, with a float8 scale."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("adjacency", torch.eye(3).to_sparse())
        self.register_buffer("scale", torch.ones(1).to(torch.float8_e4m3fn))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.sparse.mm(self.adjacency, x.t()).t())


def test_sparse_and_float8_buffers_are_saved_resumed_and_exported(tmp_path: Path) -> None:
    def saves(comm: Comm) -> None:
        worker = steps(attach(comm, LocalSGD(2), model=drawn(Graph())), batches(comm.rank, 3))
        worker.save(tmp_path)
        worker.export(tmp_path / "model.safetensors")

    def loads(comm: Comm) -> None:
        worker = attach(comm, LocalSGD(2), model=drawn(Graph(), 1))
        worker.model.adjacency.values().fill_(5.0)
        worker.load(tmp_path)
        steps(worker, batches(comm.rank, 1))
        assert torch.equal(worker.model.adjacency.to_dense(), torch.eye(3))

    run_threads(2, saves)
    for size in (2, 3):
        run_threads(size, loads)
    export_checkpoint(tmp_path, tmp_path / "saved.safetensors")
    for name in ("model", "saved"):
        found = load_file(tmp_path / f"{name}.safetensors")
        assert torch.equal(found["adjacency"], torch.eye(3))
        assert found["scale"].dtype == torch.float8_e4m3fn
