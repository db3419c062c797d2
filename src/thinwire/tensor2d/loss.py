# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of logits that are split over the columns by vocabulary."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from thinwire.errors import ConfigError
from thinwire.tensor2d.collectives import sum_over_rows
from thinwire.tensor2d.mesh import Mesh2D
from thinwire.tensor2d.products import accumulation_dtype
from thinwire.tensor2d.tape import recorded


def cross_entropy_2d(
    logits: Tensor,
    targets: Tensor,
    mesh: Mesh2D,
    *,
    vocabulary: int | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    tokens_at_a_time: int = 1024,
) -> Tensor:
    """Compute the cross-entropy over the whole batch, equal on all ranks; call `backward()` on it.

    Logits are never gathered. Columns exchange three numbers per token: their largest logit, the sum of exponentials
    relative to it, and the target's logit from the column that holds it. The mean is over all rows' tokens that
    are not ignored.

    Args:
        logits: [b / r, ..., v / c]; statistics are computed in fp32 at least.
        targets: int64 [b / r, ...], the same in all columns, in the vocabulary or `ignore_index`.
        mesh: the ranks.
        vocabulary: number of entries before padding; None if the table was not padded.
        ignore_index: the target value that the loss ignores.
        reduction: "mean" over the batch's tokens, "sum" over them, or "none": this row's losses, [b / r, ...].
        tokens_at_a_time: tokens whose exponentials are in memory at once; a larger value is faster and takes more
            memory.

    Raises:
        ConfigError: the shapes of logits and targets do not match; or, on all ranks, a target is outside the
            vocabulary. On a GPU such a target makes the loss NaN instead, because reading targets would wait for the
            device.
    """
    if logits.shape[:-1] != targets.shape:
        raise ConfigError(
            f"logits of {tuple(logits.shape)} and targets of {tuple(targets.shape)}: each token needs one target"
        )
    flat, flat_targets = logits.flatten(0, -2), targets.flatten()
    losses = cast(Tensor, _TokenLosses.apply(flat, flat_targets, mesh, vocabulary, ignore_index, tokens_at_a_time))
    limit = vocabulary if vocabulary is not None else logits.shape[-1] * mesh.columns
    if reduction == "none":
        _check_targets(sum_over_rows(losses.detach().sum(), mesh), flat_targets, mesh, limit, ignore_index)
        return losses.view(targets.shape)
    total = sum_over_rows(losses.sum(), mesh)
    _check_targets(total, flat_targets, mesh, limit, ignore_index)
    if reduction == "sum":
        return total
    count = recorded(
        lambda: mesh.along_column.all_reduce_((flat_targets != ignore_index).sum().to(losses.dtype)).wait()
    )
    return total / count


def _check_targets(total: Tensor, targets: Tensor, mesh: Mesh2D, vocabulary: int, ignore_index: int) -> None:
    """Check targets on all ranks if the sum of losses indicates one outside the vocabulary.

    Raises:
        ConfigError: a target in any row is outside the vocabulary.
    """
    # The sum is equal on all ranks, and such a target makes it NaN. Otherwise the check sends nothing.
    if torch.compiler.is_compiling() or total.device.type != "cpu" or not bool(total.isnan()):
        return
    wrong = targets[(targets != ignore_index) & ((targets < 0) | (targets >= vocabulary))]
    own = torch.stack([wrong.amin(), wrong.amax()]) if len(wrong) else targets.new_zeros(2)
    ranges = recorded(lambda: torch.stack(mesh.along_column.all_gather(own).wait()))
    rows = [row for row, (low, high) in enumerate(ranges.tolist()) if low < 0 or high >= vocabulary]
    if rows:
        low, high = int(ranges[rows, 0].amin()), int(ranges[rows, 1].amax())
        raise ConfigError(
            f"targets from {low} to {high} in rows {rows} of the mesh: they must lie in 0..{vocabulary - 1}, or be "
            f"ignore_index={ignore_index}"
        )


class _TokenLosses(Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        mesh: Mesh2D,
        vocabulary: int | None,
        ignore_index: int,
        tokens_at_a_time: int,
    ) -> Tensor:
        width = logits.shape[-1]
        # A column with only padding has `limit` 0, but still takes part in the exchange.
        limit = width if vocabulary is None else max(0, min(vocabulary - mesh.column * width, width))
        ctx.limit, ctx.tokens_at_a_time = limit, tokens_at_a_time
        here, counted = targets - mesh.column * width, targets != ignore_index
        within = (targets >= 0) & (targets < (width * mesh.columns if vocabulary is None else vocabulary))
        valid = (here >= 0) & (here < limit) & counted
        here = here.clamp(0, max(limit - 1, 0))
        log_total, target_logits = recorded(lambda: _statistics(logits[:, :limit], here, valid, mesh, tokens_at_a_time))
        ctx.save_for_backward(logits, log_total, here, valid, counted)
        return torch.where(counted, torch.where(within, log_total - target_logits, torch.nan), 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, log_total, here, valid, counted = ctx.saved_tensors
        weight = torch.where(counted, grads[0], 0)
        result = torch.zeros_like(logits)
        for start in range(0, logits.shape[0], ctx.tokens_at_a_time):
            some = slice(start, start + ctx.tokens_at_a_time)
            share = (logits[some, : ctx.limit].to(log_total.dtype) - log_total[some, None]).exp_()
            share.mul_(weight[some, None])
            if ctx.limit:
                share.scatter_add_(1, here[some, None], -(weight * valid)[some, None])
            result[some, : ctx.limit] = share.to(logits.dtype)
        return result, None, None, None, None, None


def _statistics(logits: Tensor, here: Tensor, valid: Tensor, mesh: Mesh2D, tokens_at_a_time: int) -> Tensor:
    """Return [2, tokens]: the log-sum-exp over the whole vocabulary, and the target's logit."""
    parts = logits.new_zeros((3, logits.shape[0]), dtype=accumulation_dtype(logits.dtype))
    parts[0] = -torch.inf
    for start in range(0, logits.shape[0] if logits.shape[1] else 0, tokens_at_a_time):
        some = slice(start, start + tokens_at_a_time)
        exact = logits[some].to(parts.dtype)
        parts[0, some] = exact.amax(-1)
        parts[1, some] = (exact - parts[0, some, None]).exp_().sum(-1)
        parts[2, some] = exact.gather(1, here[some, None]).squeeze(1) * valid[some]
    highest, sums, target_logits = torch.stack(mesh.along_row.all_gather(parts).wait()).unbind(1)
    top = highest.amax(0)
    return torch.stack([top + (sums * (highest - top).exp()).sum(0).log(), target_logits.sum(0)])
