# SPDX-License-Identifier: Apache-2.0
"""What a loop does to an attached model or optimizer that would let workers train apart."""

from __future__ import annotations

import copy
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.engine import attach, batch, batches, endings, flat, momentum, net, squared_error, steps
from tests.pool import run_processes
from thinwire import AllReduce, Comm, ConfigError, LocalSGD, SlowMo, Strategy, Worker
from thinwire.lab.emulate import Network, available, parse_links, run_workers

Act = Callable[[Worker], object]


def add_group(worker: Worker) -> None:
    worker.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def append_group(worker: Worker) -> None:
    first = worker.optimizer.param_groups[0]
    worker.optimizer.param_groups.append({**first, "params": [nn.Parameter(torch.zeros(2))]})


def replace_in_group(worker: Worker) -> None:
    worker.optimizer.param_groups[0]["params"][-1] = nn.Parameter(torch.zeros(2))


def replace_parameters(worker: Worker) -> None:
    worker.model.load_state_dict({name: x.clone() for name, x in net(1).state_dict().items()}, assign=True)


def step_of_another(worker: Worker, first: tuple[nn.Parameter, ...] = ()) -> None:
    other = torch.optim.AdamW([*first, *worker.model.parameters()])
    x, y = batch(0, 0)
    (worker.model(x) - y).square().mean().backward()
    other.step()


def step_of_another_with_more(worker: Worker) -> None:
    step_of_another(worker, (nn.Parameter(torch.zeros(2)),))


def lone_move(worker: Worker) -> None:
    if worker.comm.rank == 1:
        worker.model.double().float()


def attach_again(worker: Worker) -> None:
    thinwire.attach(worker.model, momentum(worker.model), LocalSGD(2), comm=worker.comm)


def refused(act: Act, strategy: Strategy, size: int = 2) -> list[str]:
    """The errors of all threads that train for two steps, do something, and train on."""

    def work(comm: Comm) -> None:
        worker = steps(attach(comm, strategy), batches(comm.rank, 2))
        act(worker)
        steps(worker, batches(comm.rank, 4, first=2))

    return endings(size, work)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (add_group, "add_param_group() after attach"),
        (append_group, "the optimizer trains other parameters than at attach"),
        (replace_in_group, "the optimizer trains other parameters than at attach"),
        (replace_parameters, "4 parameters of the optimizer are no longer the model's"),
        (step_of_another, "AdamW moves parameters that are attached with another optimizer, SGD"),
        (step_of_another_with_more, "AdamW moves parameters that are attached with another optimizer, SGD"),
        (attach_again, "0.weight is attached already, with SGD"),
    ],
    ids=["add_param_group", "append", "replace", "load", "another optimizer", "another with more", "attach"],
)
@pytest.mark.parametrize("strategy", [LocalSGD(2), AllReduce()], ids=str)
def test_what_would_let_workers_train_apart_is_refused_on_all_ranks(act: Act, words: str, strategy: Strategy) -> None:
    for text in refused(act, strategy):
        assert words in text
        assert "attach" in text.partition(". ")[2] or "detach" in text.partition(". ")[2]


def test_what_one_rank_does_alone_is_raised_on_all_ranks() -> None:
    for text in refused(lone_move, AllReduce(), size=3):
        assert text.startswith("ConfigError: rank 1, step 2: parameters have moved to other memory since attach")
        assert "detach" in text.partition(". ")[2]


def test_parameters_that_were_replaced_are_refused_in_the_first_step() -> None:
    worker = attach(None, LocalSGD(2))
    replace_parameters(worker)
    with pytest.raises(ConfigError, match="4 parameters of the optimizer are no longer the model's"):
        steps(worker, batches(0, 1))


def test_a_second_optimizer_of_the_model_must_be_attached_too() -> None:
    model = net()
    body, head = (torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2))
    thinwire.attach(model, body, LocalSGD(2))
    squared_error(model, 0, 0).backward()
    torch.optim.SGD(net().parameters(), lr=0.1).step()
    with pytest.raises(ConfigError, match=r"SGD moves other parameters of a model that is attached.*Attach it too"):
        head.step()
    worker = thinwire.attach(model, head, LocalSGD(2))
    body.step()
    head.step()
    assert worker.step == 1


def test_what_has_replaced_a_step_is_there_again_after_detach() -> None:
    model = net()
    optimizer = momentum(model)
    calls: list[int] = []

    def noted(own: Any) -> None:
        calls.append(len(calls))
        momentum_step(own)

    momentum_step = type(optimizer).step
    mine = vars(optimizer)["step"] = MethodType(noted, optimizer)
    with thinwire.attach(model, optimizer, LocalSGD(2)):
        assert optimizer.step is not mine
    assert optimizer.step is mine
    with thinwire.attach(model, optimizer, LocalSGD(2)) as worker:
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        scheduled = optimizer.step
        steps(worker, batches(0, 3))
        assert worker.step == 3 and optimizer.step is scheduled
    assert optimizer.step is scheduled
    optimizer.step()
    assert calls == [0, 1, 2, 3]


