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

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from laconic.comm.base import Work
from laconic.tensor2d.mesh import Mesh2D, check_divides
from laconic.tensor2d.panels import Cut, Panels
from laconic.tensor2d.tape import kept


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
        return kept(lambda: _ab(a, b, mesh, panels))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (a, b), grad = ctx.saved_tensors, grads[0]
        to_a = multiply_abt(grad, b, *ctx.how) if ctx.needs_input_grad[0] else None
        to_b = multiply_atb(a, grad, *ctx.how) if ctx.needs_input_grad[1] else None
        return to_a, to_b, None, None


class _ABT(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, mesh: Mesh2D, panels: Panels) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.how = mesh, panels
        return kept(lambda: _abt(a, b, mesh, panels))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (a, b), grad = ctx.saved_tensors, grads[0]
        to_a = multiply_ab(grad, b, *ctx.how) if ctx.needs_input_grad[0] else None
        to_b = multiply_atb(grad, a, *ctx.how) if ctx.needs_input_grad[1] else None
        return to_a, to_b, None, None


class _ATB(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, mesh: Mesh2D, panels: Panels) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.how = mesh, panels
        return kept(lambda: _atb(a, b, mesh, panels))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (a, b), grad = ctx.saved_tensors, grads[0]
        to_a = multiply_abt(b, grad, *ctx.how) if ctx.needs_input_grad[0] else None
        to_b = multiply_ab(a, grad, *ctx.how) if ctx.needs_input_grad[1] else None
        return to_a, to_b, None, None


def _ab(a_mk: Tensor, b_kn: Tensor, mesh: Mesh2D, panels: Panels) -> Tensor:
    width = _width(a_mk.shape[1] * mesh.columns, mesh)
    across, down = mesh.slices // mesh.columns, mesh.slices // mesh.rows
    a_mtw, b_twn = a_mk.unflatten(1, (across, width)), b_kn.unflatten(0, (down, width))
    c_mn = a_mk.new_zeros((a_mk.shape[0], b_kn.shape[1]), dtype=exact_dtype(a_mk.dtype))
    arriving = panels.arriving(
        panels.cuts(width),
        lambda cut: [
            lambda: mesh.along_row.gather(_part(a_mtw, 2, cut).flatten(1)),
            lambda: mesh.along_column.gather(_part(b_twn, 1, cut).flatten(0, 1)),
        ],
    )
    for (start, stop), (lefts, rights) in arriving:
        n = stop - start
        for t in range(mesh.slices):
            left = lefts[t // across].narrow(1, t % across * n, n)
            right = rights[t // down].narrow(0, t % down * n, n)
            _add_product_(c_mn, left, right)
    return c_mn.to(a_mk.dtype)


def _abt(a_mk: Tensor, b_nk: Tensor, mesh: Mesh2D, panels: Panels) -> Tensor:
    width = _width(b_nk.shape[0] * mesh.rows, mesh)
    across, down = mesh.slices // mesh.columns, mesh.slices // mesh.rows
    b_twk = b_nk.unflatten(0, (down, width))
    c_mn = a_mk.new_empty((a_mk.shape[0], across * width))
    sums = _Sums(c_mn.unflatten(1, (across, width)).transpose(0, 1), 2, panels)
    arriving = panels.arriving(
        panels.cuts(width), lambda cut: [lambda: mesh.along_column.gather(_part(b_twk, 1, cut).flatten(0, 1))]
    )
    for cut, (pieces,) in arriving:
        n = cut[1] - cut[0]
        terms_tmw = a_mk.new_empty((mesh.slices, a_mk.shape[0], n))
        for t in range(mesh.slices):
            torch.mm(a_mk, pieces[t // down].narrow(0, t % down * n, n).T, out=terms_tmw[t])
        vectors = list(terms_tmw.view(mesh.columns, -1))
        sums.add(cut, mesh.along_row.scatter(vectors, [x.numel() for x in vectors]))
    sums.finish()
    return c_mn


def _atb(a_km: Tensor, b_kn: Tensor, mesh: Mesh2D, panels: Panels) -> Tensor:
    width = _width(a_km.shape[1] * mesh.columns, mesh)
    across, down = mesh.slices // mesh.columns, mesh.slices // mesh.rows
    a_ktw = a_km.unflatten(1, (across, width))
    c_mn = a_km.new_empty((down * width, b_kn.shape[1]))
    sums = _Sums(c_mn.unflatten(0, (down, width)), 1, panels)
    arriving = panels.arriving(
        panels.cuts(width), lambda cut: [lambda: mesh.along_row.gather(_part(a_ktw, 2, cut).flatten(1))]
    )
    for cut, (pieces,) in arriving:
        n = cut[1] - cut[0]
        terms_twn = a_km.new_empty((mesh.slices, n, b_kn.shape[1]))
        for t in range(mesh.slices):
            torch.mm(pieces[t // across].narrow(1, t % across * n, n).T, b_kn, out=terms_twn[t])
        vectors = list(terms_twn.view(mesh.rows, -1))
        sums.add(cut, mesh.along_column.scatter(vectors, [x.numel() for x in vectors]))
    sums.finish()
    return c_mn


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

    def add(self, cut: Cut, work: Work[list[Tensor]]) -> None:
        """Take in the message before this one."""
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
