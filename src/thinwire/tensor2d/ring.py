# SPDX-License-Identifier: Apache-2.0
r"""Ring attention over a sequence that is split over the rows of a mesh: keys and values move, queries stay.

Let $o$ be a query's output over the keys seen so far and $\ell$ the logarithm of its softmax denominator. The output
$o'$ and logarithm $\ell'$ over further keys are merged exactly,

$$\ell \leftarrow \log(e^{\ell} + e^{\ell'}), \qquad o \leftarrow e^{\ell_{old} - \ell} o + e^{\ell' - \ell} o' .$$

Row i of r holds chunks i and 2 r - 1 - i of 2 r, so that under a causal mask all rows have equal work: a chunk attends
to all earlier chunks, to a triangle of itself and to no later one.

Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers, 2023, arXiv:2310.01889; the merge follows Milakov
and Gimelshein, Online Normalizer Calculation for Softmax, 2018, arXiv:1805.02867.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from thinwire.core.comm.base import Comm
from thinwire.core.comm.work import Work
from thinwire.errors import ConfigError
from thinwire.tensor2d.products import accumulation_dtype
from thinwire.tensor2d.tape import recorded

Pair = tuple[slice, slice, bool]


def ring_attend(query: Tensor, key: Tensor, value: Tensor, comm: Comm, *, causal: bool = False) -> Tensor:
    """Attend from queries [b, n, s / r, d] to keys and values [b, k, s / r, d] of all rows.

    Sums are accumulated in fp32 at least. Forward a rank sends 2 (r - 1) b k s d / r elements: keys and values in r - 1
    steps around the ring. Backward it sends as much again, and the gradients of keys and values in r steps, in fp32 at
    least.

    Args:
        query: queries of this row's positions, in the order of `positions_of`.
        key: keys of the same positions; the number of key heads divides the number of query heads.
        value: values of the same positions.
        comm: the rows, such as `mesh.along_column`.
        causal: whether a position attends only to itself and to earlier ones.

    Raises:
        ConfigError: several rows have an odd number of positions, or key heads do not divide the query heads.
    """
    if query.shape[2] % 2 and comm.size > 1:
        raise ConfigError(
            f"a sequence of {query.shape[2] * comm.size} over {comm.size} rows: {2 * comm.size} chunks must divide it. "
            f"Use {-(-query.shape[2] // 2) * 2 * comm.size}"
        )
    if query.shape[1] % key.shape[1]:
        raise ConfigError(
            f"{query.shape[1]} query heads and {key.shape[1]} key heads: the second must divide the first"
        )
    return cast(Tensor, _Ring.apply(query, key, value, comm, causal))


def positions_of(length: int, row: int, rows: int) -> Tensor:
    """Return the positions of a row in order: chunk `row`, then chunk `2 rows - 1 - row`.

    Raises:
        ConfigError: 2 rows chunks do not divide the length.
    """
    if rows == 1:
        return torch.arange(length, device="cpu")
    if length % (2 * rows):
        raise ConfigError(
            f"a sequence of {length}: {2 * rows} chunks of {rows} rows must divide it. "
            f"Use {-(-length // (2 * rows)) * 2 * rows}"
        )
    chunks = torch.arange(length, device="cpu").chunk(2 * rows)
    return torch.cat([chunks[row], chunks[2 * rows - 1 - row]])


def ring_elements(samples: int, length: int, key_features: int, rows: int, columns: int) -> tuple[float, float, float]:
    """Return the elements that a rank sends: keys and values forward and backward, and their gradients.

    Args:
        samples: samples of the batch, b.
        length: length of the whole sequence, s.
        key_features: features of all key heads together, k d.
        rows: rows of the mesh.
        columns: columns of the mesh.
    """
    hop = 2 * samples * length * key_features / (rows * columns)
    return hop * (rows - 1), hop * (rows - 1), hop * (rows if rows > 1 else 0)


class _Ring(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, comm: Comm, causal: bool) -> Tensor:
        packed = recorded(lambda: _attend_blockwise(query, key, value, comm, causal))
        output, log_total = packed[..., :-1], packed[..., -1]
        ctx.save_for_backward(query, key, value, output, log_total)
        ctx.settings = comm, causal
        return output.to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, output, log_total = ctx.saved_tensors
        comm, causal = ctx.settings
        exact = output.dtype
        grad = grads[0].to(exact)
        inner = (grad * output).sum(-1, keepdim=True)  # the common term of softmax's gradient for all keys
        query_grad = torch.zeros_like(query, dtype=exact)
        # The gradients of keys and values follow them around the ring, and reach their owner one step later.
        pair_grad = torch.zeros((2, *key.shape), dtype=exact, device=key.device)
        for src, pair in _ring_passes(torch.stack([key, value]), comm):
            for mine, theirs, triangle in _pairs(query.shape[2], comm, src, causal):
                q, k, v = _parts(query, pair, mine, theirs, exact)
                weights = (_scores(q, k, triangle) - log_total[:, :, mine, None]).exp()
                back = grad[:, :, mine]
                slopes = weights * (back @ v.mT - inner[:, :, mine]) / query.shape[-1] ** 0.5
                query_grad[:, :, mine] += slopes @ k
                pair_grad[0, :, :, theirs] += _sum_over_group(slopes.mT @ q, key.shape[1])
                pair_grad[1, :, :, theirs] += _sum_over_group(weights.mT @ back, key.shape[1])
            # Not overlapped: the next row adds to these sums before it sends them on.
            if comm.size > 1:
                (pair_grad,) = _send_to_next(pair_grad, comm).wait()
        return query_grad.to(query.dtype), pair_grad[0].to(key.dtype), pair_grad[1].to(value.dtype), None, None


def _attend_blockwise(query: Tensor, key: Tensor, value: Tensor, comm: Comm, causal: bool) -> Tensor:
    """Return [b, n, s / r, d + 1]: the output, and the logarithm of the softmax denominator."""
    exact = accumulation_dtype(query.dtype)
    output = torch.zeros_like(query, dtype=exact)
    # Minus infinity is the logarithm of an empty sum: the first chunk replaces it without a special case.
    log_total = torch.full(query.shape[:3], -torch.inf, dtype=exact, device=query.device)
    for src, pair in _ring_passes(torch.stack([key, value]), comm):
        for mine, theirs, triangle in _pairs(query.shape[2], comm, src, causal):
            q, k, v = _parts(query, pair, mine, theirs, exact)
            scores = _scores(q, k, triangle)
            before = log_total[:, :, mine]
            total = torch.logaddexp(before, scores.logsumexp(-1))
            output[:, :, mine] *= (before - total).exp()[..., None]
            output[:, :, mine] += (scores - total[..., None]).exp() @ v
            log_total[:, :, mine] = total
    return torch.cat([output, log_total[..., None]], dim=-1)


def _ring_passes(pair: Tensor, comm: Comm) -> Iterator[tuple[int, Tensor]]:
    """Yield every row's rank with its keys and values, this row's first, while the next ones are received."""
    # Sent before this pair is used, so that arithmetic hides the message; the last pair is not sent on.
    for step in range(comm.size):
        following = _send_to_next(pair, comm) if step + 1 < comm.size else None
        yield (comm.rank - step) % comm.size, pair
        if following is not None:
            (pair,) = following.wait()


def _send_to_next(x: Tensor, comm: Comm) -> Work[list[Tensor]]:
    """Send to the next row and receive from the previous one."""
    return comm.send_recv(x.contiguous(), [(comm.rank + 1) % comm.size], [(comm.rank - 1) % comm.size])


def _pairs(length: int, comm: Comm, src: int, causal: bool) -> Iterator[Pair]:
    """Yield the chunks of this row and of row `src` that attend, and whether only in the causal triangle."""
    # The number of each chunk in the sequence, with its index among the row's two chunks.
    mine, theirs = ({row: 0, 2 * comm.size - 1 - row: 1} for row in (comm.rank, src))
    half = length // 2
    if comm.size == 1:
        yield slice(None), slice(None), causal
        return
    for number, index in mine.items():
        for other, other_index in theirs.items():
            if not causal or other <= number:
                yield (
                    slice(index * half, index * half + half),
                    slice(other_index * half, other_index * half + half),
                    causal and other == number,
                )


def _parts(query: Tensor, pair: Tensor, mine: slice, theirs: slice, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return a chunk of queries, and a chunk of keys and values with heads repeated for grouped queries."""
    group = query.shape[1] // pair.shape[2]
    k, v = (x[:, :, theirs].to(dtype).repeat_interleave(group, dim=1) for x in pair)
    return query[:, :, mine].to(dtype), k, v


def _scores(q: Tensor, k: Tensor, triangle: bool) -> Tensor:
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if not triangle:
        return scores
    return scores.masked_fill(~scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)


def _sum_over_group(grad: Tensor, heads: int) -> Tensor:
    """Sum the gradient of each key head over the query heads that share it."""
    return grad.unflatten(1, (heads, -1)).sum(2)
