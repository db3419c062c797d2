# SPDX-License-Identifier: Apache-2.0
"""Choose a mesh and a number of panels, from predicted bytes, memory and time of every mesh.

One row is one-dimensional tensor parallelism, as in Shoeybi et al., Megatron-LM, 2019, arXiv:1909.08053; one column
gathers weights and does not send activations, as in Rajbhandari et al., ZeRO, SC 2020, arXiv:1910.02054. The meshes in
between are those of Xu et al., 2021, arXiv:2104.05343.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import nn

from thinwire.core.comm.base import Comm
from thinwire.core.comm.work import synchronize
from thinwire.core.validation import check_field_types
from thinwire.errors import ConfigError
from thinwire.tensor2d.costs import panels_held, product_elements
from thinwire.tensor2d.linear import Linear2D
from thinwire.tensor2d.panels import Pace, Panels, choose_panels
from thinwire.tensor2d.transformer import Transformer

_GIB = 1 << 30
_MOST_RANKS = 1 << 16


@dataclass(frozen=True)
class Precision:
    """Bytes per element, and whether activations are checkpointed.

    Args:
        element_nbytes: bytes of a parameter, a gradient or an activation: 4 in fp32, 2 in bf16.
        state_nbytes: bytes of optimizer state per parameter: 8 for AdamW, 4 for SGD with momentum.
        checkpointed: whether blocks run under `checkpoint_`, and keep only the results of collectives.
    """

    element_nbytes: int = 4
    state_nbytes: int = 8
    checkpointed: bool = False

    def __post_init__(self) -> None:
        """Check the kinds and the ranges."""
        check_field_types(self)
        if self.element_nbytes < 1 or self.state_nbytes < 0:
            raise ConfigError(f"{self}: element_nbytes must be at least 1 and state_nbytes not negative")


@dataclass(frozen=True)
class MeshCost:
    """The cost of a training step on one mesh, per rank.

    Attributes:
        rows: rows, r.
        columns: columns, c.
        refusal: the reason why the mesh cannot split the model or exceeds the memory; empty if it is usable.
        sent_bytes: bytes sent in a forward and a backward pass.
        messages: collective calls in them that send something.
        parameter_bytes: bytes of parameters, gradients and optimizer state.
        activation_bytes: bytes of activations kept for the backward pass, and of gathered operands.
        communication_seconds: time of all messages, one after the other.
        compute_seconds: time of products and attention.
    """

    rows: int
    columns: int
    refusal: str = ""
    sent_bytes: float = 0.0
    messages: int = 0
    parameter_bytes: float = 0.0
    activation_bytes: float = 0.0
    communication_seconds: float = 0.0
    compute_seconds: float = 0.0

    @property
    def memory_bytes(self) -> float:
        """Bytes of parameters and activations together."""
        return self.parameter_bytes + self.activation_bytes

    @property
    def seconds(self) -> float:
        """Time of a step without overlap; with panels the larger of the two parts is a lower bound."""
        return self.communication_seconds + self.compute_seconds

    @property
    def kind(self) -> str:
        """The name of the kind of parallelism."""
        if self.rows == self.columns == 1:
            return "one rank"
        if self.rows == 1:
            return "columns only"
        return "gathered weights" if self.columns == 1 else "two dimensions"


@dataclass(frozen=True)
class Advice:
    """The costs of every mesh of a number of ranks, and the best mesh.

    Attributes:
        model: sizes of the model and its batch.
        pace: speed of the machine and its links.
        costs: one entry per mesh, ordered by rows.
        best: the fastest mesh that fits; None if none does.
        reason: the reason for the choice.
    """

    model: Transformer
    pace: Pace
    costs: tuple[MeshCost, ...]
    best: MeshCost | None
    reason: str


def advise(
    model: Transformer,
    ranks: int,
    pace: Pace,
    *,
    precision: Precision = Precision(),
    limit_nbytes: float | None = None,
) -> Advice:
    """Predict bytes, memory and time of a training step on every mesh of `ranks`, and choose the best.

    Bytes are exact for a model without grouped queries. Times add messages and arithmetic without overlap. Use them to
    compare meshes: overlap shortens all of them.

    Args:
        model: sizes of the model and its batch.
        ranks: number of ranks, p; every divisor of it is a possible number of rows.
        pace: speed of the machine, such as from `measure_pace`.
        precision: bytes per element, and whether activations are checkpointed.
        limit_nbytes: the memory of a rank; None for no limit.

    Raises:
        ConfigError: fewer than one rank or more than 65,536, or a limit that is not positive.
    """
    if ranks < 1:
        raise ConfigError(f"ranks={ranks}: must be at least 1")
    if ranks > _MOST_RANKS:
        raise ConfigError(f"ranks={ranks}: must be at most {_MOST_RANKS}. Pass the ranks of one copy of the model")
    if limit_nbytes is not None and limit_nbytes <= 0:
        raise ConfigError(f"limit_nbytes={limit_nbytes}: must be positive, such as {16 * _GIB}. None is no limit")
    shapes = [(rows, ranks // rows) for rows in range(1, ranks + 1) if ranks % rows == 0]
    costs = tuple(_cost(model, rows, columns, pace, precision, limit_nbytes) for rows, columns in shapes)
    # Equally fast meshes are ordered by memory.
    possible = [cost for cost in costs if not cost.refusal]
    best = min(possible, key=lambda cost: (cost.seconds, cost.memory_bytes), default=None)
    return Advice(model, pace, costs, best, _reason(costs, best))


def _cost(
    model: Transformer, rows: int, columns: int, pace: Pace, precision: Precision, limit_nbytes: float | None
) -> MeshCost:
    refusal = model.refusal(rows, columns)
    if refusal:
        return MeshCost(rows, columns, refusal)
    size = precision.element_nbytes
    sent, messages = model.sent_bytes(rows, columns, element_nbytes=size), model.messages(rows, columns)
    # A parameter, its gradient and the optimizer's state.
    parameters = model.parameters_held(rows, columns) * (2 * size + precision.state_nbytes)
    kept = model.activations_held(rows, columns, checkpointed=precision.checkpointed)
    activations = (kept + model.transit_held(rows, columns)) * size
    if limit_nbytes is not None and parameters + activations > limit_nbytes:
        refusal = f"needs {(parameters + activations) / _GIB:.3g} GiB of {limit_nbytes / _GIB:.3g}"
    return MeshCost(
        rows,
        columns,
        refusal,
        sent_bytes=sent,
        messages=messages,
        parameter_bytes=parameters,
        activation_bytes=activations,
        communication_seconds=messages * pace.seconds_per_message + 8 * sent / pace.bits_per_second,
        compute_seconds=model.flops / (rows * columns) / pace.flops_per_second,
    )


def _reason(costs: tuple[MeshCost, ...], best: MeshCost | None) -> str:
    """Explain the choice of `best`, compared with the next best mesh."""
    if best is None:
        return "no mesh fits: " + "; ".join(f"{cost.rows}x{cost.columns}: {cost.refusal}" for cost in costs)
    name = f"{best.rows}x{best.columns} ({best.kind})"
    others = [cost for cost in costs if not cost.refusal and cost is not best]
    left_out = [f"{cost.rows}x{cost.columns} is left out: {cost.refusal}" for cost in costs if cost.refusal]
    if not others:
        return "; ".join([f"{name} is the only one that fits", *left_out])
    second = min(others, key=lambda cost: cost.seconds)
    why = f"sends {best.sent_bytes / second.sent_bytes:.2g} times the bytes" if second.sent_bytes else "sends nothing"
    compared = (
        f"{name} takes {best.seconds / second.seconds:.2g} times as long as {second.rows}x{second.columns}, the next: "
        f"it {why}, in {best.messages} messages instead of {second.messages}"
    )
    return "; ".join([compared, *left_out])


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
    small, large = (
        torch.zeros(1, dtype=torch.float32, device=device),
        torch.zeros(nbytes // 4, dtype=torch.float32, device=device),
    )
    latency = min(_seconds_of_gather(comm, small) for _ in range(repeats))
    whole = min(_seconds_of_gather(comm, large) for _ in range(repeats))
    product = min(_seconds_of_product(width, device) for _ in range(repeats))
    # The large message includes the latency once. Between local processes the difference can be lost in noise.
    slowest = torch.tensor([latency, max(whole - latency, 1e-9), product], dtype=torch.float64, device=device)
    # The slowest rank limits every collective. Ranks with different results would choose different panels.
    latency, transfer, product = torch.stack(comm.all_gather(slowest).wait()).amax(0).tolist()
    return Pace(latency, 8 * (comm.size - 1) * (nbytes // 4 * 4) / transfer, 2 * width**3 / product)


def measure_flops(*, width: int = 512, repeats: int = 3) -> float:
    """Measure this process's floating-point operations per second in products of square fp32 matrices."""
    return 2 * width**3 / min(_seconds_of_product(width, torch.device("cpu")) for _ in range(repeats))


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


