# SPDX-License-Identifier: Apache-2.0
"""The speed of a mesh's ranks and links, and the panels that suit it."""

from __future__ import annotations

import time
from math import inf

import torch
from torch import nn

from thinwire.core.comm.base import Comm
from thinwire.core.comm.work import synchronize
from thinwire.errors import ConfigError
from thinwire.tensor2d.linear import Linear2D
from thinwire.tensor2d.panels import Pace, Panels, choose_panels


def measure_pace(
    comm: Comm,
    *,
    nbytes: int = 1 << 22,
    width: int = 512,
    repeats: int = 3,
    device: torch.device | str | None = None,
) -> Pace:
    """Measure latency, bandwidth and matrix products on these ranks; a collective call.

    Each result is the fastest of several repeats on the slowest rank, and the same on all ranks.

    Args:
        comm: the comm of the ranks, such as `mesh.whole`.
        nbytes: size of the large message.
        width: size of the square matrices.
        repeats: repeats of each measurement.
        device: the device of the model; None for the CPU, or for the GPU if the ranks only support GPUs.

    Raises:
        ConfigError: `comm` has only one rank, or `repeats` is less than 1.
    """
    if comm.size == 1 or repeats < 1:
        raise ConfigError(f"{comm.size} ranks, repeats={repeats}: must be at least 2 ranks and 1 repeat")
    device = comm.check_device if device is None else torch.device(device)
    small, large = (torch.zeros(n, dtype=torch.float32, device=device) for n in (1, nbytes // 4))
    latency = min(_seconds_of_gather(comm, small) for _ in range(repeats))
    whole = min(_seconds_of_gather(comm, large) for _ in range(repeats))
    product = min(_seconds_of_product(width, device) for _ in range(repeats))
    # The large message includes the latency once. Between local processes the difference can be lost in noise.
    slowest = torch.tensor([latency, max(whole - latency, 1e-9), product], dtype=torch.float64, device=device)
    # The slowest rank limits every collective. Ranks with different results would choose different panels.
    latency, transfer, product = torch.stack(comm.all_gather(slowest).wait()).amax(0).tolist()
    return Pace(latency, 8 * (comm.size - 1) * (nbytes // 4 * 4) / transfer, 2 * width**3 / product)


def measure_flops(*, width: int = 512, repeats: int = 3, device: torch.device | str = "cpu") -> float:
    """Measure this process's floating-point operations per second in products of square fp32 matrices."""
    return 2 * width**3 / min(_seconds_of_product(width, torch.device(device)) for _ in range(repeats))


def _seconds_of_gather(comm: Comm, x: torch.Tensor) -> float:
    comm.all_reduce_(torch.zeros_like(x[:1])).wait()  # a barrier, so that the wait for a late rank is not measured
    synchronize(x.device)
    start = time.perf_counter()
    comm.all_gather(x).wait()
    synchronize(x.device)
    return time.perf_counter() - start


def _seconds_of_product(width: int, device: torch.device) -> float:
    x = torch.ones(width, width, dtype=torch.float32, device=device)
    synchronize(device)
    start = time.perf_counter()
    torch.mm(x, x)
    synchronize(device)
    return time.perf_counter() - start


def product_elements(tokens: int, inputs: int, outputs: int, rows: int, columns: int, *, layout: str = "auto") -> float:
    """Return the elements that a rank sends in one product of a linear layer, forward or backward.

    Args:
        tokens: tokens of the whole batch.
        inputs: input features of the linear layer.
        outputs: output features of the linear layer.
        rows: rows of the mesh.
        columns: columns of the mesh.
        layout: "AB", "ABT", or "auto" for the one that sends less.
    """
    # Activations of one side are sent across columns, gathered or as partial sums; the weight across rows.
    side = {"AB": inputs, "ABT": outputs, "auto": min(inputs, outputs)}[layout]
    return tokens * side * (columns - 1) / (rows * columns) + inputs * outputs * (rows - 1) / (rows * columns)


def choose_panels_(
    model: nn.Module, pace: Pace, *, tokens: int, limit_nbytes: float = inf, element_size: int = 4
) -> dict[str, Panels]:
    """Set every linear layer's number of panels to the fastest within a limit; return them by layer name.

    One panel gathers each operand in one message, which is best for high latency or little arithmetic. More panels
    overlap communication with arithmetic and take less memory. All ranks must pass the same pace, such as that of
    `measure_pace(mesh.whole)`.

    Args:
        model: a model after `parallelize_2d`.
        pace: speed of the machine.
        tokens: tokens of the whole batch.
        limit_nbytes: the most bytes that the gathered operands of one product may occupy.
        element_size: bytes of an activation and of a weight.

    Raises:
        ConfigError: not even the narrowest panels of a layer fit.
    """
    chosen: dict[str, Panels] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, Linear2D):
            continue
        inputs, outputs, mesh = layer.in_features, layer.out_features, layer.mesh
        shape = tokens, inputs, outputs, mesh.rows, mesh.columns
        one_side = inputs if layer.layout == "AB" else outputs
        gathered = inputs * outputs / mesh.columns + tokens / mesh.rows * one_side
        layer.panels = chosen[name] = choose_panels(
            nbytes=element_size * product_elements(*shape, layout=layer.layout),
            flops=2.0 * tokens * inputs * outputs / (mesh.rows * mesh.columns),
            gathered_nbytes=element_size * gathered,
            limit_nbytes=limit_nbytes,
            width=max(1, one_side // mesh.slices),
            pace=pace,
        )
    return chosen
