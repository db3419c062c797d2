"""Error feedback: what a codec leaves unsaid is added to what is said next."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, State
from thinwire.codecs.one_bit import OneBit
from thinwire.errors import ConfigError
from thinwire.validation import check_kinds

_OWED = re.compile(r"((?:.*/)?)(?:error|server_error/(\d+)-(\d+))")


@dataclass(frozen=True)
class ErrorFeedback(Codec):
    r"""Remember what a codec leaves unsaid, and say it with the next vector.

    $$y = C(x + e), \qquad e \leftarrow x + e - y$$

    so that after any number of vectors $\sum y + e = \sum x$: nothing is ever lost, only late. What is said may be as
    biased as it likes, so long as less is left unsaid than there was to say.
    Where payloads are not added up by the wire, whoever adds them up keeps an error of its own for what its answer
    leaves unsaid. Payload: the codec's. State: `error`, like the vector in fp32, and a share of that for the answers.

    Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014; Karimireddy et al., Error Feedback Fixes
    SignSGD, ICML 2019, arXiv:1901.09847, Algorithm 1; in two stages: Tang et al., DoubleSqueeze, ICML 2019,
    arXiv:1905.05957.

    Args:
        codec: what payloads are made by.
    """

    codec: Codec = OneBit()

    def __post_init__(self) -> None:
        """Refuse codecs with which what is owed could grow without end."""
        check_kinds(self)
        if isinstance(self.codec, ErrorFeedback):
            raise ConfigError(f"codec={self.codec}: remembers what is unsaid already; use it as it is")
        if self.codec.expansion >= 1:
            raise ConfigError(
                f"codec={self.codec}: what it leaves unsaid can be {self.codec.expansion:.3g} times what it was given, "
                "and would grow without end; it is unbiased, so use it without feedback, or with more bits or smaller "
                "blocks"
            )

    @property
    def linear(self) -> bool:
        """As the codec; but sums that the wire would round go through two stages, so that nothing is lost."""
        return self.codec.linear and not self.codec.rounded

    @property
    def dtype(self) -> torch.dtype:
        """As the codec."""
        return self.codec.dtype

    @property
    def residual_after_sum(self) -> bool:
        """As the codec."""
        return self.codec.residual_after_sum

    @property
    def alignment(self) -> int:
        """As the codec."""
        return self.codec.alignment

    def encode(self, x: Tensor, state: State, key: int = 0) -> Tensor:
        """The codec's payload of `x` and of what was owed; what it leaves unsaid is owed from now on."""
        error = error_of(state, x)
        rest = x.detach().to(torch.float32, copy=True)
        payload = self.codec.encode_with_residual_(rest, error, key)
        error.copy_(rest)
        return payload

    def decode(self, payload: Tensor, like: Tensor, key: int = 0) -> Tensor:
        """As the codec."""
        return self.codec.decode(payload, like, key)

    def nbytes(self, n: int) -> int:
        """As the codec."""
        return self.codec.nbytes(n)


def error_of(state: State, x: Tensor, at: int = 0, whole: int | None = None) -> Tensor:
    """What is owed for `x`, in fp32; zero at first.

    Args:
        state: holds one vector `error`, however many parts are coded one by one.
        x: the part.
        at: where it begins.
        whole: elements of the whole vector; those of `x` unless given.
    """
    if "error" not in state:
        state["error"] = torch.zeros(x.numel() if whole is None else whole, dtype=torch.float32, device=x.device)
    return state["error"][at : at + x.numel()]


def server_error_of(state: State, x: Tensor, own: slice, at: int, size: int) -> Tensor:
    """What this rank owes to all for the piece of `x` that it adds up, in fp32; zero at first.

    What it owes for elsewhere in `x`, from a time when vectors were cut otherwise, it owes as a worker from now on.

    Args:
        state: holds such errors under the places they are for, `server_error/START-STOP`.
        x: the part.
        own: of the part.
        at: where the part begins.
        size: the number of workers that a sum is divided by.
    """
    name = f"server_error/{at + own.start}-{at + own.stop}"
    for other, start, stop in _places(state):
        if other != name and start < at + x.numel() and at < stop:
            state["error"][start:stop].add_(state.pop(other), alpha=size)
    if name not in state:
        state[name] = torch.zeros(own.stop - own.start, dtype=torch.float32, device=x.device)
    return state[name]


def _places(state: State) -> list[tuple[str, int, int]]:
    found = [(name, _OWED.fullmatch(name)) for name in state if name.startswith("server_error/")]
    return [(name, int(match[2]), int(match[3])) for name, match in found if match]


def resize_errors(states: Sequence[State], size: int) -> list[dict[str, Tensor]]:
    """What is owed, shared out anew among another number of workers, so that the mean of all owes the same.

    That is the mean of what workers owe, plus what servers owe: with it, the mean of all that was ever to be said is
    what was said and what is owed. Everyone owes that mean afterwards, and servers nothing.

    Args:
        states: of all the ranks there were, in their order; the names of errors may have any one beginning. Others
            are rank 0's.
        size: how many ranks there are to be.

    Returns:
        One state for each new rank.

    Raises:
        ConfigError: no ranks, before or after.
    """
    if not states or size < 1:
        raise ConfigError(f"{len(states)} states for {size} workers: there must be at least one of each")
    residual = {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0] if _is_error(name)}
    for state in states:
        for name, x in state.items():
            match = _OWED.fullmatch(name)
            if match and match[2]:
                residual[f"{match[1]}error"][int(match[2]) : int(match[3])] += x
    others = {name: x for name, x in states[0].items() if not _OWED.fullmatch(name)}
    return [{name: x.clone() for name, x in {**others, **residual}.items()} for _ in range(size)]


def _is_error(name: str) -> bool:
    match = _OWED.fullmatch(name)
    return match is not None and match[2] is None
