r"""The three products of matrices of which every rank holds a block.

A matrix X is cut into r x c blocks; rank (i, j) holds block (i, j). Each product is the forward pass of one layout and
a backward pass of the others:

- `multiply_ab`:  $C = A B$,   `dA = abt(dC, B)`, `dB = atb(A, dC)`;
- `multiply_abt`: $C = A B^T$, `dA = ab(dC, B)`,  `dB = atb(dC, A)`;
- `multiply_atb`: $C = A^T B$, `dA = abt(B, dC)`, `dB = ab(A, dC)`.

The inner (for the transposed products: the outer) dimension falls into L = lcm(r, c) slices. Column j owns L / c
consecutive ones, row i owns L / r. A panel takes the same part of every slice, so each rank contributes equally to
every message, where SUMMA broadcasts the slices of one owner after the other; pieces, bytes and sums are the same.

Van de Geijn and Watts, SUMMA, 1997; Xu et al., An Efficient 2D Method for Training Super-Large Deep Learning Models,
2021, arXiv:2104.05343, Algorithms 1 to 3.

Shapes: `_mk` is a block of rows M / r and columns K / c of this rank; T below is L, w is a slice's width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from thinwire.comm.base import Comm
from thinwire.comm.work import Work
from thinwire.tensor2d.mesh import Mesh2D, check_divides
from thinwire.tensor2d.panels import Cut, Launch, Panels
from thinwire.tensor2d.tape import kept


def multiply_ab(a_mk: Tensor, b_kn: Tensor, mesh: Mesh2D, panels: Panels | None = None) -> Tensor:
    """Blocks of A [M / r, K / c] and B [K / r, N / c] to the block [M / r, N / c] of A B; C does not travel.

    Args:
        a_mk: this rank's block of A.
        b_kn: this rank's block of B.
        mesh: the ranks.
        panels: how A and B travel; the mesh's where None.

    Raises:
        ConfigError: K cannot be cut into lcm(r, c) slices.
    """
    return cast(Tensor, _AB.apply(a_mk, b_kn, mesh, panels or mesh.panels))


def multiply_abt(a_mk: Tensor, b_nk: Tensor, mesh: Mesh2D, panels: Panels | None = None) -> Tensor:
    """Blocks of A [M / r, K / c] and B [N / r, K / c] to the block [M / r, N / c] of A B^T; A does not travel.

    Args:
        a_mk: this rank's block of A.
        b_nk: this rank's block of B.
        mesh: the ranks.
        panels: how B travels; the mesh's where None.

    Raises:
        ConfigError: N cannot be cut into lcm(r, c) slices.
    """
    return cast(Tensor, _ABT.apply(a_mk, b_nk, mesh, panels or mesh.panels))


def multiply_atb(a_km: Tensor, b_kn: Tensor, mesh: Mesh2D, panels: Panels | None = None) -> Tensor:
    """Blocks of A [K / r, M / c] and B [K / r, N / c] to the block [M / r, N / c] of A^T B; B does not travel.

    Args:
        a_km: this rank's block of A.
        b_kn: this rank's block of B.
        mesh: the ranks.
        panels: how A travels; the mesh's where None.

    Raises:
        ConfigError: M cannot be cut into lcm(r, c) slices.
    """
    return cast(Tensor, _ATB.apply(a_km, b_kn, mesh, panels or mesh.panels))


class _AB(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, mesh: Mesh2D, panels: Panels) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.how = mesh, panels
        return kept(lambda: _carried_out([_ProductAB(a, b, mesh, panels)], panels)[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (a, b), grad = ctx.saved_tensors, grads[0]
        if all(ctx.needs_input_grad[:2]) and not torch.is_grad_enabled():
            mesh, panels = ctx.how
            jobs = [_ProductABT(grad, b, mesh, panels), _ProductATB(a, grad, mesh, panels)]
            return *_carried_out(jobs, panels), None, None
        to_a = multiply_abt(grad, b, *ctx.how) if ctx.needs_input_grad[0] else None
        to_b = multiply_atb(a, grad, *ctx.how) if ctx.needs_input_grad[1] else None
        return to_a, to_b, None, None


class _ABT(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, mesh: Mesh2D, panels: Panels) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.how = mesh, panels
        return kept(lambda: _carried_out([_ProductABT(a, b, mesh, panels)], panels)[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (a, b), grad = ctx.saved_tensors, grads[0]
        if all(ctx.needs_input_grad[:2]) and not torch.is_grad_enabled():
            mesh, panels = ctx.how
            both = _OneGather(_ProductAB(grad, b, mesh, panels), _ProductATB(grad, a, mesh, panels))
            _carried_out([both], panels)
            return both.first.result(), both.second.result(), None, None
        to_a = multiply_ab(grad, b, *ctx.how) if ctx.needs_input_grad[0] else None
        to_b = multiply_atb(grad, a, *ctx.how) if ctx.needs_input_grad[1] else None
        return to_a, to_b, None, None


class _ATB(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, mesh: Mesh2D, panels: Panels) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.how = mesh, panels
        return kept(lambda: _carried_out([_ProductATB(a, b, mesh, panels)], panels)[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (a, b), grad = ctx.saved_tensors, grads[0]
        to_a = multiply_abt(b, grad, *ctx.how) if ctx.needs_input_grad[0] else None
        to_b = multiply_ab(a, grad, *ctx.how) if ctx.needs_input_grad[1] else None
        return to_a, to_b, None, None


class _Job(ABC):
    """One product, panel by panel: what to send for a panel, and what to do with what arrived."""

    cuts: list[Cut]

    @abstractmethod
    def launches(self, cut: Cut) -> list[Launch]:
        """The messages of one panel."""

    @abstractmethod
    def multiply(self, cut: Cut, arrived: list[list[Tensor]]) -> None:
        """Use what they brought."""

    @abstractmethod
    def result(self) -> Tensor:
        """This rank's block, once every panel is used."""


