# SPDX-License-Identifier: Apache-2.0
r"""Check before step 0, from the mixing matrices, whether a decentralized method is stable on a graph.

At any learning rate, differences between workers evolve even without gradients: with $z = (x, v)$ a worker's parameters
and the method's momentum, minus their means over workers, one step is
$z \leftarrow (A \otimes W_t + B \otimes I)\, z$ with two by two matrices $A$ (mixed) and $B$ (kept) of the method.
If the differences grow, no learning rate helps. On a static graph each eigenvalue $\lambda \ne 1$ of $W$ is a separate
mode: the growth per step is the spectral radius of $A\lambda + B$. On a changing graph it is that of the product over a
period, for each mode separately if the steps share their eigenvectors. Momenta are in units of the parameters, and the
learning rate is constant.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import ConfigError
from thinwire.methods.topology.base import Topology, check_edges, doubly_stochastic

Square = tuple[tuple[float, float], tuple[float, float]]
_MARGIN = 1e-9
_ROUNDING = 1e-12
# Beyond this condition number of the eigenvectors, modes are not accurate to the margin.
_WORST_CONDITION = 1e4
# On a changing graph of more workers, random differences are followed instead: the exact growth takes time and memory
# that grow with the cube and the square of the number of workers, 35 s for 1,024.
_MOST_EXACT = 128
_VECTORS, _MOST_STEPS = 8, 4096
_DECIDED = 20.0  # logarithm of the change after which differences shrink or grow without doubt


@dataclass(frozen=True)
class Disagreement:
    """The evolution of differences between workers in a step without gradients.

    Args:
        mixed: $A$, the part that passes through the graph.
        kept: $B$, the part that does not.
    """

    mixed: Square
    kept: Square


def decentlam(momentum: float, *, nesterov: bool = False) -> Disagreement:
    r"""DecentLaM: $x \leftarrow Wx - \beta v$, $v \leftarrow \beta v + (I-W)x$.

    A mode of eigenvalue $\lambda$ has $z^2 - (\lambda+\beta) z + \beta$, stable for $-(1+2\beta) < \lambda < 1$ and,
    if it is complex, for $|\mathrm{Im}\,\lambda| < (1-\beta)\sqrt{1-((\mathrm{Re}\,\lambda+\beta)/(1+\beta))^2}$.
    Nesterov's form uses the new $v$: $z^2 - (1+\beta)\lambda z + \beta\lambda$, stable for
    $-1/(1+2\beta) < \lambda < 1$.
    """
    b = momentum
    if nesterov:
        return Disagreement(((1 + b, 0), (-1, 0)), ((-b, -b * b), (1, b)))
    return Disagreement(((1, 0), (-1, 0)), ((0, -b), (1, b)))


def quasi_global(momentum: float, *, memory: float, nesterov: bool = False) -> Disagreement:
    r"""QG-DmSGD: $x' = W(x - \beta v)$, $v \leftarrow \mu v + (1-\mu)(x - x')$; Nesterov's form has $\beta^2$."""
    b, m = momentum * momentum if nesterov else momentum, memory
    return Disagreement(((1, -b), (m - 1, (1 - m) * b)), ((0, 0), (1 - m, m)))


def exact_diffusion() -> Disagreement:
    r"""Exact diffusion with any momentum, mixing with $\frac12(I+W)$: $x' = \frac12(I+W)(x+v)$, $v \leftarrow x' - x$.

    A mode has $z^2 - (1+\lambda) z + \frac12(1+\lambda)$, stable for every real $\lambda$ in $(-1, 1)$.
    """
    return Disagreement(((0.5, 0.5), (0.5, 0.5)), ((0.5, 0.5), (-0.5, 0.5)))


@lru_cache(maxsize=256)
def growth(topology: Topology, size: int, method: Disagreement) -> float:
    """Return the growth of differences between workers per step, in the long run; below one they vanish.

    On changing graphs of more than 128 workers it is measured on random differences, unless these neither shrink nor
    grow much in 4,096 steps.
    """
    if size == 1:
        return 0.0
    if size > _MOST_EXACT and topology.period(size) > 1 and (measured := _measured(topology, size, method)) is not None:
        return measured
    mixed, kept = np.array(method.mixed), np.array(method.kept)
    mixings, modes = _mixings(topology, size), _modes(topology, size)
    if modes is not None:
        # One 2 x 2 matrix for each mode costs far less than one matrix of 2 (n - 1) rows.
        period = np.eye(2)
        for mode in modes:
            period = (mixed * mode[:, None, None] + kept) @ period
    else:
        period = np.eye(2 * (size - 1))
        for mixing in mixings:
            period = (np.kron(mixed, mixing) + np.kron(kept, np.eye(size - 1))) @ period
    return float(np.abs(np.linalg.eigvals(period)).max() ** (1 / len(mixings)))


def _measured(topology: Topology, size: int, method: Disagreement) -> float | None:
    """Return the growth per step of random differences between workers; None if it is not clear after a while."""
    mixed, kept = np.array(method.mixed), np.array(method.kept)
    steps = [_neighbors(topology, size, step) for step in range(topology.period(size))]
    # A random vector has a part in every mode, and its growth is soon that of the fastest one. The seed is fixed, so
    # that all ranks decide alike.
    z = np.random.default_rng(0).standard_normal((2, size, _VECTORS))
    changes = [0.0]
    while len(changes) * len(steps) <= _MOST_STEPS:
        for sources, weights in steps:
            z = np.tensordot(mixed, np.einsum("ij,kijv->kiv", weights, z[:, sources]), 1) + np.tensordot(kept, z, 1)
        z -= z.mean(1, keepdims=True)
        norm = float(np.linalg.norm(z))
        if not norm:
            return 0.0
        z /= norm
        changes.append(changes[-1] + float(np.log(norm)))
        half = len(changes) // 2
        if half > 1 and abs(changes[-1] - changes[half - 1]) > _DECIDED:
            return float(np.exp((changes[-1] - changes[half - 1]) / ((len(changes) - half) * len(steps))))
    return None


