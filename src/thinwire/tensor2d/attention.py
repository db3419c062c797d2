"""Attention on whole local heads: every column has its own, every row its own samples, and nobody talks."""

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
from thinwire.tensor2d.ring import positions_of, ring_attend


class Attention2D(nn.Module):
    """Self-attention of a stream [b / r, s, h / c], with shared key heads and rotary positions where asked for.

    Queries, keys and values are one linear layer, so that all ranks meet its messages in the same order. Where there
    are fewer key heads than columns, keys and values are gathered along the row, and each column takes those it needs.

    Grouped queries: Ainslie et al., GQA, EMNLP 2023, arXiv:2305.13245. Rotary positions: Su et al., RoFormer, 2021,
    arXiv:2104.09864.

    Args:
        query: [n d, h], the whole weight; its bias beside it, or None.
        key: [k d, h], likewise.
        value: [k d, h], likewise.
        out: [h, n d], likewise.
        mesh: the ranks.
        heads: of the queries, n.
        causal: no position hears a later one.
        rotary_base: of the angles of rotary positions; None is no such positions.
        dropout: probability with which what is heard is dropped.
        ring: the rows hold parts of the sequence, `positions_of` each, and not samples: [b, s / r, h / c].
        seed: of dropout.
        layer: number of this layer, for dropout.

    Raises:
        ConfigError: columns that cannot share the heads, or a ring with dropout.
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
            raise ConfigError(f"dropout={dropout} with ring=True: weights are never whole there; use dropout=0.0")
        check_divides(heads, mesh.columns, f"attention of {heads} heads", f"the mesh has {mesh.columns} columns")
        self.size = query[0].shape[0] // heads
        key_heads = key[0].shape[0] // self.size
        self.causal, self.rotary_base, self.ring = causal, rotary_base, ring
        if key_heads % mesh.columns:
            self.query: Linear2D | None = Linear2D(*query, mesh)
            self.key: Linear2D | None = gathered_heads(key, mesh, heads=heads, key_heads=key_heads, size=self.size)
            self.value: Linear2D | None = gathered_heads(value, mesh, heads=heads, key_heads=key_heads, size=self.size)
            self.projection: Linear2D | None = None
        else:
            self.projection = fused([query, key, value], mesh)
            self.query = self.key = self.value = None
        self.out = Linear2D(*out, mesh)
        self.dropout = Dropout2D(dropout, mesh, seed=seed, layer=layer, dimension=1)

    def forward(self, stream: Tensor, mask: Tensor | None = None) -> Tensor:
        """[b / r, s, h / c] to the same.

        Args:
            stream: who asks and is asked.
            mask: bool, broadcast to [b / r, n / c, s, s], False where nothing is to be heard; or added to the scores.

        Raises:
            ConfigError: a mask in a ring.
        """
        if self.ring and mask is not None:
            raise ConfigError("a mask with ring=True: no rank sees all scores; use causal=True, or samples over rows")
        query, key, value = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in self._project(stream))
        rows = self.out.mesh.along_column
        if self.rotary_base is not None:
            length = stream.shape[1]
            places = positions_of(length * rows.size, rows.rank, rows.size) if self.ring else torch.arange(length)
            query, key = (rotated(x, self.rotary_base, places.to(x.device)) for x in (query, key))
        if self.ring:
            heard = ring_attend(query, key, value, rows, causal=self.causal)
        else:
            heard = attend(query, key, value, mask=mask, causal=self.causal, dropout=self.dropout)
        return self.out(heard.transpose(1, 2).flatten(2))

    def _project(self, stream: Tensor) -> tuple[Tensor, ...]:
        if self.projection is not None:
            sizes = [size // self.projection.mesh.columns for size in self.projection.sections]
            return self.projection(stream).split(sizes, dim=-1)
        assert self.query is not None and self.key is not None and self.value is not None
        return self.query(stream), self.key(stream), self.value(stream)


class MultiheadAttention2D(Module2D):
    """A `torch.nn.MultiheadAttention` of a stream to itself, with its parameters' names and its call.

    Args:
        layer: the serial layer, made with `batch_first=True`.
        mesh: the ranks.
        seed: of dropout.
        number: of this layer, for dropout.
        name: of the layer, for messages.

    Raises:
        ConfigError: a layer with other sizes for keys and values, or with biases of its own for them.
    """

    in_proj_weight: Tensor
    in_proj_bias: Tensor | None
    batch_first = False  # so that torch's encoder layers call `forward` instead of reading the weights themselves

    def __init__(self, layer: nn.MultiheadAttention, mesh: Mesh2D, *, seed: int, number: int, name: str) -> None:
        super().__init__(mesh)
        weight = cast("Tensor | None", layer.in_proj_weight)
        if weight is None or layer.bias_k is not None or layer.add_zero_attn or not layer.batch_first:
            raise ConfigError(
                f"{name}: only attention to itself with batch_first=True, without kdim, vdim, add_bias_kv and "
                "add_zero_attn, can be cut"
            )
        self.heads, size = layer.num_heads, layer.embed_dim
        check_divides(self.heads, mesh.columns, f"{name} of {self.heads} heads", f"the mesh has {mesh.columns} columns")
        # Its blocks bear the serial names, so it holds them itself.
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
        """[b / r, s, h / c] to the same; masks as torch's, True where nothing is to be heard.

        Raises:
            ConfigError: attention to something else.
        """
        if key is not query or value is not query:
            raise ConfigError(
                "MultiheadAttention2D: query, key and value must be one tensor; cross attention is not cut"
            )
        inner = self._inner[0]
        inner.weight, inner.bias = self.in_proj_weight, self.in_proj_bias
        parts = inner.project(query, self.shared("in_proj_bias")).chunk(3, dim=-1)
        heads = self.heads // self.mesh.columns
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
        mask = _as_scores(attn_mask, q)
        if key_padding_mask is not None:
            padding = _as_scores(key_padding_mask, q)[:, None, None, :]  # pyright: ignore[reportOptionalSubscript]
            mask = padding if mask is None else mask + padding
        heard = attend(q, k, v, mask=mask, causal=is_causal and attn_mask is None, dropout=self.dropout)
        return self.out_proj(heard.transpose(1, 2).flatten(2)), None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: Dropout2D | None = None,
) -> Tensor:
    """[b / r, n / c, s, d] of queries and [b / r, k, s, d] of keys and values to [b / r, n / c, s, d].

    Torch's fused attention, or where something is dropped the plain one, because masks are keyed by place.
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


