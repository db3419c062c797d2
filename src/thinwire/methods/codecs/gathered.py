# SPDX-License-Identifier: Apache-2.0
"""Payloads that go unchanged to all workers, in one round."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.methods.codecs.base import Codec, CodecTraits, CodecWrapper
from thinwire.methods.codecs.one_bit import OneBit
from thinwire.registry import registered


@registered
class Gathered(CodecWrapper):
    r"""Send every worker's payload to all others in one round; each averages the decoded vectors.

    $$\bar y = \tfrac1n \sum_i C(x_i)$$

    No payload is encoded a second time, so the mean has only the error of the workers' encodings, and takes one latency
    instead of two. Each worker sends $n - 1$ payloads of the whole vector: as many bytes as in two stages for two
    workers, and $n/2$ times as many for $n$.

    Use it for two workers (`Gathered(Quantize(8))` is an all-reduce in 8 bits and one round), if latency is longer than
    the transfer, and for sparse codecs, whose servers would select again among the workers' elements, as in SparseLoCo,
    2025, arXiv:2508.15706. Put it inside error feedback: `ErrorFeedback(Gathered(ChunkedTopK()))`.

    Args:
        codec: $C$, which encodes the payloads; an all-reduce must not be able to add them.

    Example:
        >>> import torch, thinwire
        >>> from thinwire.methods.reduce.compressed_all_reduce import compressed_mean_
        >>> def mean(comm):
        ...     x = torch.tensor([[4.0, 0.0, 0.0], [0.0, 2.0, 0.0]])[comm.rank]
        ...     return compressed_mean_(comm, x, Gathered(thinwire.TopK(0.3)), {}).wait().tolist()
        >>> thinwire.run_threads(2, mean)[0]
        [2.0, 1.0, 0.0]
    """

    codec: Codec = OneBit()

    def __post_init__(self) -> None:
        if self.codec.traits.linear:
            raise ConfigError(
                f"codec={self.codec}: an all-reduce can add its payloads, in fewer bytes. Use it without Gathered"
            )
        if self.codec.traits.keeps_residual or self.codec.traits.one_round:
            raise ConfigError(
                f"codec={self.codec}: must be a codec without feedback. Use ErrorFeedback(Gathered(OneBit())) for "
                "feedback"
            )

    def make_traits(self) -> CodecTraits:
        """See `CodecTraits`."""
        # The elements of a mean of signs differ in size.
        return self.traits_around(one_round=True, sign_only=False)

    def encode_with_residual_(self, x: Tensor, residual: Tensor, key: int = 0) -> Tensor:
        """Encode with the codec inside."""
        return self.codec.encode_with_residual_(x, residual, key)

    def decode_sum(self, payloads: Sequence[Tensor], like: Tensor, keys: Sequence[int]) -> Tensor:
        """Decode and add with the codec inside."""
        return self.codec.decode_sum(payloads, like, keys)