def describe_transformer(model: nn.Module, *, samples: int, length: int) -> Transformer:
    """Return the sizes of thinwire's GPT, or of a GPT-2 or Llama of `transformers`, for `advise`.

    Args:
        model: the serial model; its parameters may be on the meta device.
        samples: samples of the whole batch.
        length: tokens per sample.

    Raises:
        ConfigError: the model has another type.
    """
    # By the name of the type, so that `transformers` need not be installed.
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", "")
    blocks, table = getattr(model, "blocks", None), getattr(getattr(model, "positions", None), "table", None)
    if kind == "gpt2":
        return Transformer(
            layers=config.n_layer,
            hidden=config.n_embd,
            heads=config.n_head,
            vocabulary=config.vocab_size,
            samples=samples,
            length=length,
            inner=config.n_inner or 4 * config.n_embd,
            positions=config.n_positions,
            tied=config.tie_word_embeddings,
            head_bias=False,
        )
    if kind == "llama":
        return Transformer(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            key_heads=config.num_key_value_heads,
            vocabulary=config.vocab_size,
            samples=samples,
            length=length,
            inner=config.intermediate_size,
            tied=config.tie_word_embeddings,
            gated=True,
            head_bias=False,
        )
    if blocks is None or table is None:
        raise ConfigError(
            f"{type(model).__name__}: the advisor supports thinwire's GPT, and GPT-2 and Llama of transformers. Pass a "
            "Transformer(...) with the model's sizes instead"
        )
    return Transformer(
        layers=len(blocks),
        hidden=table.shape[1],
        heads=blocks[0].attention.heads,
        vocabulary=model.get_submodule("embedding").get_parameter("weight").shape[0],
        samples=samples,
        length=length,
        positions=table.shape[0],
    )


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
        layer.panels = chosen[name] = choose_panels(
            nbytes=element_size * product_elements(*shape, layout=layer.layout),
            flops=2.0 * tokens * inputs * outputs / (mesh.rows * mesh.columns),
            gathered_nbytes=element_size * panels_held(*shape, count=1, layout=layer.layout),
            limit_nbytes=limit_nbytes,
            width=max(1, (inputs if layer.layout == "AB" else outputs) // mesh.slices),
            pace=pace,
        )
    return chosen
