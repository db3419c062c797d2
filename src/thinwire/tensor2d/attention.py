# SPDX-License-Identifier: Apache-2.0
"""Attention on a mesh: each column computes its own heads on its row's samples, without communication."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.errors import ConfigError
from thinwire.tensor2d.dropout import Dropout2D
from thinwire.tensor2d.linear import Linear2D, fused_linear
from thinwire.tensor2d.mesh import Mesh2D, check_divides
from thinwire.tensor2d.module import Module2D
from thinwire.tensor2d.ring import positions_of, ring_attend


class Attention2D(nn.Module):
    """Self-attention on a stream [b / r, s, h / c], with optional grouped queries and rotary positions.

    One linear layer computes queries, keys and values. If the columns do not divide the key heads, keys and values have
    separate layers, whose outputs are gathered along the row; each column then takes the heads that it needs.

    Grouped queries: Ainslie et al., GQA, EMNLP 2023, arXiv:2305.13245. Rotary positions: Su et al., RoFormer, 2021,
    arXiv:2104.09864.

    Args:
        query: the whole weight [n d, h] and its bias, or None.
        key: the whole weight [k d, h] and its bias, or None.
        value: the whole weight [k d, h] and its bias, or None.
        out: the whole weight [h, n d] and its bias, or None.
        mesh: the ranks.
        heads: number of query heads, n.
        causal: whether a position attends only to itself and to earlier ones.
        rotary_base: base of the rotary angles; None leaves rotary positions out.
        dropout: probability with which an attention weight is dropped.
        ring: split the sequence over the rows instead of the samples: [b, s / r, h / c], with the positions that
            `positions_of` returns.
        seed: seed of dropout.
        layer: number of this layer, for dropout.

    Raises:
        ConfigError: the columns do not divide the heads, or `ring` is combined with dropout.
    """

    def __init__(
        self,
        query: tuple[Tensor, Tensor | None],
        key: tuple[Tensor, Tensor | None],
        value: tuple[Tensor, Tensor | None],
        out: tuple[Tensor, Tensor | None],
        mesh: Mesh2D,
        *,
        heads: int,
        causal: bool = False,
        rotary_base: float | None = None,
        dropout: float = 0.0,
        ring: bool = False,
        seed: int = 0,
        layer: int = 0,
    ) -> None:
        super().__init__()
        if ring and dropout:
            raise ConfigError(
                f"dropout={dropout} with ring=True: a ring never has all attention weights at once. Use dropout=0.0"
            )
        check_divides(heads, mesh.columns, f"attention of {heads} heads", f"the mesh has {mesh.columns} columns")
        self.size = query[0].shape[0] // heads
        key_heads = key[0].shape[0] // self.size
        self.causal, self.rotary_base, self.ring = causal, rotary_base, ring
        # One product for all three, unless a column would get parts of key heads.
        if key_heads % mesh.columns:
            self.query: Linear2D | None = Linear2D(*query, mesh)
            self.key: Linear2D | None = gathered_heads(key, mesh, heads=heads, key_heads=key_heads, size=self.size)
            self.value: Linear2D | None = gathered_heads(value, mesh, heads=heads, key_heads=key_heads, size=self.size)
            self.projection: Linear2D | None = None
        else:
            self.projection = fused_linear([query, key, value], mesh)
            self.query = self.key = self.value = None
        self.out = Linear2D(*out, mesh)
        self.dropout = Dropout2D(dropout, mesh, seed=seed, layer=layer, dimension=1)

    def forward(self, stream: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map [b / r, s, h / c] to the same shape.

        Args:
            stream: the input of queries, keys and values.
            mask: bool, broadcast to [b / r, n / c, s, s], False for positions that are ignored; or a float mask
                that is added to the scores.

        Raises:
            ConfigError: a mask is combined with `ring`.
        """
        if self.ring and mask is not None:
            raise ConfigError(
                "a mask with ring=True: no rank has all scores. Use causal=True, or split samples over the rows"
            )
        if self.projection is not None:
            sizes = [size // self.projection.mesh.columns for size in self.projection.sections]
            parts = self.projection(stream).split(sizes, dim=-1)
        else:
            assert self.query is not None and self.key is not None and self.value is not None
            parts = self.query(stream), self.key(stream), self.value(stream)
        query, key, value = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts)
        rows = self.out.mesh.along_column
        if self.rotary_base is not None:
            length = stream.shape[1]
            whole = length * rows.size
            positions = (
                positions_of(whole, rows.rank, rows.size) if self.ring else torch.arange(length, device=stream.device)
            )
            query, key = (apply_rotary(x, self.rotary_base, positions.to(x.device)) for x in (query, key))
        if self.ring:
            output = ring_attend(query, key, value, rows, causal=self.causal)
        else:
            output = attend(query, key, value, mask=mask, causal=self.causal, dropout=self.dropout)
        return self.out(output.transpose(1, 2).flatten(2))


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
        output = attend(q, k, v, mask=mask, causal=is_causal and attn_mask is None, dropout=self.dropout)
        return self.out_proj(output.transpose(1, 2).flatten(2)), None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: Dropout2D | None = None,
) -> Tensor:
    """Map queries [b / r, n / c, s, d], and keys and values [b / r, k, s, d], to [b / r, n / c, s, d].

    It uses torch's fused attention. With dropout the scores are computed explicitly, because torch's kernel draws its
    own mask, while that of `Dropout2D` does not depend on the mesh.
    """
    if dropout is None or not dropout.training or dropout.p == 0:
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal and mask is None, enable_gqa=grouped
        )
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    elif causal:
        scores = scores.masked_fill(~scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return dropout(scores.softmax(-1)) @ value


def apply_rotary(x: Tensor, base: float, positions: Tensor) -> Tensor:
    """Rotate the pairs (k, k + d / 2) of x [..., s, d] by angles proportional to their `positions` [s]."""
    half = x.shape[-1] // 2
    exact = torch.promote_types(x.dtype, torch.float32)  # bf16 does not represent all integers above 256
    rates = base ** (-torch.arange(half, device=x.device, dtype=exact) / half)
    angles = positions.to(exact)[:, None] * rates
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


def gathered_heads(
    part: tuple[Tensor, Tensor | None],
    mesh: Mesh2D,
    *,
    heads: int,
    key_heads: int,
    size: int,
    name: str = "Attention2D",
) -> Linear2D:
    """Make a layer of keys or values in which each column gets the key heads of its query heads.

    Raises:
        ConfigError: the query heads of a column would need parts of several key heads.
    """
    own, group = heads // mesh.columns, heads // key_heads
    if group % own and own % group:
        raise ConfigError(
            f"{name}: {own} query heads per column and {group} per key head: one must divide the other. Use "
            "fewer columns"
        )
    first = mesh.column * own // group
    return Linear2D(*part, mesh, head_size=size, heads_kept=(first, first + max(1, own // group)), name=name)


def _as_scores(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """Convert a torch mask to a float mask that is added to scores: minus infinity where a bool mask is True."""
    if mask is None or mask.dtype != torch.bool:
        return mask if mask is None else mask.to(like.dtype)
    return torch.zeros(mask.shape, dtype=like.dtype, device=mask.device).masked_fill_(mask, -torch.inf)
