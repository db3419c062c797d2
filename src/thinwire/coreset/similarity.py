# SPDX-License-Identifier: Apache-2.0
"""Distances between points, computed for one block of candidates at a time."""

from __future__ import annotations

import math
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.errors import ConfigError


class SparseMatrix(Protocol):
    """A matrix of `scipy.sparse`."""

    def toarray(self) -> NDArray[Any]:
        """The matrix with its zeros."""
        ...


Features: TypeAlias = Tensor | NDArray[np.floating] | NDArray[np.integer] | SparseMatrix
_CHUNK_ELEMENTS = 1 << 22
# Distances are computed from fp32 numbers.
_LARGEST = 1e37


@runtime_checkable
class Distances(Protocol):
    """A metric between n points that need not have coordinates, such as the distance between their gradients."""

    @property
    def n(self) -> int:
        """Number of points."""
        ...

    def between(self, candidates: Tensor) -> Tensor:
        """The distance of every point to each candidate, float [n, m]; candidates are int64 [m]."""
        ...


class EuclideanDistances:
    r"""Distances $|x_i - x_j|$ between rows of a matrix.

    Rows are stored in float32, centred, and squared distances are computed in float64, block by block: large common
    offsets would cost the digits in which near points differ.

    Args:
        features: float or int, [n, d].

    Raises:
        ConfigError: not a matrix with at least one row and column, or a value is NaN or infinite.
    """

    def __init__(self, features: Features) -> None:
        self.rows = centred(checked(features))
        self.n = len(self.rows)

    def between(self, candidates: Tensor) -> Tensor:
        """Return the distance of every point to each candidate, float32 [n, m]; of a point to itself exactly 0."""
        found = to_rows(self.rows, self.rows[candidates.to(self.rows.device)])
        found[candidates.to(found.device), torch.arange(len(candidates), device=found.device)] = 0
        return found

    def at(self, members: Tensor) -> EuclideanDistances:
        """Return the distances among some of the points, int64 [m], renumbered in their order."""
        part = object.__new__(EuclideanDistances)
        part.rows, part.n = self.rows[members.to(self.rows.device)], len(members)
        return part


class Among:
    """The distances among some of the points of any `Distances`, renumbered in their order.

    Args:
        distances: between all points.
        members: int64, [m]; which points.
    """

    def __init__(self, distances: Distances, members: Tensor) -> None:
        self._all = distances
        self._members = members
        self.n = len(members)

    def between(self, candidates: Tensor) -> Tensor:
        """Return the distance of every member to each candidate, float [n, m]."""
        found = self._all.between(self._members[candidates])
        return found[self._members.to(found.device)]


def among(points: Tensor | Distances, members: Tensor) -> Tensor | Distances:
    """Some of the points: rows, or distances, by `points.at(members)` where it exists, which computes fewer."""
    if isinstance(points, Tensor):
        return points[members.to(points.device)]
    own = getattr(points, "at", None)
    return Among(points, members) if own is None else own(members)


def distances_to(distances: Distances, candidates: Tensor) -> Tensor:
    """Return the distance of every point to each candidate, float [n, m].

    Raises:
        ConfigError: a distance is NaN, infinite or negative, or the shape is another.
    """
    found = distances.between(candidates)
    if isinstance(distances, EuclideanDistances):
        return found  # of features that were checked
    if tuple(found.shape) != (distances.n, len(candidates)):
        raise ConfigError(
            f"distances.between returned the shape {list(found.shape)} for {len(candidates)} candidates of "
            f"{distances.n} points. It must return [n, m] = {[distances.n, len(candidates)]}"
        )
    least, largest = torch.aminmax(found)
    # Negated, so that NaN is refused too.
    if not (least >= 0 and largest < torch.inf):
        bad = ~((found >= 0) & (found < torch.inf))
        point, column = (int(k) for k in bad.nonzero()[0])
        raise ConfigError(
            f"the distance of point {point} to point {int(candidates[column])} is {float(found[point, column])}. "
            "Distances must be finite and at least 0. Drop points without finite values, and clamp rounding errors to 0"
        )
    return found


