# SPDX-License-Identifier: Apache-2.0
"""The losses of an array beside those of separate runs, and beside what rounding alone does to separate runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from reproductions.hfta.training import Step, array_step, loop_step, made
from reproductions.hfta.workloads import Batch, Workload

Curves = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Losses:
    """The training losses of one network's models: [steps][models] each.

    Args:
        array: as an array, in fp64.
        separate: each by itself, in fp64.
        nudged: as `separate`, from parameters that are the next numbers to those.
        short_array: as an array, in fp32.
        short_separate: each by itself, in fp32.
        short_nudged: as `short_separate`, from parameters that are the next numbers to those.
    """

    array: Curves
    separate: Curves
    nudged: Curves
    short_array: Curves
    short_separate: Curves
    short_nudged: Curves

    @property
    def difference(self) -> Tensor:
        """Of the array from separate runs, after each step, [steps]."""
        return differences(self.array, self.separate)

    @property
    def drift(self) -> Tensor:
        """What rounding alone does in fp64: separate runs from neighbouring parameters, [steps]."""
        return differences(self.nudged, self.separate)

    @property
    def short_difference(self) -> Tensor:
        """The same in fp32, [steps]."""
        return differences(self.short_array, self.short_separate)

    @property
    def short_drift(self) -> Tensor:
        """What rounding alone does in fp32: separate runs from neighbouring parameters, [steps]."""
        return differences(self.short_nudged, self.short_separate)


def losses(workload: Workload, models: int, steps: int) -> Losses:
    """Train models in six ways, on the same batches in the same order.

    Args:
        workload: in fp32.
        models: how many, each with its own learning rate.
        steps: of each.
    """
    exact = in_double(workload)
    return Losses(
        array=curve(array_step(exact, models), steps),
        separate=curve(loop_step(exact, models), steps),
        nudged=curve(loop_step(exact, models, nudged), steps),
        short_array=curve(array_step(workload, models), steps),
        short_separate=curve(loop_step(workload, models), steps),
        short_nudged=curve(loop_step(workload, models, nudged), steps),
    )


def curve(step: Step, steps: int) -> Curves:
    """The losses of every model after each step: [steps][models]."""
    return [step(number) for number in range(steps)]


def differences(some: Curves, others: Curves) -> Tensor:
    """The largest of any model after each step, relative to the model's loss at the start: [steps]."""
    one, other = (torch.tensor(each, dtype=torch.float64) for each in (some, others))
    return ((one - other).abs() / other[0].abs()).amax(1)


def in_double(workload: Workload) -> Workload:
    """The same in fp64."""
    return replace(workload, make=partial(_wide_network, workload.make), batch=partial(_wide_batch, workload.batch))


def _wide_network(make: Callable[[], nn.Module]) -> nn.Module:
    return make().double()


def _wide_batch(batch: Callable[[int], tuple[Batch, Batch]], number: int) -> tuple[Batch, Batch]:
    inputs, targets = batch(number)
    return tuple(map(_wide, inputs)), tuple(map(_wide, targets))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def nudged(workload: Workload, models: int) -> list[nn.Module]:
    """Networks as `made`, with every parameter moved to a neighbouring number, up or down at random."""
    found = made(workload, models)
    for seed, model in enumerate(found):
        draw = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            ends = torch.tensor([-torch.inf, torch.inf], dtype=parameter.dtype)
            towards = ends[torch.randint(0, 2, parameter.shape, generator=draw)]
            with torch.no_grad():
                parameter.copy_(torch.nextafter(parameter, towards))
    return found


def largest(found: Mapping[str, Losses]) -> dict[str, dict[str, float]]:
    """By network: the largest differences in fp64 and fp32, and what rounding alone does in each."""
    return {
        title: {
            "fp64": float(each.difference.max()),
            "rounding in fp64": float(each.drift.max()),
            "fp32": float(each.short_difference.max()),
            "rounding": float(each.short_drift.max()),
        }
        for title, each in found.items()
    }
