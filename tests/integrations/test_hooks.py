# SPDX-License-Identifier: Apache-2.0
"""Codecs under PyTorch's own wrappers: DistributedDataParallel and FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.engine import batch, drawn, flat
from tests.pool import run_processes
from thinwire import Bf16, CheckpointError, Codec, ConfigError, run_threads
from thinwire.core.comm.group import comm_for
from thinwire.integrations.hooks import DdpHook, ddp_hook, fsdp_hook
from thinwire.methods.codecs.base import draw_key
from thinwire.methods.codecs.feedback import ErrorFeedback
from thinwire.methods.codecs.one_bit import OneBit
from thinwire.methods.codecs.quantize import Quantize
from thinwire.methods.codecs.top_k import TopK
from thinwire.methods.reduce.compressed_all_reduce import compressed_mean_

STEPS = 6


def net() -> nn.Sequential:
    return drawn(nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 2)))


def wrapped(codec: Codec) -> tuple[DistributedDataParallel, DdpHook]:
    """A network in buckets of a few hundred bytes, which DDP rebuilds after the first pass."""
    network = DistributedDataParallel(net(), bucket_cap_mb=0.0005)
    network.register_comm_hook(None, hook := ddp_hook(codec))
    return network, hook


def taken(network: nn.Module, optimizer: torch.optim.Optimizer, rank: int, first: int, stop: int) -> list[Tensor]:
    """The gradients of some steps, as the optimizer saw them."""
    seen: list[Tensor] = []
    for step in range(first, stop):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        (network(x) - y).square().mean().backward()
        seen.append(torch.cat([p.grad.reshape(-1) for p in network.parameters() if p.grad is not None]).clone())
        optimizer.step()
    return seen


def under_ddp() -> dict[str, Any]:
    comm = comm_for()
    rank = comm.rank
    results: dict[str, Any] = {}
    plain = DistributedDataParallel(net())
    taken(plain, torch.optim.SGD(plain.parameters(), lr=0.1), rank, 0, STEPS)
    for name, codec in {"bf16": Bf16(), "eight": Quantize(8, 16)}.items():
        network, hook = wrapped(codec)
        taken(network, torch.optim.SGD(network.parameters(), lr=0.1), rank, 0, STEPS)
        results[name] = (flat(network) - flat(plain)).abs().max().item()
        assert not hook.residuals()
    for name, codec in {"one bit": ErrorFeedback(OneBit(8)), "top": ErrorFeedback(TopK(0.1))}.items():
        network, hook = wrapped(codec)
        sent = taken(network, torch.optim.SGD(network.parameters(), lr=0.0), rank, 0, STEPS)
        residual = hook.residuals()
        error = torch.cat([residual[p].reshape(-1) for p in network.parameters()])
        results[name] = (torch.stack(sent).double().sum(0).tolist(), error.double().tolist(), flat(network).tolist())
        names = dict(network.module.named_parameters())
        state = hook.state_dict(names)
        other, again = wrapped(codec)
        again.load_state_dict(state, dict(other.module.named_parameters()))
        assert int(state["step"]) == STEPS
        assert torch.equal(torch.cat([e.reshape(-1) for e in again.residuals().values()]), error)
        more = taken(other, torch.optim.SGD(other.parameters(), lr=0.0), rank, STEPS, STEPS + 3)
        later = again.residuals()
        results[f"{name}, resumed"] = (
            torch.stack(more).double().sum(0).tolist(),
            torch.cat([later[p].reshape(-1) for p in other.parameters()]).double().tolist(),
        )
    return results


def own_gradients(rank: int, first: int, stop: int) -> Tensor:
    """The sum of a rank's own gradients at the parameters all start from."""
    network = net()
    return torch.stack(taken(network, torch.optim.SGD(network.parameters(), lr=0.0), rank, first, stop)).double().sum(0)


def test_ddp_with_error_feedback_loses_nothing_although_it_rebuilds_its_buckets() -> None:
    found = run_processes(2, under_ddp)
    for name in ("bf16", "eight"):
        assert all(result[name] < 0.02 for result in found)
    first = (own_gradients(0, 0, STEPS) + own_gradients(1, 0, STEPS)) / 2
    later = (own_gradients(0, STEPS, STEPS + 3) + own_gradients(1, STEPS, STEPS + 3)) / 2
    for name in ("one bit", "top"):
        sent, mine, _ = (torch.tensor(each) for each in found[0][name])
        theirs = torch.tensor(found[1][name][1])
        assert found[0][name][0] == found[1][name][0]
        assert (sent + (mine + theirs) / 2 - first).abs().max() < 2e-6 * STEPS
        more, mine, theirs = (
            *(torch.tensor(each) for each in found[0][f"{name}, resumed"]),
            torch.tensor(found[1][f"{name}, resumed"][1]),
        )
        assert (sent + more + (mine + theirs) / 2 - first - later).abs().max() < 4e-6 * STEPS


def under_fsdp() -> dict[str, list[float]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    group = mesh.get_local_rank("replicate")
    found: dict[str, list[float]] = {}
    for name, codec in FSDP.items():
        model = net()
        layers = [layer for layer in model if isinstance(layer, nn.Linear)]
        for layer in [*layers, model]:
            fully_shard(layer, mesh=mesh["shard"])
        comm, states = comm_for(mesh["replicate"]), [dict[str, Tensor]() for _ in layers]
        for layer, state in zip(layers, states, strict=True):
            assert isinstance(layer, FSDPModule)
            layer.set_all_reduce_hook(fsdp_hook(codec, comm if name == "exact" else mesh["replicate"], state=state))
        taken_sharded(model, group)
        assert all(("error" in state) == isinstance(codec, ErrorFeedback) for state in states)
        found[name] = torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()]).tolist()  # type: ignore[attr-defined]
    return found


