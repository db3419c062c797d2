"""Attention of all models at once."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from thinwire.fusion.batch import Batch, Value, along, each
from thinwire.fusion.rng import dropout
from thinwire.fusion.routing import COMPOSITES, DRAWS, Context, rule


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
    """The models are more samples of one attention; with dropout it is taken by its parts, for masks of their own."""
    parts, options = (query, key, value), (is_causal, scale, enable_gqa)
    if context.model is not None:
        return _solo(context, function, (*parts, attn_mask), dropout_p, options)
    if len(query.shape) < 3:
        # A single head of a single sample has no axis that the models could join.
        return each(function, context.size, *parts, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    size = context.size
    every = [along(part, 0, size) for part in parts]
    mask = None if attn_mask is None else _aligned(along(attn_mask, 0, size), len(query.shape))
    if dropout_p:
        return Batch(_by_parts(context, every, mask, dropout_p, options), 0)
    if mask is not None:
        mask = mask.expand(size, query.shape[0], *mask.shape[2:]).flatten(0, 1)
    folded = [part.flatten(0, 1) for part in every]
    found = function(*folded, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    return Batch(found.unflatten(0, (size, -1)), 0)


def _aligned(mask: Tensor, dimensions: int) -> Tensor:
    """A mask [models, ...] with an axis for each of a model's `dimensions`, those it lacks of length one."""
    return mask.view(mask.shape[0], *[1] * (dimensions + 1 - mask.dim()), *mask.shape[1:])


def _solo(context: Context, function: Any, parts: Any, dropout_p: float, options: tuple[Any, ...]) -> Tensor:
    """The model that runs now, by itself."""
    *main, mask = parts
    is_causal, scale, gqa = options
    if not dropout_p:
        return function(*main, mask, 0.0, is_causal, scale=scale, enable_gqa=gqa)
    return _by_parts(context, main, mask, dropout_p, options)


def _by_parts(
    context: Context, parts: Sequence[Tensor], mask: Tensor | None, dropout_p: float, options: tuple[Any, ...]
) -> Tensor:
    query, key, value = parts
    is_causal, scale, gqa = options
    if gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    # Half of the scale on either side, as torch does where it has no kernel for the whole.
    half = sqrt(1 / sqrt(query.shape[-1]) if scale is None else scale)
    scores = (query * half) @ (key * half).transpose(-2, -1)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores = scores + (_barred(~mask, query) if mask.dtype == torch.bool else mask)
    shares = torch.softmax(scores, -1)
    if context.model is not None:
        return dropout(context, F.dropout, shares, dropout_p) @ value
    return dropout(context, F.dropout, Batch(shares, 0), dropout_p).at(0) @ value


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
    """Multi-head attention by parts that are led on: projections, attention, projection.

    Shapes are one model's, as torch's own function has them: query [length, samples, width] or [length, width].
    """
    batched = query.dim() == 3
    if not batched:
        query, key, value = (part.unsqueeze(1) for part in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    length, samples, width = query.shape
    weights = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else None
    q, k, v = _projected(query, key, value, in_proj_weight, in_proj_bias, weights)
    if bias_k is not None and bias_v is not None:
        k = torch.cat([k, bias_k.expand(1, samples, width)])
        v = torch.cat([v, bias_v.expand(1, samples, width)])
    q, k, v = (_heads(part, num_heads) for part in (q, k, v))
    k, v = (
        (k if static_k is None else static_k.unflatten(0, (samples, num_heads))),
        (v if static_v is None else static_v.unflatten(0, (samples, num_heads))),
    )
    if add_zero_attn:
        k, v = (torch.cat([part, torch.zeros_like(part[..., :1, :])], -2) for part in (k, v))
    causal = attn_mask if attn_mask is not None or not is_causal else _causal(query, key)
    mask = _merged(causal, key_padding_mask, k.shape[-2], samples, num_heads, query)
    rate = dropout_p if training else 0.0
    if not need_weights:
        found, shares = F.scaled_dot_product_attention(q, k, v, mask, rate), None
    else:
        scores = (q * sqrt(1 / q.shape[-1])) @ k.transpose(-2, -1)
        shares = torch.softmax(scores if mask is None else scores + mask, -1)
        shares = F.dropout(shares, rate) if rate else shares
        found = shares @ v
    # Samples before positions, as torch folds them.
    merged = found.permute(2, 0, 1, 3).reshape(length * samples, width)
    output = F.linear(merged, out_proj_weight, out_proj_bias).view(length, samples, -1)
    if shares is not None:
        shares = shares.mean(1) if average_attn_weights else shares
        shares = shares if batched else shares.squeeze(0)
    return (output if batched else output.squeeze(1)), shares


def _projected(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    weights: tuple[Tensor | None, ...] | None,
) -> list[Tensor]:
    """Queries, keys and values: by one product where they come from the same tensor."""
    if weights is None:
        assert weight is not None
        if query is key and key is value:
            return list(F.linear(query, weight, bias).chunk(3, -1))
        weights = weight.chunk(3)
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    return [F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True) if w is not None]


def _heads(part: Tensor, heads: int) -> Tensor:
    """[length, samples, width] to [samples, heads, length, width of a head]."""
    return part.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)


def _causal(query: Tensor, key: Tensor) -> Tensor:
    shape = (query.shape[0], key.shape[0])
    return torch.ones(shape, dtype=torch.bool, device=query.device).triu(1)


def _merged(
    mask: Tensor | None, padding: Tensor | None, keys: int, samples: int, heads: int, query: Tensor
) -> Tensor | None:
    """Both masks as one to be added, [samples or 1, heads or 1, queries or 1, keys]; keys that were put in are seen."""
    found = None
    if mask is not None:
        added = _barred(mask, query)
        added = added.unflatten(0, (samples, heads)) if added.dim() == 3 else added[None, None]
        found = F.pad(added, (0, keys - added.shape[-1]))
    if padding is not None:
        added = _barred(padding, query)[:, None, None]
        added = F.pad(added, (0, keys - added.shape[-1]))
        found = added if found is None else found + added
    return found


def _barred(mask: Tensor, query: Tensor) -> Tensor:
    """Minus infinity where a boolean mask bars; a mask of numbers as it is."""
    if mask.dtype != torch.bool:
        return mask.to(query.dtype)
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask, float("-inf"))


COMPOSITES[F.multi_head_attention_forward] = multi_head_attention
DRAWS.add(F.scaled_dot_product_attention)
