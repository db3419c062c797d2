"""What a codec is: a vector to a payload and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import MutableMapping, Sequence

import torch
from torch import Tensor

from thinwire.errors import ConfigError

State = MutableMapping[str, Tensor]
_WORD = (1 << 64) - 1


class Codec(ABC):
    """A way to say a vector in fewer bytes; subclasses are frozen dataclasses.

    What is random about a payload follows from the `key` alone: the same key, the same draws, on any device.
    """

    @property
    def linear(self) -> bool:
        """The payload of a sum is the sum of the payloads, so that the wire itself may add them up."""
        return False

    @property
    def dtype(self) -> torch.dtype:
        """Of payloads."""
        return torch.uint8

    @property
    def rounded(self) -> bool:
        """Of a linear codec: the wire rounds sums as coarsely as payloads are, which no rank could remember."""
        return False

    @property
    def residual_after_sum(self) -> bool:
        """Of a linear codec: what a payload left unsaid is known only when the sum of all of them is decoded."""
        return False

    @property
    def needs_feedback(self) -> bool:
        """What it says is off in the mean too, so that training on it alone may go astray."""
        return False

    @property
    def expansion(self) -> float:
        r"""A bound of $E|x - C(x)|^2 / |x|^2$; from 1 on, what is left unsaid could grow without end."""
        return 0.0

    @property
    def alignment(self) -> int:
        """Elements that are coded together: long vectors are cut at multiples of this."""
        return 1

    @abstractmethod
    def encode(self, x: Tensor, state: State, key: int = 0) -> Tensor:
        """The payload of `x`: of any dtype the wire can add up where `linear`, else uint8.

        Args:
            x: a vector.
            state: named tensors this codec keeps between calls (error feedback); most keep none.
            key: of the random draws; from `draw_key`.
        """

    @abstractmethod
    def decode(self, payload: Tensor, like: Tensor, key: int = 0) -> Tensor:
        """The vector that a payload stands for, in the dtype and size of `like`; by the key it was encoded with."""

    def decode_(self, payload: Tensor, x: Tensor, key: int = 0) -> None:
        """Replace `x`, in fp32, by the vector that a payload stands for."""
        x.copy_(self.decode(payload, x, key))

    @abstractmethod
    def nbytes(self, n: int) -> int:
        """Bytes of the payload of n elements."""

    def encode_with_residual_(self, x: Tensor, residual: Tensor, key: int = 0) -> Tensor:
        """The payload of `x + residual`; `x` becomes what that leaves unsaid.

        Args:
            x: a vector in fp32.
            residual: like it; not changed.
            key: of the random draws.
        """
        payload = self.encode(x.add_(residual), {}, key)
        x.sub_(self.decode(payload, x, key))
        return payload

    def encode_pieces_with_residual_(
        self, x: Tensor, residual: Tensor, cuts: Sequence[slice], keys: Sequence[int]
    ) -> list[Tensor]:
        """The payloads of pieces of `x + residual`; `x` becomes what they leave unsaid.

        Args:
            x: a vector in fp32.
            residual: like it; not changed.
            cuts: end to end, at multiples of `alignment`.
            keys: of the random draws, one for each piece.
        """
        return [self.encode_with_residual_(x[cut], residual[cut], key) for cut, key in zip(cuts, keys, strict=True)]

    def total(self, payloads: Sequence[Tensor], like: Tensor, keys: Sequence[int]) -> Tensor:
        """The sum of what payloads stand for, added up in their order; like `like`."""
        total = torch.zeros_like(like)
        for payload, key in zip(payloads, keys, strict=True):
            total += self.decode(payload, like, key)
        return total


def check_feedback(codec: Codec | None) -> None:
    """Refuse a codec that leaves something unsaid for ever.

    Raises:
        ConfigError: naming the wrapper that remembers it.
    """
    if codec is not None and codec.needs_feedback:
        raise ConfigError(
            f"codec={codec}: what it leaves unsaid would be lost, and training go astray; use ErrorFeedback({codec})"
        )


class DrawKey(int):
    """A key of random draws that knows what it has in common with those of other workers.

    Attributes:
        common: the key of what all workers draw alike.
        share: this worker's place among them, in [0, 1): rank / size.
    """

    common: int
    share: float

    def __new__(cls, value: int, *, common: int | None = None, share: float = 0.0) -> DrawKey:
        """An integer with two attributes."""
        key = super().__new__(cls, value)
        key.common, key.share = value if common is None else common, share
        return key


def draw_key(seed: int, step: int, rank: int = 0, stage: int = 0, offset: int = 0) -> DrawKey:
    """The key of the random draws for one message; 63 bits, all different as far as chance goes.

    Args:
        seed: of the run, equal on all ranks.
        step: the training step.
        rank: who draws; leave it at 0 for messages that all ranks must be able to decode.
        stage: which message of the step.
        offset: where in the replica's vector the part begins.
    """
    return DrawKey(_mixed(seed, step, rank, stage, offset))


def worker_key(key: int, rank: int, size: int, piece: int = 0) -> DrawKey:
    """The key with which one worker draws for one piece of a message, from the message's, which all ranks know."""
    return DrawKey(_mixed(key, piece, rank + 1), common=_mixed(key, piece, 0), share=rank / size)


def _mixed(*numbers: int) -> int:
    """One number from several, by the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
        state ^= state >> 31
    return state >> 1


def payload_like(x: Tensor, nbytes: int) -> Tensor:
    """Room for a payload, where `x` is."""
    return torch.empty(nbytes, dtype=torch.uint8, device=x.device)


def as_single(x: Tensor) -> Tensor:
    """The vector in fp32 and without gaps, as kernels take it; itself where it is so."""
    return x.detach().to(torch.float32).contiguous()


def encoded(codec: Codec, x: Tensor, key: int) -> Tensor:
    """The payload of a vector; one without data has a payload without data."""
    if x.is_meta and not codec.linear:
        return payload_like(x, codec.nbytes(x.numel()))
    return codec.encode(x, {}, key)


def decoded(codec: Codec, payload: Tensor, like: Tensor, key: int) -> Tensor:
    """What a payload stands for; one without data stands for a vector without data."""
    return torch.empty_like(like) if like.is_meta else codec.decode(payload, like, key)


def norm_if_finite(x: Tensor) -> tuple[bool, float]:
    """Whether all elements are finite, and the sum of their squares."""
    if x.is_meta or not x.numel():
        return True, 0.0
    square = float(torch.linalg.vector_norm(x.detach(), dtype=torch.promote_types(x.dtype, torch.float32))) ** 2
    return square < float("inf") or bool(x.isfinite().all()), square


def common_draw(key: int) -> tuple[int, float]:
    """The key that all workers of one message draw by, and this one's place among them, in [0, 1)."""
    return (key.common, key.share) if isinstance(key, DrawKey) else (key, 0.0)


def blockwise(x: Tensor, block: int) -> list[Tensor]:
    """The blocks of a vector as rows of a matrix, and what is left of it as one row more; views."""
    whole = x.numel() // block * block
    return [rows for rows in (x[:whole].view(-1, block), x[whole:].view(1, -1)) if rows.numel()]
