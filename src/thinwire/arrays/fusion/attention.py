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
from thinwire.arrays.fusion.rng import DropoutRates, dropout
from thinwire.arrays.fusion.routing import COMPOSITES, RANDOM, Context, rule
from thinwire.core.torch_internals import pytree, safe_softmax, without_dispatch
from thinwire.errors import ConfigError


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
    if is_causal and attn_mask is not None:
        raise ConfigError(
            "scaled_dot_product_attention with attn_mask and is_causal=True: torch takes one of them. Put the causal "
            "mask into attn_mask"
        )
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
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    # As in torch's own: a query that may attend to nothing gets zeros, where softmax would give NaN.
    weights = safe_softmax(scores, -1)
    if context.model is not None:
        return dropout(context, F.dropout, weights, dropout_p) @ value
    return dropout(context, F.dropout, Batch(weights, 0), dropout_p).at(0) @ value


class _AttentionRates(DropoutRates):
    """Rates that torch's attention may compare with zero, to skip dropout."""

    def __gt__(self, other: object) -> bool:
        """Return True if any model drops values."""
        return bool(self)


def multi_head_attention(*args: Any, **kwargs: Any) -> Any:
    """Run torch's own code, whose calls are then intercepted one by one; usual self-attention with fewer copies."""
    found = _self_attention(*args, **kwargs) if len(args) == 13 and kwargs.keys() == _USUAL else None
    if found is not None:
        return found, None
    args, kwargs = pytree.tree_map(
        lambda each: _AttentionRates(each.values) if isinstance(each, DropoutRates) else each, (args, kwargs)
    )
    return _attend(*args, **kwargs)


_attend = without_dispatch(F.multi_head_attention_forward)
# What `torch.nn.MultiheadAttention` passes by name if keys and values are as wide as queries.
_USUAL = {"training", "key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal"}


def _self_attention(
    query: Tensor, key: Tensor, value: Tensor, width: int, heads: int, *rest: Any, **options: Any
) -> Tensor | None:
    """Attend without weights, and with a mask of numbers or none; None where more is asked for."""
    weight, bias, bias_k, _, add_zero_attn, rate, out_weight, out_bias = rest
    mask, padding = options["attn_mask"], options["key_padding_mask"]
    if query is not key or key is not value or query.dim() != 3 or bias_k is not None or padding is not None:
        return None
    if options["need_weights"] or options["is_causal"] or add_zero_attn:
        return None
    if mask is not None and not (mask.dim() == 2 and mask.is_floating_point()):
        return None
    parts = F.linear(query, weight, bias).chunk(3, -1)
    # [length, samples, width] to [samples, heads, length, width of a head]
    q, k, v = (part.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3) for part in parts)
    found = F.scaled_dot_product_attention(q, k, v, mask, rate if options["training"] else 0.0)
    # One matrix of positions and samples, as in torch's own function: the product then rounds alike.
    merged = found.permute(2, 0, 1, 3).reshape(-1, width)
    return F.linear(merged, out_weight, out_bias).view(*query.shape[:2], -1)


COMPOSITES[F.multi_head_attention_forward] = multi_head_attention
RANDOM.add(F.scaled_dot_product_attention)
