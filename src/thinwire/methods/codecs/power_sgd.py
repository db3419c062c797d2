# SPDX-License-Identifier: Apache-2.0
"""Low-rank matrices: two thin factors in place of each tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from threading import Lock
from typing import Annotated

import torch
from torch import Tensor

from thinwire.core.kernels import uniform
from thinwire.core.validation import Range
from thinwire.methods.codecs.base import MATRIX_TRAITS, CodecTraits, Matrix, MatrixCodec, Rounds, State, draw_key
from thinwire.registry import registered

_ONE_AT_A_TIME = Lock()  # torch loads its GPU solvers at the first call, which is not thread-safe


@registered
class PowerSGD(MatrixCodec):
    r"""Average two thin factors of each matrix: one step of a power iteration from the last message's factor.

    With $M_i$ worker $i$'s matrix of $m$ rows and $n$ columns, its residual $e_i$, and $Q$ of $n$ rows and $r$ columns,

    $$\Delta_i = M_i + e_i, \quad
      \hat P = \operatorname{orth}\Bigl(\tfrac1W \sum_i \Delta_i Q\Bigr), \quad
      Q \leftarrow \tfrac1W \sum_i \Delta_i^\top \hat P, \quad
      \bar M = \hat P Q^\top, \quad e_i \leftarrow \Delta_i - \bar M .$$

    $\bar M = \hat P \hat P^\top \tfrac1W \sum_i \Delta_i$ is the mean projected onto $r$ columns that follow its
    largest singular vectors from message to message. A tensor's rows are its first dimension, its columns all others.
    Tensors with one dimension, and those that would not shrink by `min_ratio`, are averaged uncompressed.
    Error feedback is built in: use it without `ErrorFeedback`. Both sums are all-reduces, so the cost does not grow
    with the number of workers. It needs the shapes of tensors: under `AllReduce` those of each bucket, under strategies
    that average parameters those of the model.
    Payload: $4r(m + n)$ bytes for each matrix, in two all-reduces; 4 bytes for each other element. State: the residual
    `error`, like the vector in fp32, and `factor/START` ($Q$) for each matrix, equal on all ranks.

    Vogels, Karimireddy and Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization,
    NeurIPS 2019, arXiv:1905.13727, Algorithms 1 and 2.

    Args:
        rank: $r$, columns of the factors; more columns send more bytes with a smaller error.
        min_ratio: the factor by which a matrix must shrink to be compressed; 0 compresses every matrix.

    Example:
        A matrix of rank one is averaged exactly.

        >>> import torch, thinwire
        >>> def train(comm):
        ...     model = torch.nn.Linear(8, 6, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     thinwire.attach(model, optimizer, thinwire.AllReduce(PowerSGD(rank=1)), comm=comm)
        ...     model(torch.full((1, 8), 1.0 + comm.rank)).sum().backward()  # all 1 on rank 0, all 2 on rank 1
        ...     optimizer.step()
        ...     return round(model.weight.mean().item(), 4)
        >>> thinwire.run_threads(2, train)
        [-1.5, -1.5]
    """

    rank: Annotated[int, Range("1..", "1 to 4 are usual")] = 4
    min_ratio: Annotated[float, Range("[0, inf)", "2 is usual")] = 2.0

    def make_traits(self) -> CodecTraits:
        """See `CodecTraits`."""
        return replace(MATRIX_TRAITS, growing=("factor/",))

    def compresses(self, matrix: Matrix) -> bool:
        """Return True if a matrix is sent as two factors."""
        rows, columns = matrix.rows, matrix.columns
        small = self.min_ratio * self._kept(matrix) * (rows + columns) < rows * columns
        return small and min(rows, columns) > 1

    def count(self, matrices: Sequence[Matrix]) -> int:
        """Return how many fp32 numbers are all-reduced for these matrices."""
        return sum(
            self._kept(each) * (each.rows + each.columns) if self.compresses(each) else each.size for each in matrices
        )

    def mean(
        self, x: Tensor, residual: Tensor, matrices: Sequence[Matrix], state: State, *, key: int, share: float
    ) -> Rounds:
        """Run `MatrixCodec.mean`; the first message has all $P$ and uncompressed tensors, the second all $Q$."""
        # Matrices with factors of one shape are adjacent in the message and are orthogonalized in one call.
        low = sorted(filter(self.compresses, matrices), key=lambda each: (each.rows, self._kept(each), each.start))
        dense = [each for each in matrices if not self.compresses(each)]
        factors = [self._factor(state, each, x, key) for each in low]

        lefts = [(each.rows, self._kept(each)) for each in low]
        message, parts = _empty(x, [*lefts, *((1, each.size) for each in dense)])
        for each, p, q in zip(low, parts, factors, strict=False):
            torch.mm(each.of(x), q, out=p)
        for each, values in zip(dense, parts[len(low) :], strict=True):
            values.copy_(x[each.start : each.stop])
        parts = _cut((yield message), [*lefts, *((1, each.size) for each in dense)])

        bases, whole = _orthogonal(parts[: len(low)]), parts[len(low) :]
        rights = [(each.columns, self._kept(each)) for each in low]
        message, parts = _empty(x, rights)
        for each, p, q in zip(low, bases, parts, strict=True):
            torch.mm(each.of(x).T, p, out=q)
        parts = _cut((yield message), rights)

        residual.copy_(x)
        for each, p, q, last in zip(low, bases, parts, factors, strict=True):
            # A message of zeros has no direction: the next one would only use the first few rows.
            state[_name(each)] = torch.where(q.any(), q, last)
            mean = torch.mm(p, q.T, out=each.of(x))
            each.of(residual).sub_(mean, alpha=share)
        for each, values in zip(dense, whole, strict=True):
            x[each.start : each.stop] = values.view(-1)
            residual[each.start : each.stop] = 0.0

    def _kept(self, matrix: Matrix) -> int:
        return min(self.rank, matrix.rows, matrix.columns)

    def _factor(self, state: State, matrix: Matrix, x: Tensor, key: int) -> Tensor:
        """Return the last message's $Q$ of a matrix; random at first, the same on all ranks."""
        shape = (matrix.columns, self._kept(matrix))
        last = state.get(_name(matrix))
        if last is not None and (last.shape, last.dtype) == (shape, torch.float32):
            return last
        return uniform(shape[0] * shape[1], draw_key(key, matrix.place), device=x.device).sub_(0.5).view(shape)


def _name(matrix: Matrix) -> str:
    # By position instead of bucket, so that checkpoints do not depend on the buckets.
    return f"factor/{matrix.place}"


def _empty(x: Tensor, shapes: Sequence[tuple[int, int]]) -> tuple[Tensor, list[Tensor]]:
    """Make a new vector, and views of it as matrices of these shapes."""
    vector = x.new_empty(sum(rows * columns for rows, columns in shapes))
    return vector, _cut(vector, shapes)


def _cut(vector: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """View a vector as matrices of these shapes, end to end."""
    pieces = vector.split([rows * columns for rows, columns in shapes]) if shapes else ()
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _orthogonal(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Orthonormalize the columns of each matrix; adjacent matrices of one shape in one call."""
    found: list[Tensor] = []
    for _, group in groupby(matrices, key=lambda each: each.shape):
        # Householder reflections also complete columns of zeros to a basis: no step divides by their norm.
        with _ONE_AT_A_TIME:
            basis, _ = torch.linalg.qr(torch.stack(list(group)))
        found += basis.unbind()
    return found
