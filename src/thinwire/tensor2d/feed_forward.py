"""The feed-forward part of a transformer block."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.errors import ConfigError
from thinwire.tensor2d.attention import fused
from thinwire.tensor2d.linear import Linear2D
from thinwire.tensor2d.mesh import Mesh2D

Weights = tuple[Tensor, Tensor | None]


class FeedForward2D(nn.Module):
    """Two linear layers with an activation between them, or three with a gate, of [b / r, s, h / c].

    With "swiglu" gate and value are one layer of h -> 2 f, of which each column has its share of both: one product
    instead of two.

    Shazeer, GLU Variants Improve Transformer, 2020, arXiv:2002.05202.

    Args:
        wide: [f, h], the whole weight and its bias or None; with "swiglu" of the value.
        out: [h, f], likewise.
        mesh: the ranks.
        activation: "gelu", or "swiglu" with a gate.
        gate: [f, h], likewise, for "swiglu".

    Raises:
        ConfigError: a gate without an activation for it, or the other way round.
    """

    def __init__(
        self,
        wide: Weights,
        out: Weights,
        mesh: Mesh2D,
        *,
        activation: Literal["gelu", "swiglu"] = "gelu",
        gate: Weights | None = None,
    ) -> None:
        super().__init__()
        if (activation == "swiglu") != (gate is not None):
            raise ConfigError(f"activation={activation!r}: swiglu, and it alone, needs the weights of a gate")
        self.activation = activation
        self.wide = fused([gate, wide] if gate is not None else [wide], mesh)
        self.out = Linear2D(*out, mesh)

    def forward(self, stream: Tensor) -> Tensor:
        """[b / r, s, h / c] to the same."""
        wide = self.wide(stream)
        if self.activation == "gelu":
            return self.out(F.gelu(wide))
        gate, value = wide.chunk(2, dim=-1)
        return self.out(F.silu(gate) * value)
