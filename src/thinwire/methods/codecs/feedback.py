# SPDX-License-Identifier: Apache-2.0
"""Error feedback: the compression error of one vector is added to the next."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping, Sequence

import torch
from torch import Tensor

from thinwire.core.kernels import norm_if_finite
from thinwire.errors import ConfigError
from thinwire.methods.codecs.base import Codec, CodecWrapper, State
from thinwire.methods.codecs.one_bit import OneBit
from thinwire.registry import registered

_RESIDUAL_NAME = re.compile(r"((?:.*/)?)(?:error|server_error/(\d+)-(\d+))")


@registered
class ErrorFeedback(CodecWrapper):
    r"""Add a codec's compression error to the next vector.

    $$y = C(x + e), \qquad e \leftarrow x + e - y$$

    with $y$ the decoded payload and $e$ the residual. After any number of vectors $\sum y + e = \sum x$: compression
    delays information, and loses none. The codec may be biased, so long as its error is smaller than its input.
    If an all-reduce cannot add the payloads, each rank is the server of one piece of the vector: it adds the workers'
    payloads of this piece, encodes the sum, and keeps a residual of its own for that. Payload: the codec's. State: the
    residual `error`, with the size of the vector, in fp32; for a server among $W$ workers also its own residual, $1/W$
    of that size. With a `decay` $\beta$ below 1, $e \leftarrow \beta\,(x + e - y)$, what was left out is forgotten by
    and by: then $e$ is a momentum of what is not sent yet, and takes the place of that of `DiLoCo`'s outer step
    (SparseLoCo). A server's residual does not decay.

    Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014; Karimireddy et al., Error Feedback Fixes
    SignSGD, ICML 2019, arXiv:1901.09847, Algorithm 1; in two stages: Tang et al., DoubleSqueeze, ICML 2019,
    arXiv:1905.05957.

    Args:
        codec: $C$, which makes the payloads.
        decay: $\beta$ in (0, 1], of the residual from one message to the next; less forgets faster what was left out.

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
    decay: float = 1.0

    def __post_init__(self) -> None:
        """Refuse codecs with which the residual could grow without bound."""
        if not 0 < self.decay <= 1:
            raise ConfigError(
                f"decay={self.decay}: must lie in (0, 1], as 0 would feed nothing back; 1 keeps all that was left out"
            )
        if self.codec.keeps_residual:
            raise ConfigError(f"codec={self.codec}: it has error feedback already; use it as it is")
        if self.codec.own_mean and not self.codec.one_round:
            raise ConfigError(
                f"codec={self.codec}: what it sends between nodes has a residual; put ErrorFeedback inside"
            )
        if not self.codec.keeps_size:
            raise ConfigError(
                f"codec={self.codec}: every element is decoded to plus or minus one, whatever its size, so the "
                f"residual could grow without bound; use AllReduce({self.codec}) as it is, or OneBit()"
            )
        if self.codec.error_bound >= 1:
            raise ConfigError(
                f"codec={self.codec}: its squared error can be {self.codec.error_bound:.3g} times the squared input, "
                "so the residual could grow without bound; its rounding is unbiased, so use it without feedback, or "
                "with more bits or smaller blocks"
            )

    @property
    def needs_feedback(self) -> bool:
        """False: this is the feedback."""
        return False

    @property
    def error_bound(self) -> float:
        """0: none is stated, as what is left out is sent later."""
        return 0.0

    @property
    def linear(self) -> bool:
        """Whether the codec is linear and its sums are not rounded, as error feedback cannot correct rounded sums."""
        return self.codec.linear and not self.codec.rounds_sums

    @property
    def keeps_residual(self) -> bool:
        """True."""
        return True

    @property
    def forgets(self) -> bool:
        """Whether the residual decays."""
        return self.decay < 1

    @property
    def own_mean(self) -> bool:
        """The codec's `own_mean`."""
        return self.codec.own_mean

    @property
    def one_round(self) -> bool:
        """The codec's `one_round`."""
        return self.codec.one_round

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the codec's payloads."""
        return self.codec.dtype

    @property
    def residual_after_sum(self) -> bool:
        """The codec's `residual_after_sum`."""
        return self.codec.residual_after_sum

    def encode(self, x: Tensor, state: State, key: int = 0) -> Tensor:
        """Encode `x` plus the residual with the codec, and update the residual, unless it would not be finite."""
        residual = residual_of(state, x)
        updated = x.detach().to(torch.float32, copy=True)
        payload = self.codec.encode_with_residual_(updated, residual, key)
        # Last, so that a failure in the codec leaves the residual as it was, as does a vector that is not finite.
        if norm_if_finite(updated)[0]:
            keep_(residual, updated, self.decay)
        return payload


def keep_(residual: Tensor, left: Tensor, decay: float) -> None:
    """Let a residual become what a message left out, times its decay."""
    if decay < 1:
        torch.mul(left, decay, out=residual)
    else:
        residual.copy_(left)


