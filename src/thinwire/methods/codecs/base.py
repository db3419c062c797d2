# SPDX-License-Identifier: Apache-2.0
"""The interface of codecs, the keys of their random draws, and helpers that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.core.kernels import as_fp32, join
from thinwire.errors import ConfigError
from thinwire.registry import Recipe

State = MutableMapping[str, Tensor]
Rounds = Generator[Tensor, Tensor, None]
"""A mean that a codec computes: it yields vectors and is sent their means over workers."""
_MASK_64 = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True)
class CodecTraits:
    """The properties of a codec that strategies and means read, as `codec.traits`.

    The defaults describe an unbiased codec whose payload is a vector of bytes.

    Attributes:
        needs_feedback: the codec is biased, so training without error feedback may diverge.
        error_bound: an upper bound of `E|x - C(x)|^2 / |x|^2`; if it is 1 or more, error feedback may diverge. 0 if no
            bound is stated: for casts, and for codecs made for error feedback, such as `TopK` and `OneBit`.
        alignment: the number of elements encoded together; long vectors are split only at multiples of it.
        dtype: the dtype of payloads.
        linear: the payload of a sum is the sum of the payloads, so an all-reduce may add payloads.
        rounds_sums: a linear codec's all-reduce rounds sums to the payload's dtype; no rank can measure that error.
        residual_after_sum: a linear codec's error is known only after the sum of all payloads is decoded.
        sign_only: all elements of a block are decoded to one absolute value.
        keeps_size: elements are decoded to about their size; otherwise, as in a vote, the codec fits gradients only.
        keeps_residual: the compression error of one message is added to the next.
        forgets: some of the compression error is never sent.
        one_round: every worker's payload goes to all others unchanged, and no server encodes it again.
        own_mean: the codec also decides how means are computed, such as in how many rounds. Always true with
            `one_round`.
        separable: parts of a vector, cut at multiples of `alignment`, can be encoded and decoded one at a time;
            `part_of` and `join_parts` then take payloads apart and put them together, with the same bits.
        elementwise: every element is encoded by itself, without dropping any.
        takes_nan: on a GPU `encode` takes NaN, and `decode` any bytes, without an error. The result may then be
            anything, since all ranks know of it. The host then does not wait to learn whether a vector is finite
            before it is encoded.
        growing: names or prefixes in the codec's state of tensors whose shape may change.
        inelastic: why workers cannot continue after one of them is lost, under `attach(elastic=True)`; empty if they
            can.

    Example:
        >>> import thinwire
        >>> thinwire.Bf16().traits.linear, thinwire.TopK(0.1).traits.needs_feedback
        (True, True)
    """

    needs_feedback: bool = False
    error_bound: float = 0.0
    alignment: int = 1
    dtype: torch.dtype = torch.uint8
    linear: bool = False
    rounds_sums: bool = False
    residual_after_sum: bool = False
    sign_only: bool = False
    keeps_size: bool = True
    keeps_residual: bool = False
    forgets: bool = False
    one_round: bool = False
    own_mean: bool = False
    separable: bool = False
    elementwise: bool = False
    takes_nan: bool = False
    growing: tuple[str, ...] = ()
    inelastic: str = ""

    def __post_init__(self) -> None:
        if self.one_round:
            object.__setattr__(self, "own_mean", True)


class Codec(Recipe, ABC):
    """Base class of codecs, which compress vectors into payloads (the tensors that are sent).

    Subclasses are frozen dataclasses. They need only `encode`, `decode` and `nbytes`; everything else has a default.
    The random numbers of an encoding depend on its `key` alone: the same key gives the same numbers on any device.

    Example:
        >>> import torch
        >>> from thinwire import Codec, Quantize
        >>> codec: Codec = Quantize(bits=8)
        >>> x = torch.tensor([1.0, 0.5, -0.25])
        >>> payload = codec.encode(x, {}, key=1)
        >>> payload.numel() == codec.nbytes(3)
        True
        >>> torch.allclose(codec.decode(payload, x, key=1), x, atol=0.01)
        True
    """

    # You need only these three, and `make_traits` if the defaults of `CodecTraits` do not fit.

    @abstractmethod
    def encode(self, x: Tensor, state: State, key: int = 0) -> Tensor:
        """Compress `x`.

        Args:
            x: a vector.
            state: named tensors that the codec keeps between calls, such as the residual of error feedback; most codecs
                keep none.
            key: the seed of the random numbers, from `draw_key`.

        Returns:
            The payload, a tensor with the codec's `dtype`.
        """

    @abstractmethod
    def decode(self, payload: Tensor, like: Tensor, key: int = 0) -> Tensor:
        """Decompress a payload into the dtype and size of `like`, with the key that it was encoded with."""

    @abstractmethod
    def nbytes(self, n: int) -> int:
        """Return the size in bytes of the payload of a vector of n elements."""

    @cached_property
    def traits(self) -> CodecTraits:
        """The result of `make_traits`."""
        return self.make_traits()

    def make_traits(self) -> CodecTraits:
        """Return the traits; `traits` calls it once.

        The defaults describe an unbiased codec whose payload is a vector of bytes.
        """
        return CodecTraits()

    def check(self, size: int) -> None:
        """Check that the codec works with this number of workers; `attach` calls it before the first step.

        Raises:
            ConfigError: with the value, the rule and the fix.
        """

    def part_of(self, payload: Tensor, n: int, part: slice) -> Tensor:
        """Return the payload of a part of a vector of n elements; for a separable codec."""
        raise self._not_separable()

    def join_parts(self, payloads: Sequence[Tensor], cuts: Sequence[slice]) -> Tensor:
        """Return the payload of a vector from those of its parts, end to end; for a separable codec."""
        raise self._not_separable()

    def _not_separable(self) -> ConfigError:
        return ConfigError(f"codec={self}: its payloads cannot be split. Encode and decode whole vectors")

    def encode_with_residual_(self, x: Tensor, residual: Tensor, key: int = 0) -> Tensor:
        """Encode `x + residual`, and overwrite `x` with the new residual: `x + residual` minus the decoded payload.

        Args:
            x: a vector in fp32.
            residual: the previous residual, of the same size and dtype; not changed.
            key: the seed of the random numbers.
        """
        payload = self.encode(x.add_(residual), {}, key)
        x.sub_(self.decode(payload, x, key))
        return payload

    def encode_pieces_with_residual_(
        self, x: Tensor, residual: Tensor, cuts: Sequence[slice], keys: Sequence[int]
    ) -> list[Tensor]:
        """Encode each piece of `x + residual`, and overwrite `x` with the new residual.

        Args:
            x: a vector in fp32.
            residual: the previous residual, of the same size and dtype; not changed.
            cuts: the pieces as slices, each starting where the one before it ends, at a multiple of `alignment`.
            keys: the seeds of the random numbers, one for each piece.
        """
        return [self.encode_with_residual_(x[cut], residual[cut], key) for cut, key in zip(cuts, keys, strict=True)]

    def decode_pieces_(self, payloads: Sequence[Tensor], x: Tensor, cuts: Sequence[slice], keys: Sequence[int]) -> None:
        """Decompress the payload of each piece of `x`, which is in fp32.

        Args:
            payloads: one for each piece.
            x: overwritten with the decoded vector.
            cuts: the pieces as slices, end to end.
            keys: the keys that the pieces were encoded with.
        """
        for payload, cut, key in zip(payloads, cuts, keys, strict=True):
            x[cut].copy_(self.decode(payload, x[cut], key))

    def decode_sum(self, payloads: Sequence[Tensor], like: Tensor, keys: Sequence[int]) -> Tensor:
        """Decode the payloads and add them in the given order, in the dtype and size of `like`."""
        # In a fixed order, so that the sum's bits do not depend on which payload arrived first.
        total = torch.zeros_like(like)
        for payload, key in zip(payloads, keys, strict=True):
            total += self.decode(payload, like, key)
        return total


class Matrix(NamedTuple):
    """The position of a tensor in a vector, and its shape as a matrix; a one-dimensional tensor is one row.

    Attributes:
        start: the index of its first element.
        rows: the size of the tensor's outermost dimension in memory.
        columns: the product of the other sizes.
        place: the index of its first element in the vector of all parameters, of which this vector may be a part.
    """

    start: int
    rows: int
    columns: int
    place: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.rows * self.columns

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.size

    def of(self, vector: Tensor) -> Tensor:
        """Return the matrix as a view of the vector."""
        return vector[self.start : self.stop].view(self.rows, self.columns)


MATRIX_TRAITS = CodecTraits(linear=True, residual_after_sum=True, keeps_residual=True, dtype=torch.float32)
"""All-reduces add the messages of a `MatrixCodec`, which keeps the residual."""


class MatrixCodec(Codec):
    """Base class of codecs that need the shapes of tensors: they compute means themselves, by two all-reduces.

    They send vectors without shapes uncompressed.
    """

    @abstractmethod
    def mean(
        self, x: Tensor, residual: Tensor, matrices: Sequence[Matrix], state: State, *, key: int, share: float
    ) -> Rounds:
        """Yield two vectors, which may be empty; each `yield` evaluates to the vector's mean over workers.

        The lines after the second `yield`, which change `state` and the residual, run only if the means are finite on
        all ranks.

        Args:
            x: a vector in fp32 with the residual added; overwritten with the mean.
            residual: overwritten with the part of `x` that the mean does not contain.
            matrices: the tensors of `x`, in order and without gaps.
            state: the state of the codec, equal on all ranks.
            key: the key of the random draws, equal on all ranks.
            share: each worker's residual is its vector minus `share` times the mean; 1 if all workers contribute.
        """

    def make_traits(self) -> CodecTraits:
        """See `CodecTraits`."""
        return MATRIX_TRAITS

    def encode(self, x: Tensor, state: State, key: int = 0) -> Tensor:
        """Return the elements uncompressed, in fp32."""
        return as_fp32(x).clone()

    def decode(self, payload: Tensor, like: Tensor, key: int = 0) -> Tensor:
        """Return the elements."""
        return payload.to(like.dtype)

    def nbytes(self, n: int) -> int:
        """Return four bytes per element, for a vector without shapes."""
        return 4 * n


NOT_INHERITED = (
    # These describe how a payload is laid out, sent and added, which is what a wrapper may change.
    *("dtype", "separable", "linear", "rounds_sums", "residual_after_sum", "one_round", "own_mean"),
    # These describe one class alone; code that reads them looks at the codec inside too.
    *("elementwise", "growing", "inelastic"),
)
"""The traits of a `CodecWrapper` that are not those of the codec inside, unless its class changes them."""


class CodecWrapper(Codec):
    """A codec around another one, with its traits except `NOT_INHERITED`.

    Attributes:
        codec: the codec inside.
    """

    codec: Codec

    def make_traits(self) -> CodecTraits:
        """See `CodecTraits`."""
        return self.traits_around()

    def traits_around(self, **changes: Any) -> CodecTraits:
        """Return the traits of the codec inside, but the defaults of `NOT_INHERITED`, with these changes."""
        defaults = CodecTraits()
        return replace(self.codec.traits, **{**{name: getattr(defaults, name) for name in NOT_INHERITED}, **changes})

    def encode(self, x: Tensor, state: State, key: int = 0) -> Tensor:
        """Encode with the codec inside."""
        return self.codec.encode(x, state, key)

    def decode(self, payload: Tensor, like: Tensor, key: int = 0) -> Tensor:
        """Decode with the codec inside."""
        return self.codec.decode(payload, like, key)

    def nbytes(self, n: int) -> int:
        """Return the size in bytes of the payload of the codec inside."""
        return self.codec.nbytes(n)


def check_vectors(codec: Codec) -> None:
    """Check that a codec does not need the shapes of tensors.

    Raises:
        ConfigError: it needs them; the error names the strategies that know them.
    """
    inner = codec.codec if isinstance(codec, CodecWrapper) else codec
    if isinstance(inner, MatrixCodec):
        raise ConfigError(
            f"codec={codec}: it compresses matrices, and the shapes of tensors are not known here. Use it as "
            "AllReduce(codec) or LocalSGD(period, codec=codec) under attach"
        )


def check_payloads(codec: Codec) -> None:
    """Check that a codec only makes payloads, and does not decide itself how means are computed.

    Raises:
        ConfigError: it decides that, or it needs the shapes of tensors.
    """
    check_vectors(codec)
    if codec.traits.own_mean:
        raise ConfigError(
            f"codec={codec}: this strategy itself decides which ranks exchange payloads. Use the codec inside it"
        )


def check_feedback(codec: Codec | None) -> None:
    """Check that a biased codec has error feedback.

    Raises:
        ConfigError: it has none.
    """
    if codec is not None and codec.traits.needs_feedback:
        raise ConfigError(
            f"codec={codec}: it is biased, so training without error feedback may diverge. Use ErrorFeedback({codec})"
        )


def check_sizes(codec: Codec | None, instead: str = "OneBit()") -> None:
    """Check that a codec keeps the sizes of elements, as vectors other than the gradient of one step need.

    Args:
        codec: the codec of the strategy.
        instead: a codec for the error message.

    Raises:
        ConfigError: it does not keep them.
    """
    if codec is not None and not codec.traits.keeps_size:
        raise ConfigError(
            f"codec={codec}: every element is decoded to plus or minus one, whatever its size, which fits the "
            f"gradient of one step only. Use AllReduce({codec}), or a codec that sends sizes, such as {instead}"
        )


def check_differences(codec: Codec | None) -> None:
    """Check that a codec can compress differences, sums and momenta: `check_sizes` and `check_feedback`.

    Raises:
        ConfigError: it cannot.
    """
    check_sizes(codec, "ErrorFeedback(OneBit())")
    check_feedback(codec)


def sends_all(codec: Codec | None) -> bool:
    """Return True if all that a codec encodes is sent sooner or later, so the effective learning rate is unchanged."""
    return codec is None or (codec.traits.keeps_size and not codec.traits.forgets)


class DrawKey(int):
    """A key of random draws that can be correlated with those of other workers.

    Attributes:
        shared: the key of the draws that all workers have in common.
        shift: this worker's shift of them in [0, 1): rank / size.
    """

    # A subclass of int, so that codecs without correlated draws can use it as a plain key.
    shared: int
    shift: float

    def __new__(cls, value: int, *, shared: int | None = None, shift: float = 0.0) -> DrawKey:
        """Make the key; by default it is shared and has no shift."""
        key = super().__new__(cls, value)
        key.shared, key.shift = value if shared is None else shared, shift
        return key


def draw_key(seed: int, step: int, rank: int = 0, stage: int = 0, offset: int = 0) -> DrawKey:
    """Return the key of the random draws for one message: a hash of 63 bits of all arguments.

    Args:
        seed: the seed of the run, equal on all ranks.
        step: the training step.
        rank: the rank that draws; 0 for messages that all ranks must be able to decode.
        stage: the number of the message within the step.
        offset: the index of the part's first element in the replica's vector.
    """
    # Not Python's `hash`, which may differ between versions; and no generator, whose state would have to be saved.
    return DrawKey(_hash(seed, step, rank, stage, offset))


def worker_key(key: int, rank: int, size: int, piece: int = 0) -> DrawKey:
    """Return one worker's key for one piece of a message; every rank can compute it from the message's key."""
    # From rank + 1 on, since 0 is taken by the shared key.
    return DrawKey(_hash(key, piece, rank + 1), shared=_hash(key, piece, 0), shift=rank / size)


class StageKeys(NamedTuple):
    """The keys of a mean in two stages, one for each rank.

    Attributes:
        own: the keys of this worker's payloads, by the rank that decodes them.
        received: the keys of the payloads that this rank decodes, by the worker that encoded them.
        means: the keys of the encoded means, by the rank that encoded them.
    """

    own: list[DrawKey]
    received: list[DrawKey]
    means: list[DrawKey]

    @classmethod
    def of(cls, key: int, rank: int, size: int) -> StageKeys:
        """Derive all keys from the key of the mean."""
        return cls(
            [worker_key(key, rank, size, piece) for piece in range(size)],
            [worker_key(key, worker, size, rank) for worker in range(size)],
            # Pieces from `size` on are no worker's, so that these draws are independent of the workers'.
            [worker_key(key, 0, 1, size + server) for server in range(size)],
        )


def _hash(*numbers: int) -> int:
    """Hash several integers with the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK_64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
        state ^= state >> 31
    # Without the top bit the key fits a signed 64-bit integer, which torch and the kernels take.
    return state >> 1