def checked(features: Features) -> Tensor:
    """Features as a matrix of floats, [n, d]; sparse ones with their zeros.

    Raises:
        ConfigError: not a matrix of numbers with at least one row and column, or a value is NaN, infinite, or so large
            that distances would overflow.
    """
    matrix = features if isinstance(features, Tensor) else _tensor_of(features)
    matrix = matrix if matrix.layout is torch.strided else matrix.to_dense()
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise ConfigError(
            f"features {list(matrix.shape)}: need a matrix [n, d] with a row for each point. Reshape it, x.flatten(1)"
        )
    if matrix.is_complex():
        raise ConfigError(f"features of {matrix.dtype}: distances need real numbers. Use torch.view_as_real")
    matrix = matrix.detach()
    matrix = matrix if matrix.is_floating_point() else matrix.to(torch.float64)
    # Rows rather than a yes or no: the error says which to look at.
    for bad, what in (
        (~torch.isfinite(matrix).all(1), "NaN or infinity, the first is row {}. Drop or fill them before selecting"),
        (
            (matrix.abs() > _LARGEST).any(1),
            "numbers above 1e37, the first is row {}; divide the features by a constant",
        ),
    ):
        if bool(bad.any()):
            words = what.format(int(bad.to(torch.uint8).argmax()))
            raise ConfigError(f"features: {int(bad.sum())} of {len(matrix)} rows hold {words}")
    return matrix


def _tensor_of(features: object) -> Tensor:
    """Return an array as a tensor.

    Raises:
        ConfigError: it is no array of numbers.
    """
    if type(features).__module__.startswith("scipy.sparse"):
        features = cast(SparseMatrix, features).toarray()
    if not isinstance(features, np.ndarray):
        raise ConfigError(
            f"features are a {type(features).__name__}: need a matrix [n, d] as a tensor or an array. Convert them, "
            "np.asarray(x)"
        )
    array: NDArray[Any] = features
    if array.dtype.kind not in "biufc":
        raise ConfigError(
            f"features of {array.dtype}: distances need numbers. Convert them, x.astype(float), or leave columns out"
        )
    if not array.dtype.isnative or array.dtype.itemsize > 16 or array.dtype == np.longdouble:
        # Numbers that torch has no dtype for.
        array = array.astype(np.float64 if array.dtype.kind != "c" else np.complex128)
    return torch.from_numpy(np.ascontiguousarray(array))


def centred(matrix: Tensor) -> Tensor:
    """Return the rows minus their approximate mean, float32."""
    return minus(matrix, centre_of(matrix.sum(0, dtype=torch.float64), len(matrix)))


def minus(matrix: Tensor, centre: Tensor) -> Tensor:
    """Return the rows minus a centre, [d], float32."""
    # In half precision the difference would lose the digits in which near points differ, or overflow.
    wide = matrix if matrix.dtype == torch.float64 else matrix.float()
    return (wide - centre.to(wide.dtype)).float()


def centre_of(total: Tensor, n: int) -> Tensor:
    """Return the approximate mean: rounded to bfloat16, so that the order of the sum does not matter."""
    return (total / max(n, 1)).to(torch.bfloat16)


def to_rows(points: Tensor, candidates: Tensor) -> Tensor:
    """Distances of float32 points [n, d] to candidates [m, d], float32 [n, m], computed in float64."""
    # Allocated once and filled in pieces: the float64 intermediates stay small.
    found = points.new_empty((len(points), len(candidates)))
    wide = candidates.double()
    size = wide.square().sum(1)
    for rows, out in zip(chunks(points, len(candidates)), chunks(found, len(candidates)), strict=True):
        part = rows.double()
        squares = torch.addmm(part.square().sum(1)[:, None] + size, part, wide.T, alpha=-2)
        out.copy_(squares.clamp_min_(0).sqrt_())
    return found


def chunks(matrix: Tensor, columns: int) -> tuple[Tensor, ...]:
    """Return the rows in pieces, such that a result with this number of columns stays small."""
    return matrix.split(max(1, _CHUNK_ELEMENTS // max(columns, matrix.shape[1], 1)))


def power_above(bound: float) -> float:
    """Return the least power of two that is at least a bound; 1 for 0."""
    if bound == 0:
        return 1.0
    # Division by a power of two is exact.
    mantissa, exponent = math.frexp(bound)
    return math.ldexp(1.0, exponent - (mantissa == 0.5))
