"""What strategies may do with copies of a model of which each rank holds a block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from thinwire.errors import ConfigError
from thinwire.optimizers.lamb import Lamb
from thinwire.optimizers.one_bit_lamb import OneBitLamb
from thinwire.strategies.base import Strategy
from thinwire.strategies.gossip.ad_psgd import ADPSGD
from thinwire.strategies.gradients.one_bit import CompressedMomentum
from thinwire.strategies.leader.async_leader import AsyncLeaderSGD
from thinwire.strategies.push_sum.eager_push_sum import EagerPushSum
from thinwire.strategies.recipe import brief
from thinwire.strategies.stragglers.backup_workers import BackupWorkers
from thinwire.strategies.stragglers.parameter_server import ParameterServer
from thinwire.tensor2d.mesh import Mesh2D, Mesh3D
from thinwire.tensor2d.module import placed
from thinwire.worker.handshake import Facts, agree
from thinwire.worker.parameters import by_kind

_TIMED = (EagerPushSum, ADPSGD, AsyncLeaderSGD, BackupWorkers, ParameterServer)


def vectors_of(
    model: nn.Module, named: Mapping[str, nn.Parameter], mesh: Mesh3D | None
) -> Iterator[list[nn.Parameter]]:
    """The parameters that share a vector: those of one dtype and device, and apart from them what all rows hold alike.

    What a codec makes of an entry may depend on the entries beside it. If what is alike lay beside blocks, of which
    every row has others, rows would part.

    Args:
        model: on the mesh, if there is one.
        named: its trained parameters.
        mesh: the ranks; None is no mesh.
    """
    alike: set[int] = set()
    if mesh is not None and mesh.block.rows > 1:
        alike = {id(parameter) for parameter, placement in placed(model).values() if placement.replicated}
    for half in (False, True):
        chosen = [parameter for parameter in named.values() if (id(parameter) in alike) == half]
        yield from cast("Iterable[list[nn.Parameter]]", by_kind(chosen).values())


def fitting_block(mesh: Mesh3D | None, strategy: Strategy, optimizer: Optimizer, facts: Facts, *, scaled: bool) -> str:
    """A name for the part of the model that this rank holds, once everything is found to fit; empty without a mesh.

    Args:
        mesh: the ranks; None is no mesh.
        strategy: trains the copies together.
        optimizer: moves this rank's blocks.
        facts: that all blocks of a copy must have in common.
        scaled: whether a GradScaler takes part.

    Raises:
        ConfigError: the strategy or the optimizer would tear blocks of one model apart.
        MismatchError: ranks of one copy were started with different models, recipes, versions or seeds.
    """
    if mesh is None:
        return ""
    refuse_tearing(strategy, optimizer, mesh.block, scaled=scaled)
    device = optimizer.param_groups[0]["params"][0].device
    agree(mesh.block.whole, facts, device)
    return mesh.folder


def refuse_tearing(strategy: Strategy, optimizer: Optimizer, mesh: Mesh2D, *, scaled: bool) -> None:
    """Refuse what would tear blocks of one model apart.

    Raises:
        ConfigError: a method whose result depends on timing, which differs from block to block; or one that takes a
            decision by a norm, or by a gradient, of which this rank knows a part only.
    """
    if mesh.whole.size == 1:
        return
    here = f"on {mesh.rows}x{mesh.columns} blocks"
    if scaled:
        raise ConfigError(f"scaler {here}: ranks would skip different steps; train in bf16, which needs none")
    for method in _methods(strategy):
        if isinstance(method, _TIMED):
            raise ConfigError(
                f"{type(method).__name__} {here}: its results depend on timing, so that blocks of one model would come "
                "from different moments; use PushSum() or SlowMo()"
            )
        if isinstance(method, CompressedMomentum) and (method.max_norm is not None or method.warmup_steps is None):
            raise ConfigError(
                f"{brief(method)} {here}: a rank knows the norm of its own block only; give warmup_steps a number, and "
                "clip with clip_gradient_norm_(model, max_norm, mesh) before optimizer.step()"
            )
    if isinstance(optimizer, Lamb | OneBitLamb) and getattr(optimizer, "mesh", None) is None:
        raise ConfigError(
            f"{type(optimizer).__name__} {here}: its trust ratios need norms of whole tensors; use "
            "Lamb2D(params, model=model, mesh=mesh), or OneBitAdam"
        )


def _methods(strategy: Strategy) -> Iterator[Strategy]:
    """A recipe and the recipes within it."""
    yield strategy
    for field in fields(strategy):  # pyright: ignore[reportArgumentType]
        value: Any = getattr(strategy, field.name)
        if isinstance(value, Strategy):
            yield from _methods(value)
