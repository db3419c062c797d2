# SPDX-License-Identifier: Apache-2.0
"""The weights of a run's newest checkpoint, in one safetensors file by the model's own names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from thinwire.core.comm.threads import single_worker
from thinwire.core.replica.flat import Segment, flatten, views
from thinwire.core.replica.replica import Replica
from thinwire.core.storage.rank_file import RankFile
from thinwire.elastic.late_saves import newest_home
from thinwire.errors import CheckpointError, ConfigError, NonFiniteError
from thinwire.methods.strategies.base import Strategy
from thinwire.methods.strategies.recipe import parse
from thinwire.worker.checkpoint import (
    check_tensors,
    dense,
    facts_of,
    first_nonfinite,
    read_parts,
    step_of,
    whole_steps,
    write_weights,
)
from thinwire.worker.replica_state import STRATEGY, average_of, mean_of


@dataclass(frozen=True)
class Exported:
    """The written files.

    Attributes:
        path: the file.
        checkpoint: the folder that it is from.
        step: of that checkpoint.
        workers: how many have written it.
        strategy: their recipe.
        elements: numbers in the file.
        tensors: tensors in the file.
    """

    path: Path
    checkpoint: Path
    step: int
    workers: int
    strategy: str
    elements: int
    tensors: int


def export_checkpoint(folder: Path, path: Path) -> Exported:
    """Write the weights of a run's newest complete checkpoint; needs neither the model nor the workers.

    They are the parameters that the workers would evaluate, computed by the strategy from all parts; of a worker with
    `LateMerging`, those from which its round started.

    Args:
        folder: of a run, of checkpoints, or one checkpoint.
        path: of the file that is written.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, it holds blocks of a model, or the strategy's class is
            not known here.
        NonFiniteError: a parameter or a running statistic is NaN or infinite, or another buffer holds NaN.
    """
    inside = folder / "checkpoints"
    place = inside if inside.is_dir() else folder
    home, contents = _newest_of_run(newest_home(place) or place)
    first, states = contents[0], [content["state"] for content in contents]
    try:
        strategy = parse(states[0]["identity"][STRATEGY], imports=False)
        named: dict[str, Tensor] = {
            name: mean_of([state["others"][name] for state in states]) for name in states[0]["others"]
        }
        for i, replica in enumerate(states[0]["replicas"]):
            segments = _segments(replica["layout"], states[0]["parameters"])
            xs = [flatten([state["parameters"][s.name] for s in segments], segments) for state in states]
            if "late" in first:
                x = _common_of(strategy, xs[0], segments, [each["points"][i] for each in first["late"]["fragments"]])
            else:
                x = average_of(
                    strategy,
                    xs,
                    [state["replicas"][i] for state in states],
                    segments,
                    step=states[0]["step"],
                    seed=int(states[0]["identity"]["the seed"]),
                    at="now",
                )
            named |= {s.name: view for s, view in zip(segments, views(x, segments), strict=True)}
        tensors = {name: dense(named[x]) if x is not None else None for name, x in first["names"].items()}
        constants = {name for name, source in first["names"].items() if source in states[0]["others"]}
    except ConfigError as error:
        raise CheckpointError(
            f"{home}: the strategy cannot be read here ({error}). Export from the training program with Worker.export"
        ) from error
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"{home}: holds no model that can be exported ({type(error).__name__}: {error})"
        ) from error
    if lacking := [name for name, x in tensors.items() if x is None]:
        raise CheckpointError(
            f"{home}: {lacking[0]!r} is not a parameter or buffer of the model, or the optimizer evaluates other "
            "parameters than it trains. Export from the training program with Worker.export"
        )
    check_tensors(tensors)
    if name := first_nonfinite(tensors, constants):
        raise NonFiniteError(f"{home}: {name} is not finite, so nothing was written to {path}")
    try:
        write_weights(path, tensors, states[0]["step"])
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error})") from error
    facts, elements = first["save"], sum(x.numel() for x in tensors.values() if x is not None)
    identity = states[0]["identity"]
    return Exported(path, home, facts["step"], facts["size"], identity[STRATEGY], elements, len(tensors))


def _common_of(strategy: Strategy, x: Tensor, segments: Sequence[Segment], points: Sequence[Tensor]) -> Tensor:
    """Return the common parameters of all fragments as one vector, like a worker's own parameters `x`."""
    r = Replica(x.clone(), x.new_empty(0), single_worker(), lr=lambda: 0.0, segments=segments)
    for (part, _), point in zip(strategy.fragments_in(r), points, strict=True):
        part.x.copy_(point.view_as(part.x))
    return r.x


def _newest_of_run(home: Path) -> tuple[Path, list[dict[str, Any]]]:
    """Return all parts of the newest complete checkpoint in a folder, of one save."""
    if split := sorted(path.name for path in (home.iterdir() if home.is_dir() else ()) if _holds_blocks(path)):
        raise CheckpointError(
            f"{home}: holds the blocks of a sharded model ({split[0]}, ...). Export from the training program"
        )
    single = step_of(home)
    steps = whole_steps(home, 0) if single is None else [single]
    for step in reversed(steps):
        at = home / f"step-{step:08d}" if single is None else home
        size = facts_of(RankFile(at, 0).outline())["size"]
        if all(RankFile(at, rank).path.exists() for rank in range(size)):
            return at, read_parts(at, range(size), step, size)
    raise CheckpointError(f"{home} holds no complete checkpoint. Give a run's folder, or one of its step-* folders")


def _holds_blocks(path: Path) -> bool:
    return path.is_dir() and path.name.startswith(("shard-", "mesh-"))


def _segments(layout: Sequence[tuple[str, Sequence[int]]], parameters: Mapping[str, Tensor]) -> list[Segment]:
    found: list[Segment] = []
    start = 0
    for name, stride in layout:
        x = parameters[name]
        found.append(Segment(name, start, tuple(x.shape), tuple(stride)))
        start += x.numel()
    return found