def test_a_step_that_is_replaced_late_is_refused_after_a_consensus() -> None:
    def work(comm: Comm) -> None:
        worker = steps(attach(comm, LocalSGD(2)), batches(comm.rank, 4))

        def halve() -> None:
            for p in worker.model.parameters():
                p.data.mul_(0.5)

        vars(worker.optimizer)["step"] = halve
        with worker.consensus():
            pass
        steps(worker, batches(comm.rank, 1))

    for text in endings(2, work):
        assert "halve is in place of optimizer.step" in text


class Failing(torch.optim.SGD):
    """An optimizer whose second step fails once."""

    calls = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.calls += 1
        if self.calls == 2:
            raise MemoryError
        return super().step(closure)


def test_after_an_exception_in_a_step_another_optimizer_is_still_refused_and_training_continues() -> None:
    def work(comm: Comm) -> None:
        worker = attach(comm, LocalSGD(2), optimizer=lambda model: Failing(model.parameters(), lr=0.1))
        with pytest.raises(MemoryError):
            steps(worker, batches(comm.rank, 2))
        steps(worker, batches(comm.rank, 2, first=1))
        assert worker.step == 3
        worker.optimizer.calls = 1
        with pytest.raises(MemoryError):
            worker.optimizer.step()
        step_of_another(worker)

    for text in endings(2, work):
        assert "AdamW moves parameters that are attached with another optimizer, Failing" in text


def replace_layer(model: nn.Module) -> None:
    model.register_module("2", nn.Linear(5, 2))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (nn.Module.half, "parameters have moved to other memory since attach"),
        (replace_layer, "2 parameters of the optimizer are no longer the model's"),
    ],
)
@pytest.mark.parametrize("call", ["consensus", "save", "load", "export", "state_dict", "switch"])
def test_calls_after_parameters_have_moved_are_refused(
    call: str, change: Callable[[nn.Module], object], words: str, tmp_path: Path
) -> None:
    def work(comm: Comm) -> None:
        worker = steps(attach(comm, LocalSGD(4)), batches(comm.rank, 2))
        calls: dict[str, Callable[[], object]] = {
            "consensus": lambda: worker.consensus().__enter__(),
            "save": lambda: worker.save(tmp_path),
            "load": lambda: worker.load(tmp_path, missing_ok=True),
            "export": lambda: worker.export(tmp_path / "model.safetensors"),
            "state_dict": worker.state_dict,
            "switch": lambda: worker.switch("AllReduce()"),
        }
        change(worker.model)
        calls[call]()

    for text in endings(2, work):
        assert words in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("recipe", ["AllReduce()", "SlowMo(period=2)", "EASGD()"])
def test_parameters_that_are_frozen_later_are_refused(recipe: str) -> None:
    model = net()
    worker = steps(attach(None, thinwire.parse(recipe), model=model), batches(0, 2))
    model[0].requires_grad_(False)
    with pytest.raises(ConfigError, match=r"frozen since attach, and momentum.*worker\.detach\(\)"):
        steps(worker, batches(0, 1))


def test_parameters_that_are_frozen_later_stay_where_all_ranks_leave_them_without_a_gradient() -> None:
    model = net()
    worker = steps(attach(None, AllReduce(), model=model, find_unused=True), batches(0, 2))
    model[0].requires_grad_(False)
    before = model[0].weight.detach().clone()
    steps(worker, batches(0, 2))
    assert torch.equal(model[0].weight, before)


def test_after_detach_everything_is_allowed_again() -> None:
    worker = steps(attach(None, LocalSGD(2)), batches(0, 2))
    worker.detach()
    add_group(worker)
    worker.model.double().float()
    other = torch.optim.AdamW(worker.model.parameters())
    again = steps(thinwire.attach(worker.model, other, AllReduce()), batches(0, 2))
    assert again.step == 2


def test_an_optimizer_that_exchanges_parameters_itself_is_refused() -> None:
    class ZeroRedundancyOptimizer(torch.optim.SGD):
        """Of this name."""

    with pytest.raises(ConfigError, match="ZeroRedundancyOptimizer: it shards the optimizer state"):
        attach(None, LocalSGD(2), optimizer=lambda model: ZeroRedundancyOptimizer(model.parameters(), lr=0.1))


