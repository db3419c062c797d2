# SPDX-License-Identifier: Apache-2.0
"""Attention on a mesh: each column computes its own heads on its row's samples, without communication."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.errors import ConfigError
from thinwire.tensor2d.dropout import Dropout2D
from thinwire.tensor2d.linear import Linear2D
from thinwire.tensor2d.mesh import Mesh2D, check_divides
from thinwire.tensor2d.module import Module2D


class MultiheadAttention2D(Module2D):
    """Self-attention with the parameter names and the call of `torch.nn.MultiheadAttention`.

    Args:
        layer: the serial layer, made with `batch_first=True`.
        mesh: the ranks.
        seed: seed of dropout.
        number: number of this layer, for dropout.
        name: name of the layer, for error messages.

    Raises:
        ConfigError: keys and values have different sizes, or `add_bias_kv` or `add_zero_attn` is set.
    """

    in_proj_weight: Tensor
    in_proj_bias: Tensor | None
    # With False, torch's encoder layers call `forward`; with True their fast path would read the weights themselves.
    batch_first = False

    def __init__(self, layer: nn.MultiheadAttention, mesh: Mesh2D, *, seed: int, number: int, name: str) -> None:
        super().__init__(mesh)
        weight = cast("Tensor | None", layer.in_proj_weight)
        if weight is None or layer.bias_k is not None or layer.add_zero_attn or not layer.batch_first:
            raise ConfigError(
                f"{name}: only self-attention with batch_first=True, without kdim, vdim, add_bias_kv and "
                "add_zero_attn, can be split"
            )
        self.heads, size = layer.num_heads, layer.embed_dim
        check_divides(self.heads, mesh.columns, f"{name} of {self.heads} heads", f"the mesh has {mesh.columns} columns")
        # The list hides the layer from `named_parameters`: its blocks are registered here, under the serial names.
        self._inner = [Linear2D(weight, layer.in_proj_bias, mesh, sections=(size,) * 3, name=name)]
        for ours in ("weight", "bias"):
            self.register_parameter(f"in_proj_{ours}", getattr(self._inner[0], ours))
            if ours in self._inner[0].placements:
                self.placements[f"in_proj_{ours}"] = self._inner[0].placements[ours]
        self.out_proj = Linear2D(layer.out_proj.weight, layer.out_proj.bias, mesh, name=f"{name}.out_proj")
        self.dropout = Dropout2D(layer.dropout, mesh, seed=seed, layer=number, dimension=1)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Map [b / r, s, h / c] to the same shape; masks as in torch, True for ignored positions.

        Raises:
            ConfigError: the call is cross attention.
        """
        if key is not query or value is not query:
            raise ConfigError(
                "MultiheadAttention2D: query, key and value must be the same tensor; cross attention is not supported"
            )
        # The parameters may have been replaced since, for example by a loaded file.
        inner = self._inner[0]
        inner.weight, inner.bias = self.in_proj_weight, self.in_proj_bias
        parts = inner.project(query, self.shared("in_proj_bias")).chunk(3, dim=-1)
        heads = self.heads // self.mesh.columns
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
        mask = _as_scores(attn_mask, q)
        if key_padding_mask is not None:
            padding = _as_scores(key_padding_mask, q)[:, None, None, :]  # pyright: ignore[reportOptionalSubscript]
            mask = padding if mask is None else mask + padding
        if not self.dropout.training or self.dropout.p == 0:
            output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal and mask is None)
        else:
            # Torch's kernel draws a mask of its own, while that of `Dropout2D` does not depend on the mesh.
            scores = q @ k.mT / q.shape[-1] ** 0.5
            if mask is not None:
                scores = scores + mask
            elif is_causal:
                scores = scores.masked_fill(~scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
            output = self.dropout(scores.softmax(-1)) @ v
        return self.out_proj(output.transpose(1, 2).flatten(2)), None


def _as_scores(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """Convert a torch mask to a float mask that is added to scores: minus infinity where a bool mask is True."""
    if mask is None or mask.dtype != torch.bool:
        return mask if mask is None else mask.to(like.dtype)
    return torch.zeros(mask.shape, dtype=like.dtype, device=mask.device).masked_fill_(mask, -torch.inf)