FSDP: dict[str, Codec] = {"exact": ErrorFeedback(TopK(1.0)), "one bit": ErrorFeedback(OneBit(8)), "bf16": Bf16()}


def taken_sharded(model: nn.Module, group: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for step in range(STEPS):
        x, y = batch(group, step)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()


def test_replicas_under_fsdp_average_with_a_codec() -> None:
    found = run_processes(4, under_fsdp)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        sum((model(x) - y).square().mean() / 2 for x, y in (batch(0, step), batch(1, step))).backward()  # type: ignore[union-attr]
        optimizer.step()
    for name in FSDP:
        assert all(result[name] == found[0][name] for result in found)
        gap = (torch.tensor(found[0][name]) - flat(model)).abs().max()
        assert gap < {"exact": 1e-6, "one bit": 0.3, "bf16": 0.01}[name]
    assert found[0]["one bit"] != found[0]["exact"]


# -- without processes -------------------------------------------------------------------------------------------------


class ParameterBatch:
    """A bucket of some parameters, as DistributedDataParallel passes it."""

    def __init__(self, members: list[Tensor], last: bool, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self._members, self._last = members, last
        self._x = torch.randn(sum(p.numel() for p in members), generator=draw)
        self.sent = self._x.clone()

    def buffer(self) -> Tensor:
        return self._x

    def parameters(self) -> list[Tensor]:
        return self._members

    def is_last(self) -> bool:
        return self._last


def test_the_residual_follows_its_parameter_into_another_bucket() -> None:
    a, b, c = (nn.Parameter(torch.zeros(n)) for n in (20, 7, 33))
    hook = ddp_hook(ErrorFeedback(OneBit(8)))
    left = {p: torch.zeros(p.numel(), dtype=torch.float64) for p in (a, b, c)}
    for step, cut in enumerate([[[c], [b, a]], [[b, c], [a]], [[b, c], [a]], [[c], [a], [b]]]):
        buckets = [ParameterBatch(members, members is cut[-1], 10 * step + place) for place, members in enumerate(cut)]
        for bucket in buckets:
            hook(None, bucket)
        for bucket in buckets:
            sizes = [p.numel() for p in bucket.parameters()]
            residual = (bucket.sent.double() - bucket.buffer()).split(sizes)
            for p, piece in zip(bucket.parameters(), residual, strict=True):
                left[p] += piece
    assert set(hook.residuals()) == {a, b, c}
    for p, error in hook.residuals().items():
        assert (left[p] - error.reshape(-1)).abs().max() < 1e-5


def test_futures_are_done_with_the_last_bucket() -> None:
    a, b = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))
    hook = ddp_hook(ErrorFeedback(OneBit(8)))
    first = hook(None, ParameterBatch([a], False, 1))
    assert not first.done()
    second = hook(None, ParameterBatch([b], True, 2))
    assert first.done()
    assert second.done()
    assert hook.comm.step == 1


def test_a_hook_s_mean_is_the_compressed_mean_of_its_bucket() -> None:
    def body(comm: Any) -> tuple[Tensor, Tensor]:
        hook = DdpHook(Quantize(4, 8), lambda: comm, seed=3)
        bucket = ParameterBatch([nn.Parameter(torch.zeros(40))], True, comm.rank)
        mean = hook(None, bucket).value()
        x = bucket.sent.clone()
        comm.step = 0
        return mean, compressed_mean_(comm, x, Quantize(4, 8), {}, key=draw_key(3, 0)).wait()

    for mean, expected in run_threads(2, body):
        assert torch.equal(mean, expected)


def test_hooks_refuse_biased_codecs_without_feedback_and_the_state_of_another_model() -> None:
    with pytest.raises(ConfigError, match=r"Use ErrorFeedback\("):
        ddp_hook(OneBit())
    with pytest.raises(ConfigError, match=r"Use ErrorFeedback\("):
        fsdp_hook(TopK(), None)
    hook, weight = ddp_hook(ErrorFeedback(OneBit())), nn.Parameter(torch.zeros(4))
    with pytest.raises(CheckpointError, match=r"bias: a residual of shape \(4,\) does not fit"):
        hook.load_state_dict({"error/bias": torch.zeros(4), "step": torch.tensor(3)}, {"weight": weight})


def test_every_pass_draws_from_its_step_and_from_the_places_of_its_buckets() -> None:
    def body(comm: Any) -> list[tuple[Tensor, Tensor]]:
        hook, members = DdpHook(Quantize(4, 8), lambda: comm, seed=3), [nn.Parameter(torch.zeros(n)) for n in (24, 40)]
        pairs: list[tuple[Tensor, Tensor]] = []
        for step in range(3):
            buckets = [ParameterBatch([p], p is members[-1], 10 * step + comm.rank) for p in members]
            means = [hook(None, bucket) for bucket in buckets]
            comm.step = step
            for mean, bucket, offset in zip(means, buckets, (0, 24), strict=True):
                key, x = draw_key(3, step, offset=offset), bucket.sent.clone()
                pairs.append((mean.value(), compressed_mean_(comm, x, Quantize(4, 8), {}, key=key).wait()))
            comm.step = step + 1
        return pairs

    for pairs in run_threads(2, body):
        assert all(torch.equal(mean, expected) for mean, expected in pairs)
