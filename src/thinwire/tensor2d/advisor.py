"""Which mesh to take: every r x c of so many ranks, with its bytes, memory and time, and the best of them.

One row is tensor parallelism by columns, as in Shoeybi et al., Megatron-LM, 2019, arXiv:1909.08053; one column keeps
activations where they are and gathers weights, as in Rajbhandari et al., ZeRO, SC 2020, arXiv:1910.02054. Between them
lie the meshes of Xu et al., 2021, arXiv:2104.05343.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from thinwire.comm.base import Comm
from thinwire.errors import ConfigError
from thinwire.tensor2d.panels import Pace
from thinwire.tensor2d.transformer import Transformer
from thinwire.validation import check_kinds

_GIB = 1 << 30


@dataclass(frozen=True)
class Precision:
    """Bytes of what a rank keeps.

    Args:
        element_nbytes: of a parameter, a gradient and an activation: 4 in fp32, 2 in bf16.
        state_nbytes: of the optimizer's state for each parameter: 8 of AdamW, 4 of SGD with momentum.
        checkpointed: whether blocks run under `checkpoint_`, and keep only what came over the wire.
    """

    element_nbytes: int = 4
    state_nbytes: int = 8
    checkpointed: bool = False

    def __post_init__(self) -> None:
        """Check the kinds and the ranges."""
        check_kinds(self)
        if self.element_nbytes < 1 or self.state_nbytes < 0:
            raise ConfigError(f"{self}: element_nbytes must be at least 1 and state_nbytes not negative")


@dataclass(frozen=True)
class MeshCost:
    """What one mesh costs a rank, a step.

    Attributes:
        rows: r.
        columns: c.
        refusal: why the model cannot be cut so, or does not fit; empty where it can and does.
        sent_bytes: in a forward and a backward pass.
        messages: calls in them that send anything.
        parameter_bytes: of parameters, gradients and the optimizer's state.
        activation_bytes: kept for the backward pass, and in transit at most.
        talk_seconds: of messages, one after the other.
        compute_seconds: of products and attention.
    """

    rows: int
    columns: int
    refusal: str = ""
    sent_bytes: float = 0.0
    messages: int = 0
    parameter_bytes: float = 0.0
    activation_bytes: float = 0.0
    talk_seconds: float = 0.0
    compute_seconds: float = 0.0

    @property
    def memory_bytes(self) -> float:
        """Everything together."""
        return self.parameter_bytes + self.activation_bytes

    @property
    def seconds(self) -> float:
        """A step in which nothing overlaps; panels can hide the smaller of the two parts at best."""
        return self.talk_seconds + self.compute_seconds

    @property
    def kind(self) -> str:
        """What such a mesh is called."""
        if self.rows == self.columns == 1:
            return "one rank"
        if self.rows == 1:
            return "columns only"
        return "gathered weights" if self.columns == 1 else "two dimensions"


@dataclass(frozen=True)
class Advice:
    """Every mesh of so many ranks, and the one to take.

    Attributes:
        model: and its batch.
        pace: of the machine and its links.
        costs: of every mesh, from one row on.
        best: the fastest that fits; None where none does.
        reason: why that one, in words.
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
    """Predict bytes, memory and time of a training step on every mesh of `ranks`, and name the best.

    Bytes are exact for a model without shared key heads. Times are of messages and arithmetic one after the other, so
    that they rank meshes; what overlaps makes all of them shorter.

    Args:
        model: and its batch.
        ranks: p, of which every divisor can be the rows.
        pace: given, or from `measure_pace`.
        precision: bytes of what is kept.
        limit_nbytes: memory that a rank has; None is no limit.

    Raises:
        ConfigError: fewer than one rank, or a limit that is not positive.
    """
    if ranks < 1:
        raise ConfigError(f"ranks={ranks}: a mesh has at least 1")
    if limit_nbytes is not None and limit_nbytes <= 0:
        raise ConfigError(f"limit_nbytes={limit_nbytes}: must be positive, such as {16 * _GIB}; None is no limit")
    shapes = [(rows, ranks // rows) for rows in range(1, ranks + 1) if ranks % rows == 0]
    costs = tuple(_cost(model, rows, columns, pace, precision, limit_nbytes) for rows, columns in shapes)
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
        talk_seconds=messages * pace.seconds_per_message + 8 * sent / pace.bits_per_second,
        compute_seconds=model.flops / (rows * columns) / pace.flops_per_second,
    )


def _reason(costs: tuple[MeshCost, ...], best: MeshCost | None) -> str:
    """Why that mesh, beside the next."""
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


def measure_pace(comm: Comm, *, nbytes: int = 1 << 22, width: int = 512, repeats: int = 3) -> Pace:
    """How fast these ranks talk and multiply, from a few messages and products; all of them call together.

    The least time of several counts. All ranks get the same figures, those of the slowest.

    Args:
        comm: the ranks, such as `mesh.whole`.
        nbytes: of the large message.
        width: of the square matrices.
        repeats: of each.

    Raises:
        ConfigError: one rank alone, which has no link, or no repeats.
    """
    if comm.size == 1 or repeats < 1:
        raise ConfigError(f"{comm.size} ranks, repeats={repeats}: a pace is measured between 2 ranks, at least once")
    small, large = torch.zeros(1), torch.zeros(nbytes // 4)
    latency = min(_seconds_of_gather(comm, small) for _ in range(repeats))
    whole = min(_seconds_of_gather(comm, large) for _ in range(repeats))
    product = min(_seconds_of_product(width) for _ in range(repeats))
    slowest = torch.tensor([latency, max(whole - latency, 1e-9), product], dtype=torch.float64)
    latency, transfer, product = torch.stack(comm.all_gather(slowest).wait()).amax(0).tolist()
    return Pace(latency, 8 * (comm.size - 1) * (nbytes // 4 * 4) / transfer, 2 * width**3 / product)


def measure_flops(*, width: int = 512, repeats: int = 3) -> float:
    """Floating-point operations a second of this process, multiplying square matrices in fp32."""
    return 2 * width**3 / min(_seconds_of_product(width) for _ in range(repeats))


def _seconds_of_gather(comm: Comm, x: torch.Tensor) -> float:
    comm.all_reduce_(torch.zeros(1)).wait()  # nobody is late
    start = time.perf_counter()
    comm.all_gather(x).wait()
    return time.perf_counter() - start


def _seconds_of_product(width: int) -> float:
    x = torch.ones(width, width)
    start = time.perf_counter()
    torch.mm(x, x)
    return time.perf_counter() - start


def describe_transformer(model: nn.Module, *, samples: int, length: int) -> Transformer:
    """What the advisor needs to know of thinwire's GPT, or of a GPT-2 or Llama of `transformers`.

    Args:
        model: the serial one; its parameters may be on the meta device.
        samples: of the whole batch.
        length: tokens of a sample.

    Raises:
        ConfigError: another kind of model.
    """
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
            f"{type(model).__name__}: the advisor knows thinwire's GPT, and GPT-2 and Llama of transformers; give a "
            "Transformer(...) of the same sizes"
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