@pytest.mark.parametrize("strategy", [LocalSGD(2), AllReduce(), SlowMo(period=2)], ids=str)
def test_a_scaler_that_attach_does_not_know_of_is_named(strategy: Strategy) -> None:
    def work(comm: Comm) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        first = float("inf") if comm.rank == 1 else 1.0
        steps(
            attach(comm, strategy), batches(comm.rank, 4), scaler=scaler, factor=lambda place: 1.0 if place else first
        )

    for text in endings(3, work):
        assert "a GradScaler calls the optimizer, and attach does not know of it" in text
        assert "Pass attach(..., scaler=scaler)" in text


def test_a_scaler_that_is_off_is_no_scaler() -> None:
    def work(comm: Comm) -> int:
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        return steps(attach(comm, LocalSGD(2)), batches(comm.rank, 1), scaler=scaler).step

    assert thinwire.run_threads(2, work, timeout=10) == [1, 1]


# -- inside DistributedDataParallel ------------------------------------------------------------------------------------


class Counted:
    """How many buckets a wrapper exchanges."""

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self.buckets = 0
        wrapper.register_comm_hook(None, self._count)

    def _count(self, _: object, bucket):  # type: ignore[no-untyped-def]
        self.buckets += 1
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future


def words_of(act: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as found:
        act()
    return str(found.value)


def train_inside(wrapper: DistributedDataParallel, worker: Worker) -> list[float]:
    for number in range(4):
        # A trainer sets this at every batch.
        wrapper.require_backward_grad_sync = True
        x, y = batch(dist.get_rank(), number)
        worker.optimizer.zero_grad()
        (wrapper(x) - y).square().mean().backward()
        worker.optimizer.step()
    return flat(worker.model).tolist()


def inside_ddp() -> dict[str, Any]:
    """A model in a wrapper: at attach, later, and in part."""
    rank, found = dist.get_rank(), dict[str, Any]()
    wrapper = DistributedDataParallel(net())
    found["attach"] = words_of(lambda: attach(None, AllReduce(), model=wrapper))

    worker = attach(None, AllReduce(), model=net())
    steps(worker, batches(rank, 1))
    later = DistributedDataParallel(worker.model)
    found["later"] = words_of(lambda: later(batch(rank, 0)[0]))

    part = net()
    part[2] = DistributedDataParallel(part[2])  # pyright: ignore
    found["part"] = words_of(lambda: attach(None, LocalSGD(2), model=part))

    for name, strategy in (("all", AllReduce()), ("local", LocalSGD(2))):
        worker = attach(None, strategy, model=net(), inside_ddp="mute")
        outside = DistributedDataParallel(worker.model)
        counted = Counted(outside)
        before = worker.comm.meter.payload_bytes
        found[f"muted {name}"] = train_inside(outside, worker)
        found[f"bytes {name}"] = worker.comm.meter.payload_bytes - before
        found[f"buckets {name}"] = counted.buckets

        plain = attach(None, strategy, model=net())
        before = plain.comm.meter.payload_bytes
        steps(plain, batches(rank, 4))
        found[f"plain {name}"] = flat(plain.model).tolist()
        found[f"plain bytes {name}"] = plain.comm.meter.payload_bytes - before

    wrapped = DistributedDataParallel(net())
    counted = Counted(wrapped)
    worker = attach(None, LocalSGD(2), model=wrapped, inside_ddp="mute")
    found["muted whole"] = train_inside(wrapped, worker)
    found["buckets whole"] = counted.buckets
    static = DistributedDataParallel(net(), static_graph=True)
    found["static"] = words_of(lambda: attach(None, LocalSGD(2), model=static, inside_ddp="mute"))
    return found


def test_a_model_inside_ddp_is_refused_or_the_wrapper_exchanges_nothing() -> None:
    for found in run_processes(2, inside_ddp):
        for name in ("attach", "later", "part"):
            assert "inside DistributedDataParallel, which averages gradients too" in found[name]
            assert 'inside_ddp="mute"' in found[name]
        assert "static_graph" in found["static"]
        for name in ("all", "local"):
            assert found[f"muted {name}"] == found[f"plain {name}"]
            assert found[f"bytes {name}"] == found[f"plain bytes {name}"] > 0
            assert found[f"buckets {name}"] == 0
        assert found["muted whole"] == found["plain local"]
        assert found["buckets whole"] == 0


def compiled_and_detached() -> dict[str, Any]:
    """A wrapper that is compiled while it is muted, and exchanges again when the worker is gone."""
    rank, found = dist.get_rank(), dict[str, Any]()
    plain = attach(None, LocalSGD(2), model=net())
    found["plain"] = flat(steps(plain, batches(rank, 4)).model).tolist()
    wrapper = DistributedDataParallel(net())
    counted = Counted(wrapper)
    worker = attach(None, LocalSGD(2), model=wrapper, inside_ddp="mute")
    compiled: Any = torch.compile(wrapper, backend="eager")
    for x, y in batches(rank, 4):
        worker.optimizer.zero_grad()
        (compiled(x) - y).square().mean().backward()
        worker.optimizer.step()
    found["compiled"], found["buckets"] = flat(wrapper).tolist(), counted.buckets
    worker.detach()
    wrapper(batch(rank, 4)[0]).sum().backward()
    found["after"] = counted.buckets
    later: Any = torch.compile(DistributedDataParallel(plain.model), backend="eager")
    found["later"] = words_of(lambda: later(batch(rank, 0)[0]))
    return found


def test_a_compiled_wrapper_is_muted_and_one_that_is_let_go_exchanges_again() -> None:
    for found in run_processes(2, compiled_and_detached):
        assert found["compiled"] == found["plain"] and found["buckets"] == 0
        assert found["after"] > 0
        assert "inside DistributedDataParallel, which averages gradients too" in found["later"]


@pytest.mark.parametrize("name", ["FullyShardedDataParallel", "DeepSpeedEngine"])
def test_wrappers_that_exchange_by_themselves_are_refused(name: str) -> None:
    kind: type[nn.Sequential] = type(name, (nn.Sequential,), {})
    with pytest.raises(ConfigError, match=f"the model's 0 is in {name}, which exchanges gradients and parameters"):
        attach(None, LocalSGD(2), model=nn.Sequential(kind(nn.Linear(3, 2))))


INSIDE = """
import json, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import thinwire
from thinwire.worker.worker import internals_of

STEPS, WIDTH = 8, 300

def sent() -> int:
    rows = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(row.partition(":")[2].split()[8]) for row in rows if row.strip().startswith("eth0:"))

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(WIDTH, WIDTH, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
worker = thinwire.attach(model, optimizer, "LocalSGD(period=4)", inside_ddp="mute", timeout=30)
dist.barrier()
before, payload = sent(), worker.comm.meter.payload_bytes
for _ in range(STEPS):
    optimizer.zero_grad()
    model(torch.ones(2, WIDTH)).square().mean().backward()
    optimizer.step()
internals_of(worker).wait_pending()
dist.barrier()
time.sleep(0.05)
print(json.dumps([sent() - before, worker.comm.meter.payload_bytes - payload]), flush=True)
dist.destroy_process_group()
"""
REASON = available()


@pytest.mark.slow
@pytest.mark.emulation
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_inside_a_muted_ddp_the_interfaces_carry_what_the_meter_counts() -> None:
    lines: list[str] = []
    with Network(parse_links("1gbit", 2)) as network:
        exits = run_workers(
            [sys.executable, "-c", INSIDE],
            2,
            network=network,
            environment={"OMP_NUM_THREADS": "1"},
            on_line=lambda rank, stream, line: lines.append(line),
            timeout=60,
        )
    assert [each.code for each in exits] == [0, 0], lines
    found = [json.loads(line) for line in lines if line.startswith("[")]
    assert len(found) == 2
    for carried, payload in found:
        # Two averages of a model; the gradients of eight steps would be four times as many bytes.
        assert payload == pytest.approx(2 * 300 * 300 * 4, rel=0.01)
        assert payload <= carried < 1.1 * payload


class Stateful(nn.Sequential):
    """A model that says itself what is pickled of it."""

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "saved": True}


