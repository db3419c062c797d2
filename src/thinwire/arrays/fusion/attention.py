# SPDX-License-Identifier: Apache-2.0
"""Attention of all models at once."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from thinwire.arrays.fusion.batch import Batch, Value, along, loop
from thinwire.arrays.fusion.rng import dropout
from thinwire.arrays.fusion.routing import COMPOSITES, RANDOM, Context, rule
from thinwire.core.torch_internals import safe_softmax


@rule(F.scaled_dot_product_attention)
def scaled_dot_product_attention(
    context: Context,
    function: Any,
    query: Value,
    key: Value,
    value: Value,
    attn_mask: Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attend with the models as more samples; dropout needs each model's own mask, and so attention in steps."""
    parts: Any = (query, key, value)
    options, settings = (is_causal, scale, enable_gqa), {"scale": scale, "enable_gqa": enable_gqa}
    if context.model is not None:
        mask: Any = attn_mask
        if not dropout_p:
            return function(*parts, mask, 0.0, is_causal, **settings)
        return _in_steps(context, parts, mask, dropout_p, options)
    alike = len({(len(part.shape), part.shape[0]) for part in parts}) == 1
    if len(query.shape) < 3 or not (alike or dropout_p):
        # A single head of a single sample has no axis into which the models could be folded; nor could they be folded
        # into samples over which keys or values are broadcast.
        return loop(function, context.size, *parts, attn_mask, dropout_p, is_causal, **settings)
    size = context.size
    batched, mask = [along(part, 0, size) for part in parts], None
    if attn_mask is not None:
        mask = along(attn_mask, 0, size)
        mask = mask.view(size, *[1] * (len(query.shape) + 1 - mask.dim()), *mask.shape[1:])
    if dropout_p:
        return Batch(_in_steps(context, batched, mask, dropout_p, options), 0)
    if mask is not None:
        mask = mask.expand(size, query.shape[0], *mask.shape[2:]).flatten(0, 1)
    folded = [part.flatten(0, 1) for part in batched]
    found = function(*folded, mask, 0.0, is_causal, **settings)
    return Batch(found.unflatten(0, (size, -1)), 0)


def _in_steps(
    context: Context, parts: Sequence[Tensor], mask: Tensor | None, dropout_p: float, options: tuple[Any, ...]
) -> Tensor:
    query, key, value = parts
    is_causal, scale, gqa = options
    if gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    # The root of the scale on either side, as in torch's own attention without a fused kernel: it rounds alike.
    half = sqrt(1 / sqrt(query.shape[-1]) if scale is None else scale)
    scores = (query * half) @ (key * half).transpose(-2, -1)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores = scores + (_additive(~mask, query) if mask.dtype == torch.bool else mask)
    # As in torch's own: a query that may attend to nothing gets zeros, where softmax would give NaN.
    weights = safe_softmax(scores, -1)
    if context.model is not None:
        return dropout(context, F.dropout, weights, dropout_p) @ value
    return dropout(context, F.dropout, Batch(weights, 0), dropout_p).at(0) @ value


def multi_head_attention(  # the signature of torch.nn.functional.multi_head_attention_forward
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute multi-head attention by calls that have rules: projections, attention, projection.

    Shapes are one model's, as for torch's own function: query [length, samples, width] or [length, width].
    """
    batched = query.dim() == 3
    if not batched:
        query, key, value = (part.unsqueeze(1) for part in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    length, samples, width = query.shape
    separate = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else None
    q, k, v = _projected(query, key, value, in_proj_weight, in_proj_bias, separate)
    if bias_k is not None and bias_v is not None:
        k = torch.cat([k, bias_k.expand(1, samples, width)])
        v = torch.cat([v, bias_v.expand(1, samples, width)])
    # [length, samples, width] to [samples, heads, length, width of a head]
    q, k, v = (part.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for part in (q, k, v))
    k, v = (
        (k if static_k is None else static_k.unflatten(0, (samples, num_heads))),
        (v if static_v is None else static_v.unflatten(0, (samples, num_heads))),
    )
    if add_zero_attn:
        k, v = (torch.cat([part, torch.zeros_like(part[..., :1, :])], -2) for part in (k, v))
    if attn_mask is None and is_causal:
        attn_mask = torch.ones((length, key.shape[0]), dtype=torch.bool, device=query.device).triu(1)
    mask = _merged(attn_mask, key_padding_mask, k.shape[-2], samples, num_heads, query)
    rate = dropout_p if training else 0.0
    if not need_weights:
        found, weights = F.scaled_dot_product_attention(q, k, v, mask, rate), None
    else:
        scores = (q * sqrt(1 / q.shape[-1])) @ k.transpose(-2, -1)
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
        weights = F.dropout(weights, rate) if rate else weights
        found = weights @ v
    # One matrix of positions and samples, as in torch's own function: the product then rounds alike.
    merged = found.permute(2, 0, 1, 3).reshape(length * samples, width)
    output = F.linear(merged, out_proj_weight, out_proj_bias).view(length, samples, -1)
    if weights is not None:
        weights = weights.mean(1) if average_attn_weights else weights
        weights = weights if batched else weights.squeeze(0)
    return (output if batched else output.squeeze(1)), weights


def _projected(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    separate: tuple[Tensor | None, ...] | None,
) -> list[Tensor]:
    """Project to queries, keys and values, by one product where all come from the same tensor."""
    if separate is None:
        assert weight is not None
        # torch makes the same distinction, and so rounds alike.
        if query is key and key is value:
            return list(F.linear(query, weight, bias).chunk(3, -1))
        separate = weight.chunk(3)
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    return [F.linear(x, w, b) for x, w, b in zip((query, key, value), separate, biases, strict=True) if w is not None]


def _merged(
    mask: Tensor | None, padding: Tensor | None, keys: int, samples: int, heads: int, query: Tensor
) -> Tensor | None:
    """Merge both masks into one to be added, [samples or 1, heads or 1, queries or 1, keys].

    The keys of `bias_k` and `add_zero_attn`, which the masks do not cover, are visible to all queries.
    """
    found = None
    if mask is not None:
        added = _additive(mask, query)
        added = added.unflatten(0, (samples, heads)) if added.dim() == 3 else added[None, None]
        found = F.pad(added, (0, keys - added.shape[-1]))
    if padding is not None:
        added = _additive(padding, query)[:, None, None]
        added = F.pad(added, (0, keys - added.shape[-1]))
        found = added if found is None else found + added
    return found


def _additive(mask: Tensor, query: Tensor) -> Tensor:
    """Return minus infinity where a boolean mask is set; a mask of numbers is only cast."""
    if mask.dtype != torch.bool:
        return mask.to(query.dtype)
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask, float("-inf"))


COMPOSITES[F.multi_head_attention_forward] = multi_head_attention
RANDOM.add(F.scaled_dot_product_attention)