def _neighbors(topology: Topology, size: int, step: int) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Return the ranks whose vectors each rank mixes, its own first, and the weights; shorter rows end with zeros."""
    everyone = [topology.peers(rank, size, step) for rank in range(size)]
    most = 1 + max(len(peers.src) for peers in everyone)
    sources, weights = np.zeros((size, most), np.intp), np.zeros((size, most))
    for rank, peers in enumerate(everyone):
        sources[rank, : 1 + len(peers.src)] = rank, *peers.src
        weights[rank, : 1 + len(peers.src)] = peers.own, *peers.weights
    return sources, weights


@lru_cache(maxsize=64)
def _mixings(topology: Topology, size: int) -> list[NDArray[np.float64]]:
    """Return each step's mixing matrix on vectors of mean zero; a single one if all steps are equal."""
    matrices = [topology.matrix(size, step) for step in range(topology.period(size))]
    if all(np.array_equal(matrix, matrices[0]) for matrix in matrices):
        matrices = matrices[:1]
    basis = _differences(size)
    return [basis.T @ matrix @ basis for matrix in matrices]


@lru_cache(maxsize=64)
def _modes(topology: Topology, size: int) -> list[NDArray[np.complex128]] | None:
    """Return each step's eigenvalues in the order of shared eigenvectors; None if the steps share none."""
    mixings = _mixings(topology, size)
    if len(mixings) == 1 and np.allclose(mixings[0], mixings[0].T, rtol=0, atol=_ROUNDING):
        # The symmetric routine is several times as fast, and its eigenvectors are always accurate.
        return [np.linalg.eigvalsh(mixings[0]).astype(np.complex128)]
    # If the steps share eigenvectors, these are the eigenvectors of any sum of the steps. Unrelated weights keep
    # eigenvalues of the sum distinct if those of the steps are.
    weights = np.sqrt(2.0 + np.arange(len(mixings)))
    vectors = np.linalg.eig(sum(weight * mixing for weight, mixing in zip(weights, mixings, strict=True)))[1]
    if np.linalg.cond(vectors) > _WORST_CONDITION:
        return None
    diagonals = [np.linalg.solve(vectors, mixing @ vectors) for mixing in mixings]
    if any(np.abs(each - np.diag(np.diag(each))).max() > _MARGIN for each in diagonals):
        return None
    return [np.diag(each).astype(np.complex128) for each in diagonals]


def _differences(size: int) -> NDArray[np.float64]:
    """Return orthonormal columns that span the vectors of mean zero."""
    # The first column of Q is the direction of ones, so all others are orthogonal to it.
    spanning = np.eye(size)
    spanning[:, 0] = 1.0
    return np.linalg.qr(spanning)[0][:, 1:]


def check_average_kept(recipe: object, topology: Topology, size: int) -> None:
    """Check that a graph exists, is connected and preserves the average.

    Raises:
        ConfigError: it does not; the error suggests an alternative.
    """
    check_edges(topology, size)
    if not doubly_stochastic(topology, size):
        raise ConfigError(
            f"{recipe} with {size} workers: the weights are not doubly stochastic, so the average would drift. Use "
            "PushSum, which corrects for it, or a regular graph"
        )


def check_stable(
    recipe: object, topology: Topology, size: int, method: Callable[[float], Disagreement], momentum: float
) -> None:
    """Check that differences between workers do not grow at any learning rate.

    Args:
        recipe: the strategy, for the error.
        topology: the graph.
        size: the number of workers.
        method: returns the evolution of differences for a momentum.
        momentum: the recipe's momentum.

    Raises:
        ConfigError: they grow; the error has the growth per step, the largest stable momentum and alternatives.
    """
    factor = growth(topology, size, method(momentum))
    if factor < 1 - _MARGIN:
        return
    fixes: list[str] = []
    if (best := largest_stable_momentum(topology, size, method)) is not None:
        fixes.append(f"lower the momentum to {best:.2f} or less, the largest stable value on this graph")
    others = {
        f"QuasiGlobal({topology}, momentum={momentum})": quasi_global(momentum, memory=momentum),
        f"ExactDiffusion({topology}, momentum={momentum})": exact_diffusion(),
    }
    fixes += [f"use {name}" for name, each in others.items() if growth(topology, size, each) < 1 - _MARGIN]
    fixes.append("use a static symmetric graph, such as Ring()")
    fix = ", or ".join(fixes)
    raise ConfigError(
        f"{recipe} with {size} workers: differences between workers would grow by {max(factor, 1.0):.3g} a step, "
        f"however small the learning rate. {fix[0].upper()}{fix[1:]}"
    )


def largest_stable_momentum(topology: Topology, size: int, method: Callable[[float], Disagreement]) -> float | None:
    """Find the largest stable momentum by bisection, rounded down to hundredths; None if there is none."""
    if growth(topology, size, method(0.0)) >= 1 - _MARGIN:
        return None
    # In whole hundredths, so that the momentum in the error has been tested.
    stable, unstable = 0, 100
    while unstable - stable > 1:
        middle = (stable + unstable) // 2
        fine = growth(topology, size, method(middle / 100)) < 1 - _MARGIN
        stable, unstable = (middle, unstable) if fine else (stable, middle)
    return stable / 100