def zero(module: nn.Module, inputs: object) -> None:
    """A hook of the user's own."""


@pytest.mark.parametrize("kind", [nn.Sequential, Stateful])
def test_copies_and_pickles_of_an_attached_model_hold_nothing_of_thinwire(kind: type[nn.Sequential]) -> None:
    model = kind(nn.Linear(3, 5), nn.Linear(5, 2))
    model.register_forward_pre_hook(zero)
    hooks = model._forward_pre_hooks
    worker = steps(attach(None, LocalSGD(2), model=model), batches(0, 2))
    whole = nn.Sequential(model)
    torch.save(whole, buffer := io.BytesIO())
    buffer.seek(0)
    allowed = [nn.Sequential, nn.Linear, kind, zero]
    with torch.serialization.safe_globals(allowed):
        loaded = torch.load(buffer)
    assert b"thinwire" not in buffer.getvalue()
    for other in (copy.deepcopy(whole)[0], loaded[0], copy.copy(model)):
        assert list(other._forward_pre_hooks.values()) == [zero]
        assert "__getstate__" not in vars(other)
        assert vars(other).get("saved", False) == (kind is Stateful)
        assert torch.equal(flat(other), flat(model))
        if other[0].weight is not model[0].weight:
            other.double()
            assert thinwire.attach(other, momentum(other), LocalSGD(2)).step == 0
    assert model._forward_pre_hooks is hooks
    assert len(hooks) == 3
    worker.detach()
    assert list(hooks.values()) == [zero]
    assert "__getstate__" not in vars(model)
