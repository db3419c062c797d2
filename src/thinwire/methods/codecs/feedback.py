# SPDX-License-Identifier: Apache-2.0
"""Error feedback: the compression error of each vector is added to the next."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from itertools import pairwise
from typing import Annotated, Literal

import torch
from torch import Tensor

from thinwire.core.kernels import all_finite, as_fp32
from thinwire.core.validation import Range
from thinwire.errors import ConfigError
from thinwire.methods.codecs.base import Codec, CodecTraits, CodecWrapper, State
from thinwire.methods.codecs.one_bit import OneBit
from thinwire.registry import registered

_RESIDUAL_NAME = re.compile(r"((?:.*/)?)(?:error|server_error/(\d+)-(\d+))")
_SERVER_NAME = re.compile(r"((?:.*/)?server_[a-z]+)/(\d+)-(\d+)")


@registered
class ErrorFeedback(CodecWrapper):
    r"""Add a codec's compression error to the next vector.

    $$y = C(x + e), \qquad e \leftarrow x + e - y$$

    with $y$ the decoded payload and $e$ the residual. After any number of vectors $\sum y + e = \sum x$: compression
    delays information, but loses none. The codec may be biased, if its error is smaller than its input.

    If an all-reduce cannot add the payloads, each rank is the server of one piece of the vector: it adds the workers'
    payloads of this piece, encodes the mean, and keeps a second residual for that.

    With a `decay` $\beta$ below 1, $e \leftarrow \beta\,(x + e - y)$: the residual becomes a momentum of unsent values,
    and replaces that of `DiLoCo`'s outer step (SparseLoCo). A server's residual does not decay.

    Payload: the codec's. State: the residual `error`, with the size of the vector, in fp32 by default; for a server
    among $W$ workers also its server residual, $1/W$ of that size.

    Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014; Karimireddy et al., Error Feedback Fixes
    SignSGD, ICML 2019, arXiv:1901.09847, Algorithm 1; in two stages: Tang et al., DoubleSqueeze, ICML 2019,
    arXiv:1905.05957.

    Args:
        codec: $C$, which encodes the payloads.
        decay: $\beta$ in (0, 1], the decay of the residual from one message to the next.
        residual: "fp32", or "model" for the dtype of the parameters: in bf16 it takes half the memory, and the error of
            its rounding, up to 1/512 of each of its elements a message, is never sent.

    Example:
        >>> import torch
        >>> from thinwire import ErrorFeedback, TopK
        >>> codec, state = ErrorFeedback(TopK(fraction=0.5)), {}
        >>> x = torch.tensor([3.0, 1.0])
        >>> codec.decode(codec.encode(x, state), x).tolist(), state["error"].tolist()
        ([3.0, 0.0], [0.0, 1.0])
        >>> codec.decode(codec.encode(torch.tensor([1.0, 1.0]), state), x).tolist(), state["error"].tolist()
        ([0.0, 2.0], [1.0, 0.0])
    """

    codec: Codec = OneBit()
    decay: Annotated[float, Range("(0, 1]", "1 keeps the whole residual")] = 1.0
    residual: Literal["fp32", "model"] = "fp32"

    def __post_init__(self) -> None:
        inner = self.codec.traits
        if inner.keeps_residual:
            raise ConfigError(f"codec={self.codec}: it already has error feedback. Use it without ErrorFeedback")
        if inner.own_mean and not inner.one_round:
            raise ConfigError(
                f"codec={self.codec}: its messages between nodes have the residual. Put ErrorFeedback inside"
            )
        if not inner.keeps_size:
            raise ConfigError(
                f"codec={self.codec}: every element is decoded to plus or minus one, whatever its size, so the "
                f"residual could grow without bound. Use AllReduce({self.codec}) without ErrorFeedback, or OneBit()"
            )
        if inner.error_bound >= 1:
            raise ConfigError(
                f"codec={self.codec}: its squared error can be {inner.error_bound:.3g} times the squared input, "
                "so the residual could grow without bound. Its rounding is unbiased. Use it without feedback, or "
                "with more bits or smaller blocks"
            )

    def make_traits(self) -> CodecTraits:
        """See `CodecTraits`."""
        inner = self.codec.traits
        return self.traits_around(
            needs_feedback=False,
            error_bound=0.0,  # none is stated, since the error is sent later
            # Error feedback cannot correct rounded sums.
            linear=inner.linear and not inner.rounds_sums,
            keeps_residual=True,
            forgets=self.decay < 1,
            own_mean=inner.own_mean,
            one_round=inner.one_round,
            dtype=inner.dtype,
            residual_after_sum=inner.residual_after_sum,
        )

    def encode(self, x: Tensor, state: State, key: int = 0) -> Tensor:
        """Encode `x` plus the residual with the codec, and update the residual if the result is finite."""
        residual = residual_of(state, x, dtype=residual_dtype(self, x))
        updated = x.detach().to(torch.float32, copy=True)
        payload = self.codec.encode_with_residual_(updated, as_fp32(residual), key)
        # Last, so that a failing codec or a non-finite vector leaves the residual unchanged.
        if all_finite(updated):
            keep_(residual, updated, self.decay)
        return payload


def keep_(residual: Tensor, left: Tensor, decay: float) -> None:
    """Replace a residual with the error of a message, times its decay."""
    if decay < 1:
        torch.mul(left, decay, out=residual)
    else:
        residual.copy_(left)


def residual_dtype(codec: Codec, x: Tensor) -> torch.dtype:
    """Return the dtype of the residuals of a codec, for a model with the dtype of `x`."""
    while isinstance(codec, CodecWrapper) and not isinstance(codec, ErrorFeedback):
        codec = codec.codec
    return x.dtype if isinstance(codec, ErrorFeedback) and codec.residual == "model" else torch.float32


def residual_of(
    state: State, x: Tensor, offset: int = 0, length: int | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the worker's residual for `x`; zero at first.

    Args:
        state: contains one vector `error` for all parts of the vector.
        x: the part to encode.
        offset: the offset of the part.
        length: the number of elements of the whole vector; by default those of `x`.
        dtype: the dtype of a new residual.
    """
    # One vector for all parts, so that checkpoints do not depend on the buckets.
    if "error" not in state:
        state["error"] = torch.zeros(x.numel() if length is None else length, dtype=dtype, device=x.device)
    return state["error"][offset : offset + x.numel()]


