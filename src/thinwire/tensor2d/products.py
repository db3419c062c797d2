# SPDX-License-Identifier: Apache-2.0
r"""The three products of matrices that are split over a mesh.

A matrix is split into r x c blocks; rank (i, j) holds block (i, j). The other two products compute the gradients of
each product, so gradients of any order exist:

- `multiply_ab`:  $C = A B$,   `dA = abt(dC, B)`, `dB = atb(A, dC)`;
- `multiply_abt`: $C = A B^T$, `dA = ab(dC, B)`,  `dB = atb(dC, A)`;
- `multiply_atb`: $C = A^T B$, `dA = abt(B, dC)`, `dB = ab(A, dC)`.

The inner dimension (of A B; M or N of the transposed products) is split into L = lcm(r, c) slices. Column j owns L / c
consecutive slices, row i owns L / r. A panel takes the same part of every slice, so that each rank contributes equally
to every message. SUMMA instead broadcasts the slices of one owner after the other; bytes and sums are the same.

Van de Geijn and Watts, SUMMA, 1997; Xu et al., An Efficient 2D Method for Training Super-Large Deep Learning Models,
2021, arXiv:2104.05343, Algorithms 1 to 3.

Shapes: `_mk` is a block of rows M / r and columns K / c of this rank; T below is L, w is a slice's width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from thinwire.core.comm.base import Comm
from thinwire.core.comm.work import Work
from thinwire.tensor2d.mesh import Mesh2D, check_divides
from thinwire.tensor2d.panels import Cut, Launch, Panels
from thinwire.tensor2d.tape import recorded


def multiply_ab(a_mk: Tensor, b_kn: Tensor, mesh: Mesh2D, panels: Panels | None = None) -> Tensor:
    """Multiply blocks of A [M / r, K / c] and B [K / r, N / c] to the block [M / r, N / c] of A B.

    Args:
        a_mk: this rank's block of A; gathered.
        b_kn: this rank's block of B; gathered.
        mesh: the ranks.
        panels: how A and B are sent; None uses the mesh's setting.

    Raises:
        ConfigError: lcm(r, c) does not divide K.
    """
    return cast(Tensor, _Multiply.apply(_ProductAB, a_mk, b_kn, mesh, panels or mesh.panels))


def multiply_abt(a_mk: Tensor, b_nk: Tensor, mesh: Mesh2D, panels: Panels | None = None) -> Tensor:
    """Multiply blocks of A [M / r, K / c] and B [N / r, K / c] to the block [M / r, N / c] of A B^T.

    Args:
        a_mk: this rank's block of A; not sent.
        b_nk: this rank's block of B.
        mesh: the ranks.
        panels: how B is sent; None uses the mesh's setting.

    Raises:
        ConfigError: lcm(r, c) does not divide N.
    """
    return cast(Tensor, _Multiply.apply(_ProductABT, a_mk, b_nk, mesh, panels or mesh.panels))


def multiply_atb(a_km: Tensor, b_kn: Tensor, mesh: Mesh2D, panels: Panels | None = None) -> Tensor:
    """Multiply blocks of A [K / r, M / c] and B [K / r, N / c] to the block [M / r, N / c] of A^T B.

    Args:
        a_km: this rank's block of A.
        b_kn: this rank's block of B; not sent.
        mesh: the ranks.
        panels: how A is sent; None uses the mesh's setting.

    Raises:
        ConfigError: lcm(r, c) does not divide M.
    """
    return cast(Tensor, _Multiply.apply(_ProductATB, a_km, b_kn, mesh, panels or mesh.panels))


class _Product(ABC):
    """One product, computed panel by panel: the messages of a panel, and the arithmetic on their content."""

    cuts: list[Cut]

    @abstractmethod
    def launches(self, cut: Cut) -> list[Launch]:
        """Return the messages of one panel."""

    @abstractmethod
    def multiply(self, cut: Cut, arrived: list[list[Tensor]]) -> None:
        """Multiply the gathered operands of one panel."""

    @abstractmethod
    def result(self) -> Tensor:
        """Return this rank's block of the result, after the last panel."""


def _run(products: Sequence[_Product], panels: Panels) -> list[Tensor]:
    """Compute products in order; each one's first panel is sent while the previous last one is multiplied."""
    tasks = [(product, cut) for product in products for cut in product.cuts]
    for (product, cut), arrived in panels.pipeline(tasks, lambda task: task[0].launches(task[1])):
        product.multiply(cut, arrived)
        del arrived  # The pipeline now allocates the panel after next, and only two panels may be in memory.
    return [product.result() for product in products]


