# SPDX-License-Identifier: Apache-2.0
"""A codec for traffic between nodes, with plain means within them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from torch import Tensor

from thinwire.core.comm.members import check_nodes
from thinwire.core.validation import Range
from thinwire.errors import ConfigError
from thinwire.methods.codecs.base import Codec, CodecTraits, CodecWrapper
from thinwire.methods.codecs.cast import Bf16
from thinwire.registry import registered


@registered
class BetweenNodes(CodecWrapper):
    r"""Average uncompressed within each node, and with a codec between nodes.

    With nodes of $m$ consecutive ranks, each rank adds one $m$-th of the vector for its node. Ranks with the same
    position in their nodes then average their parts with the codec, and each node gathers its parts. For `PowerSGD`,
    parts are whole tensors, as even as these allow. The mean has the error of $n/m$ encodings, and each rank sends a
    payload of an $m$-th of the vector over the slow links.
    Traffic per rank: $2 \frac{m-1}{m}$ of the vector within its node and 4 bytes to each rank of it, and between nodes
    the codec's for an $m$-th of the vector among $n/m$ workers. State: the codec's; a rank's residual is zero outside
    its part. A checkpoint that is loaded with another number of workers keeps an $m$-th of the residuals.

    Args:
        codec: the codec between nodes, with error feedback if needed: `BetweenNodes(ErrorFeedback(OneBit()))`.
        node_size: $m$, ranks per node; must divide the number of workers.

    Example:
        >>> import torch, thinwire
        >>> from thinwire.methods.reduce.compressed_all_reduce import compressed_mean_
        >>> def mean(comm):
        ...     x = torch.full((4,), float(comm.rank))
        ...     return compressed_mean_(comm, x, BetweenNodes(thinwire.Quantize(8), node_size=2), {}).wait().tolist()
        >>> thinwire.run_threads(4, mean)[3]
        [1.5, 1.5, 1.5, 1.5]
    """

    codec: Codec = Bf16()
    node_size: Annotated[int, Range("1..", "Use the number of ranks of a machine")] = 2

    def __post_init__(self) -> None:
        if isinstance(self.codec, BetweenNodes):
            raise ConfigError(f"codec={self.codec}: nested nodes are not supported. Use its codec")

    def make_traits(self) -> CodecTraits:
        """See `CodecTraits`."""
        return self.traits_around(
            own_mean=True,
            inelastic="its nodes are neighboring ranks, whose numbers change when one is lost. Use the codec inside it",
        )

    def check(self, size: int) -> None:
        """Check that the workers fill whole nodes; a single worker is accepted."""
        if size > 1:
            check_nodes(self.node_size, size)

    def decode_sum(self, payloads: Sequence[Tensor], like: Tensor, keys: Sequence[int]) -> Tensor:
        """Decode and add with the codec inside."""
        return self.codec.decode_sum(payloads, like, keys)