def check_multiple_of_8(name: str, elements: int, usual: int) -> None:
    """Check that the elements that share a scale fill whole bytes of a bit plane.

    Raises:
        ConfigError: they do not.
    """
    if elements < 8 or elements % 8:
        raise ConfigError(
            f"{name}={elements}: must be a multiple of 8, to fill whole bytes of bits. Use {usual}, for example"
        )


class PlanesCodec(Codec):
    """A codec whose payload has the scales in fp32, then the lowest bit of all elements, then the next bit.

    Attributes:
        bits: bits per element.
        block: elements that share a scale.
    """

    bits: int
    block: int

    def __post_init__(self) -> None:
        check_multiple_of_8("block", self.block, 2048)

    @abstractmethod
    def read_(self, payload: Tensor, x: Tensor, key: int) -> None:
        """Decode a payload into `x`, which is in fp32."""

    @abstractmethod
    def write_(self, x: Tensor, payload: Tensor, key: int) -> None:
        """Write the payload of `x`."""

    def span(self, n: int) -> int:
        """Return how many elements of a vector of n share a scale."""
        return self.block

    def encode(self, x: Tensor, state: State, key: int = 0) -> Tensor:
        """Write the payload."""
        payload = x.new_empty(self.nbytes(x.numel()), dtype=torch.uint8)
        self.write_(x, payload, key)
        return payload

    def decode(self, payload: Tensor, like: Tensor, key: int = 0) -> Tensor:
        """Decode each element to its level, times the scale of its block."""
        x = torch.empty_like(like, dtype=torch.float32)
        self.read_(payload, x, key)
        return x.to(like.dtype)

    def nbytes(self, n: int) -> int:
        """Return `bits` per element, in whole bytes, and 4 bytes per scale."""
        return 4 * -(-n // self.span(n)) + self.bits * -(-n // 8)


class ResidualPlanesCodec(PlanesCodec):
    """A codec without random draws, whose kernel also computes the residual, in one pass over memory."""

    @abstractmethod
    def write_(self, x: Tensor, payload: Tensor, key: int, left: Tensor | None = None) -> None:
        """Write the payload of `x`, or of `x + left`; then `left` becomes the new residual."""

    def encode_with_residual_(self, x: Tensor, residual: Tensor, key: int = 0) -> Tensor:
        """Encode in one pass over memory."""
        payload = x.new_empty(self.nbytes(x.numel()), dtype=torch.uint8)
        # The new residual belongs into `x`; swapping the two does not change their sum.
        self.write_(residual, payload, key, left=x)
        return payload

    def encode_pieces_with_residual_(
        self, x: Tensor, residual: Tensor, cuts: Sequence[slice], keys: Sequence[int]
    ) -> list[Tensor]:
        """Encode in one pass over all pieces."""
        return self._split(self.encode_with_residual_(x, residual), x.numel(), cuts)

    def decode_pieces_(self, payloads: Sequence[Tensor], x: Tensor, cuts: Sequence[slice], keys: Sequence[int]) -> None:
        """Decode in one pass over all pieces."""
        self.read_(self.join_parts(payloads, cuts), x, 0)

    def part_of(self, payload: Tensor, n: int, part: slice) -> Tensor:
        """Return the scales and the bits of the part, which starts at the beginning of a block."""
        return payload if part == slice(0, n) else self._split(payload, n, [part, slice(n, n)])[0]

    def join_parts(self, payloads: Sequence[Tensor], cuts: Sequence[slice]) -> Tensor:
        """Join the scales, and each plane, of parts of whole blocks."""
        parts = [self._planes(payload, cut.stop - cut.start) for payload, cut in zip(payloads, cuts, strict=True)]
        rows = (row[bit] for bit in range(self.bits) for _, row in parts)
        return torch.cat([*(scales for scales, _ in parts), *rows])

    def _split(self, payload: Tensor, n: int, cuts: Sequence[slice]) -> list[Tensor]:
        """Split a payload into those of pieces, which start at multiples of 8.

        A block that belongs to several pieces has its scale in each of them.
        """
        if len(cuts) == 1:
            return [payload]
        span, (scales, planes) = self.span(n), self._planes(payload, n)
        found: list[Tensor] = []
        for cut in cuts:
            if cut.start == cut.stop:  # vectors shorter than the number of ranks have empty pieces
                found.append(payload[:0])
                continue
            rows = (plane[cut.start // 8 : -(-cut.stop // 8)] for plane in planes)
            found.append(join([scales[cut.start // span * 4 : -(-cut.stop // span) * 4], *rows]))
        return found

    def _planes(self, payload: Tensor, n: int) -> tuple[Tensor, list[Tensor]]:
        """Return the scales and the bit planes of the payload of n elements."""
        head, plane = 4 * -(-n // self.span(n)), -(-n // 8)
        return payload[:head], [payload[head + bit * plane : head + (bit + 1) * plane] for bit in range(self.bits)]