def residual_of(state: State, x: Tensor, offset: int = 0, length: int | None = None) -> Tensor:
    """The worker's residual for `x`, in fp32; zero at first.

    Args:
        state: holds one vector `error`, however many parts of the vector are encoded one by one.
        x: the part.
        offset: where the part begins.
        length: elements of the whole vector; those of `x` unless given.
    """
    # One vector for all parts: checkpoints then do not depend on where buckets are cut.
    if "error" not in state:
        state["error"] = torch.zeros(x.numel() if length is None else length, dtype=torch.float32, device=x.device)
    return state["error"][offset : offset + x.numel()]


def server_residual_of(state: State, x: Tensor, own: slice, offset: int, size: int) -> Tensor:
    """The residual of the piece of `x` that this rank adds up as a server, in fp32; zero at first.

    Residuals of other pieces within `x`, from a time when the vector was cut elsewhere, move into this rank's worker
    residual.

    Args:
        state: holds server residuals by the elements that they are for, as `server_error/START-STOP`.
        x: the part.
        own: this rank's piece of the part.
        offset: where the part begins.
        size: the number of workers that a sum is divided by.
    """
    name = f"server_error/{offset + own.start}-{offset + own.stop}"
    for other in [each for each in state if each != name]:
        match = _RESIDUAL_NAME.fullmatch(other)
        if match and match[2] and not match[1] and int(match[2]) < offset + x.numel() and offset < int(match[3]):
            # A worker's residual is divided by the number of workers on its way into the mean, a server's is not.
            state["error"][int(match[2]) : int(match[3])].add_(state.pop(other), alpha=size)
    if name not in state:
        state[name] = torch.zeros(own.stop - own.start, dtype=torch.float32, device=x.device)
    return state[name]


def of_server(name: str) -> bool:
    """Whether the state of that name is the residual of the piece that one rank adds up as a server.

    Example:
        >>> of_server("base/server_error/0-8"), of_server("error")
        (True, False)
    """
    match = _RESIDUAL_NAME.fullmatch(name)
    return match is not None and match[2] is not None


def of_worker(name: str) -> bool:
    """Whether the state of that name is a worker's residual.

    Example:
        >>> of_worker("base/error"), of_worker("server_error/0-8")
        (True, False)
    """
    match = _RESIDUAL_NAME.fullmatch(name)
    return match is not None and match[2] is None


def merge_server_residuals(state: MutableMapping[str, Tensor], size: int) -> None:
    """Move the residuals of the pieces that this rank adds up as a server into its own as a worker.

    Args:
        state: of this rank.
        size: the number of workers that a sum is divided by.
    """
    for name in list(state):
        match = _RESIDUAL_NAME.fullmatch(name)
        if match and match[2]:
            state[f"{match[1] or ''}error"][int(match[2]) : int(match[3])].add_(state.pop(name), alpha=size)


def residual_sizes(name: str, sizes: Sequence[int]) -> list[int] | None:
    """The sizes that the state of that name may have; None if it is no residual.

    Args:
        name: in a replica's state.
        sizes: of the vectors that are sent.

    Example:
        >>> residual_sizes("base/error", [7]), residual_sizes("server_error/2-5", [7]), residual_sizes("anchor", [7])
        ([7], [3], None)
    """
    match = _RESIDUAL_NAME.fullmatch(name)
    if match is None:
        return None
    return list(sizes) if match[2] is None else [int(match[3]) - int(match[2])]


def resize_errors(states: Sequence[Mapping[str, Tensor]], size: int) -> list[dict[str, Tensor]]:
    """Distribute the residuals of error feedback over another number of workers; their effect on the mean is kept.

    The mean lacks the mean of the workers' residuals plus those of the servers. Every new worker gets that sum as its
    residual, and servers get none.

    Args:
        states: of all old ranks, in their order; names of residuals may have a common prefix. All other tensors are
            taken from rank 0.
        size: the number of new ranks.

    Returns:
        One state for each new rank.

    Raises:
        ConfigError: no ranks, before or after.

    Example:
        >>> import torch
        >>> from thinwire import resize_errors
        >>> states = [{"error": torch.tensor([1.0, 2.0])}, {"error": torch.tensor([3.0, 4.0])}]
        >>> [state["error"].tolist() for state in resize_errors(states, size=3)]
        [[2.0, 3.0], [2.0, 3.0], [2.0, 3.0]]
    """
    if not states or size < 1:
        raise ConfigError(f"{len(states)} states for {size} workers: there must be at least one of each")
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
    # Fresh copies for every rank, since each updates its own in place.
    others = {name: x for name, x in states[0].items() if name not in found}
    return [{name: x.clone() for name, x in {**others, **resized}.items()} for _ in range(size)]


def resize_alike(states: Sequence[Mapping[str, Tensor]], size: int) -> list[dict[str, Tensor]]:
    """One state for all of `size` new workers, of the same mean: that of strategies which say nothing else.

    Args:
        states: of all old ranks, in their order.
        size: the number of new ranks.

    Returns:
        One state for each new rank, all equal: what was equal on all ranks; the residuals as in `resize_errors`; and
        the means of other floating-point tensors. Counters that differed, and what some ranks did not have or had in
        another size, are left out.

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
    # In the order in which they were saved, and copies for every rank, since each updates its own in place.
    names = [name for name in states[0] if name in found] + [name for name in found if name not in states[0]]
    return [{name: found[name].clone() for name in names} for _ in range(size)]