def _carried_out(jobs: Sequence[_Job], panels: Panels) -> list[Tensor]:
    """The results of products of which each one's first panel travels while the one before is still multiplied."""
    tasks = [(job, cut) for job in jobs for cut in job.cuts]
    for (job, cut), arrived in panels.arriving(tasks, lambda task: task[0].launches(task[1])):
        job.multiply(cut, arrived)
        del arrived  # before the memory for the next but one is taken
    return [job.result() for job in jobs]


class _ProductAB(_Job):
    def __init__(self, a_mk: Tensor, b_kn: Tensor, mesh: Mesh2D, panels: Panels) -> None:
        width = _width(a_mk.shape[1] * mesh.columns, mesh)
        self._mesh, self._dtype = mesh, a_mk.dtype
        self._across, self._down = mesh.slices // mesh.columns, mesh.slices // mesh.rows
        self._a_mtw, self._b_twn = a_mk.unflatten(1, (self._across, width)), b_kn.unflatten(0, (self._down, width))
        self._c_mn = a_mk.new_zeros((a_mk.shape[0], b_kn.shape[1]), dtype=exact_dtype(a_mk.dtype))
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


class _ProductABT(_Job):
    def __init__(self, a_mk: Tensor, b_nk: Tensor, mesh: Mesh2D, panels: Panels) -> None:
        width = _width(b_nk.shape[0] * mesh.rows, mesh)
        self._mesh, self._a_mk = mesh, a_mk
        across, self._down = mesh.slices // mesh.columns, mesh.slices // mesh.rows
        self._b_twk = b_nk.unflatten(0, (self._down, width))
        self._c_mn = a_mk.new_empty((a_mk.shape[0], across * width))
        self._sums = _Sums(self._c_mn.unflatten(1, (across, width)).transpose(0, 1), 2, panels)
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


class _ProductATB(_Job):
    def __init__(self, a_km: Tensor, b_kn: Tensor, mesh: Mesh2D, panels: Panels) -> None:
        width = _width(a_km.shape[1] * mesh.columns, mesh)
        self._mesh, self._b_kn = mesh, b_kn
        self._across, down = mesh.slices // mesh.columns, mesh.slices // mesh.rows
        self._a_ktw = a_km.unflatten(1, (self._across, width))
        self._c_mn = a_km.new_empty((down * width, b_kn.shape[1]))
        self._sums = _Sums(self._c_mn.unflatten(0, (down, width)), 1, panels)
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


class _OneGather(_Job):
    """$D B$ and $D^T A$ from one gather of D's blocks along the row, as the two gradients of $A B^T$ need them."""

    def __init__(self, first: _ProductAB, second: _ProductATB) -> None:
        self.first, self.second = first, second
        self.cuts = first.cuts

    def launches(self, cut: Cut) -> list[Launch]:
        return self.first.launches(cut)

    def multiply(self, cut: Cut, arrived: list[list[Tensor]]) -> None:
        # The second's terms travel while the first is multiplied.
        self.second.multiply(cut, arrived[:1])
        self.first.multiply(cut, arrived)

    def result(self) -> Tensor:
        return self.first.result()


class _Sums:
    """Terms that ranks send each other, added up into slices; one message is under way while the next is made.

    Args:
        slices: [slices, ., .], a view of the result.
        dimension: the one that panels cut.
        panels: whether to wait at once.
    """

    def __init__(self, slices: Tensor, dimension: int, panels: Panels) -> None:
        self._slices = slices
        self._dimension = dimension
        self._overlap = panels.overlap
        self._under_way: list[tuple[Cut, Work[list[Tensor]]]] = []

    def send(self, cut: Cut, terms: Tensor, comm: Comm) -> None:
        """Send each rank its part of the terms, and take in the message before this one."""
        vectors = list(terms.view(comm.size, -1))
        work = comm.all_to_all(vectors, [x.numel() for x in vectors])
        before, self._under_way = self._under_way, [(cut, work)]
        for each in before:
            self._store(*each)
        if not self._overlap:
            self.finish()

    def finish(self) -> None:
        """Take in the last message."""
        for each in self._under_way:
            self._store(*each)
        self._under_way = []

    def _store(self, cut: Cut, work: Work[list[Tensor]]) -> None:
        target = _part(self._slices, self._dimension, cut, copy=False)
        target.copy_(sum_exactly(work.wait()).view(target.shape))


def sum_exactly(terms: list[Tensor]) -> Tensor:
    """The sum of vectors, in their order, in fp32 at least."""
    total = terms[0].to(exact_dtype(terms[0].dtype), copy=len(terms) > 1)
    for term in terms[1:]:
        total += term
    return total


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums are formed: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def _add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        total += torch.mm(left, right, out_dtype=total.dtype)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def _part(x: Tensor, dimension: int, cut: Cut, *, copy: bool = True) -> Tensor:
    """A part of every slice; contiguous, as the wire wants it, where it is a copy."""
    part = x.narrow(dimension, cut[0], cut[1] - cut[0])
    return part.contiguous() if copy else part


def _width(size: int, mesh: Mesh2D) -> int:
    check_divides(size, mesh.slices, "a product", f"a {mesh.rows}x{mesh.columns} mesh cuts it into slices")
    return size // mesh.slices
