r"""Attention to a sequence that is split over the rows of a mesh: keys and values go round, queries stay.

With $o$ and $\ell$ what a query has heard so far and the logarithm of its sum of exponentials, a further part that
brings $o'$ and $\ell'$ is merged exactly,

$$\ell \leftarrow \log(e^{\ell} + e^{\ell'}), \qquad o \leftarrow e^{\ell_{old} - \ell} o + e^{\ell' - \ell} o' .$$

Row i of r holds chunks i and 2 r - 1 - i of 2 r, so that under a causal mask all rows have equally much to do: a chunk
hears nothing of later ones, all of earlier ones, and a triangle of itself.

Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers, 2023, arXiv:2310.01889; the merge after Milakov and
Gimelshein, Online Normalizer Calculation for Softmax, 2018, arXiv:1805.02867.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from thinwire.comm.base import Comm
from thinwire.comm.work import Work
from thinwire.errors import ConfigError
from thinwire.tensor2d.products import exact_dtype
from thinwire.tensor2d.tape import kept

Pair = tuple[slice, slice, bool]


def ring_attend(query: Tensor, key: Tensor, value: Tensor, comm: Comm, *, causal: bool = False) -> Tensor:
    """What every query hears of the whole sequence: [b, n, s / r, d] of queries, [b, k, s / r, d] of keys and values.

    Sums are formed in fp32 at least. Sent per rank: 2 (r - 1) b k s d / r elements forward, keys and values in r - 1
    hops; backward as much again, and r hops of their gradients in fp32 at least.

    Args:
        query: of this row's positions, in the order of `positions_of`.
        key: likewise; its heads are shared among those of the queries.
        value: likewise.
        comm: the rows, such as `mesh.along_column`.
        causal: no position hears a later one.

    Raises:
        ConfigError: a number of positions that two chunks a row cannot share, or heads that cannot be shared.
    """
    if query.shape[2] % 2 and comm.size > 1:
        raise ConfigError(
            f"a sequence of {query.shape[2] * comm.size} over {comm.size} rows: {2 * comm.size} chunks must share it "
            f"evenly; use {-(-query.shape[2] // 2) * 2 * comm.size}"
        )
    if query.shape[1] % key.shape[1]:
        raise ConfigError(
            f"{query.shape[1]} query heads and {key.shape[1]} key heads: the second must divide the first"
        )
    return cast(Tensor, _Ring.apply(query, key, value, comm, causal))


def positions_of(length: int, row: int, rows: int) -> Tensor:
    """The positions that a row holds of a sequence, in its order: chunk `row`, then chunk `2 rows - 1 - row`.

    Raises:
        ConfigError: the chunks cannot share it evenly.
    """
    if rows == 1:
        return torch.arange(length)
    if length % (2 * rows):
        raise ConfigError(
            f"a sequence of {length}: {2 * rows} chunks of {rows} rows must share it evenly; "
            f"use {-(-length // (2 * rows)) * 2 * rows}"
        )
    chunks = torch.arange(length).chunk(2 * rows)
    return torch.cat([chunks[row], chunks[2 * rows - 1 - row]])


def ring_elements(samples: int, length: int, key_features: int, rows: int, columns: int) -> tuple[float, float, float]:
    """Elements that a rank sends around the ring: forward, and backward of keys and values, and of their gradients.

    Args:
        samples: of the batch, b.
        length: of the whole sequence, s.
        key_features: of all key heads together, k d.
        rows: of the mesh.
        columns: of the mesh.
    """
    hop = 2 * samples * length * key_features / (rows * columns)
    return hop * (rows - 1), hop * (rows - 1), hop * (rows if rows > 1 else 0)


class _Ring(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, comm: Comm, causal: bool) -> Tensor:
        packed = kept(lambda: _heard(query, key, value, comm, causal))
        heard, log_total = packed[..., :-1], packed[..., -1]
        ctx.save_for_backward(query, key, value, heard, log_total)
        ctx.how = comm, causal
        return heard.to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, heard, log_total = ctx.saved_tensors
        comm, causal = ctx.how
        exact = heard.dtype
        grad = grads[0].to(exact)
        share = (grad * heard).sum(-1, keepdim=True)
        query_grad = torch.zeros_like(query, dtype=exact)
        # The gradients of keys and values travel behind them, and are home after one hop more.
        pair_grad = torch.zeros((2, *key.shape), dtype=exact, device=key.device)
        for src, pair in _going_round(torch.stack([key, value]), comm):
            for mine, theirs, triangle in _pairs(query.shape[2], comm, src, causal):
                q, k, v = _parts(query, pair, mine, theirs, exact)
                weights = (_scores(q, k, triangle) - log_total[:, :, mine, None]).exp()
                back = grad[:, :, mine]
                slopes = weights * (back @ v.mT - share[:, :, mine]) / query.shape[-1] ** 0.5
                query_grad[:, :, mine] += slopes @ k
                pair_grad[0, :, :, theirs] += _shared(slopes.mT @ q, key.shape[1])
                pair_grad[1, :, :, theirs] += _shared(weights.mT @ back, key.shape[1])
            if comm.size > 1:
                (pair_grad,) = _passed_on(pair_grad, comm).wait()
        return query_grad.to(query.dtype), pair_grad[0].to(key.dtype), pair_grad[1].to(value.dtype), None, None


def _heard(query: Tensor, key: Tensor, value: Tensor, comm: Comm, causal: bool) -> Tensor:
    """[b, n, s / r, d + 1]: what is heard, and the logarithm of the sum of exponentials."""
    exact = exact_dtype(query.dtype)
    heard = torch.zeros_like(query, dtype=exact)
    log_total = torch.full(query.shape[:3], -torch.inf, dtype=exact, device=query.device)
    for src, pair in _going_round(torch.stack([key, value]), comm):
        for mine, theirs, triangle in _pairs(query.shape[2], comm, src, causal):
            q, k, v = _parts(query, pair, mine, theirs, exact)
            scores = _scores(q, k, triangle)
            before, brought = log_total[:, :, mine], scores.logsumexp(-1)
            total = torch.logaddexp(before, brought)
            heard[:, :, mine] *= (before - total).exp()[..., None]
            heard[:, :, mine] += (scores - total[..., None]).exp() @ v
            log_total[:, :, mine] = total
    return torch.cat([heard, log_total[..., None]], dim=-1)


def _going_round(pair: Tensor, comm: Comm) -> Iterator[tuple[int, Tensor]]:
    """Every row's keys and values with the row they are of, this one's first; the next travel meanwhile."""
    for hop in range(comm.size):
        following = _passed_on(pair, comm) if hop + 1 < comm.size else None
        yield (comm.rank - hop) % comm.size, pair
        if following is not None:
            (pair,) = following.wait()


def _passed_on(x: Tensor, comm: Comm) -> Work[list[Tensor]]:
    """Send to the next row; what comes from the one before."""
    return comm.send_recv(x.contiguous(), [(comm.rank + 1) % comm.size], [(comm.rank - 1) % comm.size])


def _pairs(length: int, comm: Comm, src: int, causal: bool) -> Iterator[Pair]:
    """Which of this row's chunks hears which of another row's, and whether of a triangle only."""
    mine, theirs = ({row: 0, 2 * comm.size - 1 - row: 1} for row in (comm.rank, src))
    half = length // 2
    if comm.size == 1:
        yield slice(None), slice(None), causal
        return
    for number, place in mine.items():
        for other, there in theirs.items():
            if not causal or other <= number:
                yield (
                    slice(place * half, place * half + half),
                    slice(there * half, there * half + half),
                    causal and other == number,
                )


def _parts(query: Tensor, pair: Tensor, mine: slice, theirs: slice, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """A chunk of queries, and one of keys and values for every one of their heads."""
    group = query.shape[1] // pair.shape[2]
    k, v = (x[:, :, theirs].to(dtype).repeat_interleave(group, dim=1) for x in pair)
    return query[:, :, mine].to(dtype), k, v


def _scores(q: Tensor, k: Tensor, triangle: bool) -> Tensor:
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if not triangle:
        return scores
    return scores.masked_fill(~scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)


def _shared(grad: Tensor, heads: int) -> Tensor:
    """Gradients of heads that are shared, added up."""
    return grad.unflatten(1, (heads, -1)).sum(2)