def rotated(x: Tensor, base: float, places: Tensor) -> Tensor:
    """Rotate pairs (k, k + d / 2) of [..., s, d] by angles that grow with the position; `places` are s of these."""
    half = x.shape[-1] // 2
    exact = torch.promote_types(x.dtype, torch.float32)
    rates = base ** (-torch.arange(half, device=x.device, dtype=exact) / half)
    angles = places.to(exact)[:, None] * rates
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


def fused(parts: list[tuple[Tensor, Tensor | None]], mesh: Mesh2D) -> Linear2D:
    """Several linear layers of one input as one, of which each column has its share of every part."""
    weight = torch.cat([weight.detach() for weight, _ in parts])
    biases = [bias.detach() for _, bias in parts if bias is not None]
    sizes = tuple(part.shape[0] for part, _ in parts)
    return Linear2D(
        weight.requires_grad_(), torch.cat(biases).requires_grad_() if biases else None, mesh, sections=sizes
    )


def gathered_heads(
    part: tuple[Tensor, Tensor | None],
    mesh: Mesh2D,
    *,
    heads: int,
    key_heads: int,
    size: int,
    name: str = "Attention2D",
) -> Linear2D:
    """A layer of keys or values that gives each column the whole heads that its queries ask.

    Raises:
        ConfigError: a column's queries ask parts of several heads.
    """
    own, group = heads // mesh.columns, heads // key_heads
    if group % own and own % group:
        raise ConfigError(
            f"{name}: {own} query heads a column and {group} for each key head; one must divide the other, so use "
            "fewer columns"
        )
    first = mesh.column * own // group
    return Linear2D(*part, mesh, head_size=size, kept=(first, first + max(1, own // group)), name=name)


def _as_scores(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """What is added to scores for a mask of torch's: minus infinity where a bool one is True."""
    if mask is None or mask.dtype != torch.bool:
        return mask if mask is None else mask.to(like.dtype)
    return torch.zeros(mask.shape, dtype=like.dtype, device=mask.device).masked_fill_(mask, -torch.inf)