def server_residual_of(
    state: State, x: Tensor, own: slice, offset: int, size: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the residual of this rank's server piece of `x`; zero at first.

    Residuals of other pieces within `x`, left from a different cut of the vector, are moved into this rank's worker
    residual.

    Args:
        state: contains server residuals by their elements, as `server_error/START-STOP`.
        x: the part to encode.
        own: this rank's piece of the part.
        offset: the offset of the part.
        size: the number of workers, the divisor of a sum.
        dtype: the dtype of a new residual.
    """
    name = f"server_error/{offset + own.start}-{offset + own.stop}"
    for other in [each for each in state if each != name]:
        match = _RESIDUAL_NAME.fullmatch(other)
        if match and match[2] and not match[1] and int(match[2]) < offset + x.numel() and offset < int(match[3]):
            # A worker's residual is divided by the number of workers in the mean, a server's is not.
            state["error"][int(match[2]) : int(match[3])].add_(state.pop(other), alpha=size)
    if name not in state:
        state[name] = torch.zeros(own.stop - own.start, dtype=dtype, device=x.device)
    return state[name]


def server_piece_of(state: State, name: str, own: slice, initial: Callable[[], Tensor]) -> Tensor:
    """Return a vector that only the server of a piece keeps, as `server_NAME/START-STOP`.

    Args:
        state: contains it; what a run with another number of workers has left there for a longer piece is cut.
        name: its name, without "server_".
        own: this rank's piece.
        initial: makes its first values.
    """
    key = f"server_{name}/{own.start}-{own.stop}"
    for other in [each for each in state if each.startswith(f"server_{name}/") and each != key]:
        match, found = _SERVER_NAME.fullmatch(other), state.pop(other)
        if match and int(match[2]) <= own.start and own.stop <= int(match[3]) and key not in state:
            state[key] = found[own.start - int(match[2]) : own.stop - int(match[2])].clone()
    if key not in state:
        state[key] = initial()
    return state[key]


def join_server_pieces(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join the vectors of `server_piece_of` over all ranks; those with gaps are dropped."""
    pieces: dict[str, list[tuple[int, int, Tensor]]] = {}
    for state in states:
        for name, x in state.items():
            if (match := _SERVER_NAME.fullmatch(name)) and not _RESIDUAL_NAME.fullmatch(name):
                pieces.setdefault(match[1], []).append((int(match[2]), int(match[3]), x))
    joined: dict[str, Tensor] = {}
    for name, found in pieces.items():
        found.sort(key=lambda piece: piece[:2])
        if found[0][0] == 0 and all(a[1] == b[0] for a, b in pairwise(found)):
            joined[f"{name}/0-{found[-1][1]}"] = torch.cat([x for _, _, x in found])
    return joined


def of_server(name: str) -> bool:
    """Return True if the name belongs to a vector that only the server of a piece keeps, such as its residual.

    Example:
        >>> of_server("base/server_error/0-8"), of_server("error")
        (True, False)
    """
    return _SERVER_NAME.fullmatch(name) is not None


def of_worker(name: str) -> bool:
    """Return True if the name belongs to a worker's residual.

    Example:
        >>> of_worker("base/error"), of_worker("server_error/0-8")
        (True, False)
    """
    match = _RESIDUAL_NAME.fullmatch(name)
    return match is not None and match[2] is None


def merge_server_residuals(state: MutableMapping[str, Tensor], size: int) -> None:
    """Move this rank's server residuals into its worker residual.

    Args:
        state: the state of this rank.
        size: the number of workers, the divisor of a sum.
    """
    for name in list(state):
        match = _RESIDUAL_NAME.fullmatch(name)
        if match and match[2]:
            state[f"{match[1] or ''}error"][int(match[2]) : int(match[3])].add_(state.pop(name), alpha=size)


def residual_sizes(name: str, sizes: Sequence[int]) -> list[int] | None:
    """Return the sizes that a named residual or a server's vector may have; None if the name is neither.

    Args:
        name: a name in a replica's state.
        sizes: the sizes of the sent vectors.

    Example:
        >>> residual_sizes("base/error", [7]), residual_sizes("server_error/2-5", [7]), residual_sizes("anchor", [7])
        ([7], [3], None)
    """
    if server := _SERVER_NAME.fullmatch(name):
        return [int(server[3]) - int(server[2])]
    return list(sizes) if _RESIDUAL_NAME.fullmatch(name) else None


def resize_errors(states: Sequence[Mapping[str, Tensor]], size: int) -> list[dict[str, Tensor]]:
    """Distribute residuals over another number of workers, with the same effect on the mean.

    The residuals' effect is the mean of the workers' residuals plus the servers' residuals. Every new worker gets that
    sum as its residual, and servers get none.

    Args:
        states: the states of all old ranks, in rank order; names of residuals may have a common prefix. All other
            tensors are taken from rank 0.
        size: the number of new ranks.

    Returns:
        One state for each new rank.

    Raises:
        ConfigError: the number of old or new ranks is zero.

    Example:
        >>> import torch
        >>> from thinwire import resize_errors
        >>> states = [{"error": torch.tensor([1.0, 2.0])}, {"error": torch.tensor([3.0, 4.0])}]
        >>> [state["error"].tolist() for state in resize_errors(states, size=3)]
        [[2.0, 3.0], [2.0, 3.0], [2.0, 3.0]]
    """
    if not states or size < 1:
        raise ConfigError(f"{len(states)} states for {size} workers: both must be at least 1")
    found = {name: match for state in states for name in state if (match := _RESIDUAL_NAME.fullmatch(name))}
    resized = {
        name: torch.stack([state[name] for state in states]).mean(0)
        for name in states[0]
        if name in found and found[name][2] is None
    }
    for state in states:
        for name, x in state.items():
            if name in found and found[name][2]:
                prefix, start, stop = found[name].groups()
                resized[f"{prefix}error"][int(start) : int(stop)] += x
    # Copies for every rank, since each updates its own in place.
    others = {name: x for name, x in states[0].items() if name not in found}
    return [{name: x.clone() for name, x in {**others, **resized}.items()} for _ in range(size)]


def resize_alike(states: Sequence[Mapping[str, Tensor]], size: int) -> list[dict[str, Tensor]]:
    """Make one state for all new workers with the same mean; the default of strategies.

    Args:
        states: the states of all old ranks, in rank order.
        size: the number of new ranks.

    Returns:
        One state for each new rank, all equal: values that were equal on all ranks, residuals as in `resize_errors`,
        and the means of other floating-point tensors. Counters that differed, and values that some ranks lacked or had
        in another size, are dropped.

    Example:
        >>> import torch
        >>> states = [{"momentum": torch.tensor([1.0]), "steps": torch.tensor(3), "own": torch.tensor(rank)}
        ...           for rank in range(2)]
        >>> states[1]["momentum"] *= 5
        >>> resize_alike(states, size=3)[2]
        {'momentum': tensor([3.]), 'steps': tensor(3)}
    """
    residuals = [{name: x for name, x in state.items() if _RESIDUAL_NAME.fullmatch(name)} for state in states]
    found = resize_errors(residuals, 1)[0]
    for name in states[0].keys() - residuals[0].keys():
        xs = [state[name] for state in states if name in state]
        first = xs[0]
        if len(xs) < len(states) or any(x.shape != first.shape or x.dtype != first.dtype for x in xs):
            continue
        if all(torch.equal(x, first) for x in xs):
            found[name] = first
        elif first.is_floating_point():
            found[name] = torch.stack([x.double() for x in xs]).mean(0).to(first.dtype)
    found.update(join_server_pieces(states))
    # In the saved order, with copies for every rank, since each updates its own in place.
    names = [name for name in states[0] if name in found] + [name for name in found if name not in states[0]]
    return [{name: found[name].clone() for name in names} for _ in range(size)]