class _ProductAB(_Product):
    def __init__(self, a_mk: Tensor, b_kn: Tensor, mesh: Mesh2D, panels: Panels) -> None:
        width = _width(a_mk.shape[1] * mesh.columns, mesh)
        self._mesh, self._dtype = mesh, a_mk.dtype
        self._across, self._down = mesh.slices // mesh.columns, mesh.slices // mesh.rows
        self._a_mtw, self._b_twn = a_mk.unflatten(1, (self._across, width)), b_kn.unflatten(0, (self._down, width))
        self._c_mn = a_mk.new_zeros((a_mk.shape[0], b_kn.shape[1]), dtype=accumulation_dtype(a_mk.dtype))
        self.cuts = panels.cuts(width)

    def launches(self, cut: Cut) -> list[Launch]:
        return [
            lambda: self._mesh.along_row.all_gather(_part(self._a_mtw, 2, cut).flatten(1)),
            lambda: self._mesh.along_column.all_gather(_part(self._b_twn, 1, cut).flatten(0, 1)),
        ]

    def multiply(self, cut: Cut, arrived: list[list[Tensor]]) -> None:
        (lefts, rights), n = arrived, cut[1] - cut[0]
        for t in range(self._mesh.slices):
            left = lefts[t // self._across].narrow(1, t % self._across * n, n)
            right = rights[t // self._down].narrow(0, t % self._down * n, n)
            _add_product_(self._c_mn, left, right)

    def result(self) -> Tensor:
        return self._c_mn.to(self._dtype)


class _ProductABT(_Product):
    def __init__(self, a_mk: Tensor, b_nk: Tensor, mesh: Mesh2D, panels: Panels) -> None:
        width = _width(b_nk.shape[0] * mesh.rows, mesh)
        self._mesh, self._a_mk = mesh, a_mk
        across, self._down = mesh.slices // mesh.columns, mesh.slices // mesh.rows
        self._b_twk = b_nk.unflatten(0, (self._down, width))
        self._c_mn = a_mk.new_empty((a_mk.shape[0], across * width))
        self._sums = _PartialSums(self._c_mn.unflatten(1, (across, width)).transpose(0, 1), 2, panels)
        self.cuts = panels.cuts(width)

    def launches(self, cut: Cut) -> list[Launch]:
        return [lambda: self._mesh.along_column.all_gather(_part(self._b_twk, 1, cut).flatten(0, 1))]

    def multiply(self, cut: Cut, arrived: list[list[Tensor]]) -> None:
        (pieces,), n = arrived, cut[1] - cut[0]
        terms_tmw = self._a_mk.new_empty((self._mesh.slices, self._a_mk.shape[0], n))
        for t in range(self._mesh.slices):
            piece = pieces[t // self._down].narrow(0, t % self._down * n, n)
            torch.mm(self._a_mk, piece.T, out=terms_tmw[t])
        self._sums.send(cut, terms_tmw, self._mesh.along_row)

    def result(self) -> Tensor:
        self._sums.finish()
        return self._c_mn


class _ProductATB(_Product):
    def __init__(self, a_km: Tensor, b_kn: Tensor, mesh: Mesh2D, panels: Panels) -> None:
        width = _width(a_km.shape[1] * mesh.columns, mesh)
        self._mesh, self._b_kn = mesh, b_kn
        self._across, down = mesh.slices // mesh.columns, mesh.slices // mesh.rows
        self._a_ktw = a_km.unflatten(1, (self._across, width))
        self._c_mn = a_km.new_empty((down * width, b_kn.shape[1]))
        self._sums = _PartialSums(self._c_mn.unflatten(0, (down, width)), 1, panels)
        self.cuts = panels.cuts(width)

    def launches(self, cut: Cut) -> list[Launch]:
        return [lambda: self._mesh.along_row.all_gather(_part(self._a_ktw, 2, cut).flatten(1))]

    def multiply(self, cut: Cut, arrived: list[list[Tensor]]) -> None:
        (pieces,), n = arrived, cut[1] - cut[0]
        terms_twn = self._b_kn.new_empty((self._mesh.slices, n, self._b_kn.shape[1]))
        for t in range(self._mesh.slices):
            piece = pieces[t // self._across].narrow(1, t % self._across * n, n)
            torch.mm(piece.T, self._b_kn, out=terms_twn[t])
        self._sums.send(cut, terms_twn, self._mesh.along_column)

    def result(self) -> Tensor:
        self._sums.finish()
        return self._c_mn


class _SharedGather(_Product):
    """The two gradients of $A B^T$, $D B$ and $D^T A$, from one gather of D's blocks along the row."""

    def __init__(self, first: _ProductAB, second: _ProductATB) -> None:
        self.first, self.second = first, second
        self.cuts = first.cuts

    def launches(self, cut: Cut) -> list[Launch]:
        return self.first.launches(cut)

    def multiply(self, cut: Cut, arrived: list[list[Tensor]]) -> None:
        # The second product sends partial sums, which overlap with the first product's arithmetic.
        self.second.multiply(cut, arrived[:1])
        self.first.multiply(cut, arrived)

    def result(self) -> Tensor:
        return self.first.result()


_GRADIENTS: dict[type[_Product], Callable[[Tensor, Tensor, Tensor], tuple[Any, Any]]] = {
    _ProductAB: lambda a, b, d: ((_ProductABT, d, b), (_ProductATB, a, d)),
    _ProductABT: lambda a, b, d: ((_ProductAB, d, b), (_ProductATB, d, a)),
    _ProductATB: lambda a, b, d: ((_ProductABT, b, d), (_ProductAB, a, d)),
}
"""The products that compute the gradients of each product of A and B, from that of its result, D."""


class _Multiply(Function):
    @staticmethod
    def forward(ctx: Any, kind: Any, a: Tensor, b: Tensor, mesh: Mesh2D, panels: Panels) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.kind, ctx.settings = kind, (mesh, panels)
        return recorded(lambda: _run([kind(a, b, mesh, panels)], panels)[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (a, b), needed, panels = ctx.saved_tensors, ctx.needs_input_grad[1:3], ctx.settings[1]
        gradients = _GRADIENTS[ctx.kind](a, b, grads[0])
        # With create_graph=True the gradients need gradients, which only this function has.
        if not all(needed) or torch.is_grad_enabled():
            each = zip(needed, gradients, strict=True)
            found = [_Multiply.apply(*product, *ctx.settings) if need else None for need, product in each]
            return None, *found, None, None
        # One pipeline for both: the weight's operand is sent while the input's gradient is multiplied.
        products = [kind(x, y, *ctx.settings) for kind, x, y in gradients]
        if ctx.kind is _ProductABT:
            return None, *_run([_SharedGather(*products)], panels), products[1].result(), None, None
        return None, *_run(products, panels), None, None


class _PartialSums:
    """A reduce-scatter of partial products, panel by panel; one message is in flight while the next is computed.

    Args:
        slices: [slices, ., .], a view of the result.
        dimension: the dimension that panels split.
        panels: whether messages overlap with arithmetic.
    """

    def __init__(self, slices: Tensor, dimension: int, panels: Panels) -> None:
        self._slices = slices
        self._dimension = dimension
        self._overlap = panels.overlap
        self._in_flight: list[tuple[Cut, Work[list[Tensor]]]] = []

    def send(self, cut: Cut, terms: Tensor, comm: Comm) -> None:
        """Send each rank its part of the terms, and store the result of the previous message."""
        vectors = list(terms.view(comm.size, -1))
        work = comm.all_to_all(vectors, [x.numel() for x in vectors])
        before, self._in_flight = self._in_flight, [(cut, work)]
        for each in before:
            self._store(*each)
        if not self._overlap:
            self.finish()

    def finish(self) -> None:
        """Store the result of the last message."""
        for each in self._in_flight:
            self._store(*each)
        self._in_flight = []

    def _store(self, cut: Cut, work: Work[list[Tensor]]) -> None:
        # In rank order, not in order of arrival, so that runs are reproducible.
        target = _part(self._slices, self._dimension, cut, copy=False)
        target.copy_(sum_terms(work.wait()).view(target.shape))


def sum_terms(terms: list[Tensor]) -> Tensor:
    """Sum vectors in order, in fp32 at least."""
    total = terms[0].to(accumulation_dtype(terms[0].dtype), copy=len(terms) > 1)
    for term in terms[1:]:
        total += term
    return total


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of accumulated sums: fp64 for fp64, else fp32."""
    return torch.promote_types(dtype, torch.float32)


def _add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product in the dtype of `total`, which may be wider than that of the operands."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        total += torch.mm(left, right, out_dtype=total.dtype)  # accumulated in fp32 without casting the operands
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def _part(x: Tensor, dimension: int, cut: Cut, *, copy: bool = True) -> Tensor:
    """Return one panel's part of every slice: a contiguous copy to send, or a view to write to."""
    part = x.narrow(dimension, cut[0], cut[1] - cut[0])
    return part.contiguous() if copy else part


def _width(size: int, mesh: Mesh2D) -> int:
    check_divides(size, mesh.slices, "a product", f"a {mesh.rows}x{mesh.columns} mesh splits it into slices")
    return size // mesh.slices
