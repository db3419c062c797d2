# SPDX-License-Identifier: Apache-2.0
r"""Measure how fast a graph reduces differences between workers, from its mixing matrices.

With $W_t$ the mixing matrix of step t, the workers' vectors, as rows, become $X \leftarrow W_t X$. Disagreement after
some steps is measured on the de-biased vectors of push-sum, $Z_{ij} = P_{ij} / \sum_k P_{ik}$ with $P$ the product of
the steps; if weights are doubly stochastic, $Z = P$. The 2-norm of $Z - \frac1n 1 1^\top$ is the largest remaining
share of any difference between workers, and of any worker's distance from the average.

All functions expect a graph that `check_edges` accepts. Results are cached per graph and size; 128 workers take well
under a second.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import ConfigError
from thinwire.methods.topology.base import Topology, doubly_stochastic, out_of_reach

Matrix = NDArray[np.float64]
CLOSE = 1e-3
_EXACT = 1e-12
# A graph whose differences fall from more than this to `_EXACT` in one step reaches the exact average.
_JUST_BEFORE = 1e-6
_MOST_DOUBLINGS = 50


@lru_cache(maxsize=32)
def matrices(topology: Topology, size: int) -> Matrix:
    """Return the mixing matrices of one period, of shape (period, size, size); read-only.

    Raises:
        ConfigError: the graph does not exist for that many workers.
    """
    topology.check(size)
    stacked = np.stack([topology.matrix(size, step) for step in range(topology.period(size))])
    # The result is cached, so no caller may change it.
    stacked.flags.writeable = False
    return stacked


def static(topology: Topology, size: int) -> bool:
    """Return True if every step has the same graph and weights."""
    mixings = matrices(topology, size)
    return bool((mixings == mixings[0]).all())


def symmetric(topology: Topology, size: int) -> bool:
    """Return True if at every step the weights are the same in both directions of every edge."""
    mixings = matrices(topology, size)
    return bool(np.allclose(mixings, mixings.transpose(0, 2, 1), rtol=0, atol=_EXACT))


def column_stochastic(topology: Topology, size: int) -> bool:
    """Return True if the sum over workers is preserved: columns sum to one, as push-sum needs."""
    return bool(np.allclose(matrices(topology, size).sum(1), 1.0, rtol=0, atol=_EXACT))


def connected(topology: Topology, size: int) -> bool:
    """Return True if a period has a path from every rank to every other."""
    sends: NDArray[np.bool_] = np.any(matrices(topology, size) > 0, axis=0)
    return not any(out_of_reach(sends))


@lru_cache(maxsize=256)
def eigenvalues(topology: Topology, size: int) -> NDArray[Any]:
    """Return the eigenvalues of a static graph's mixing matrix, largest modulus first; real if symmetric.

    Raises:
        ConfigError: the graph changes from step to step.
    """
    if not static(topology, size):
        raise ConfigError(
            f"{topology} with {size} workers changes from step to step: only static graphs have eigenvalues"
        )
    mixing = matrices(topology, size)[0]
    # The symmetric routine returns real numbers, without rounding errors in an imaginary part.
    found: NDArray[Any] = np.linalg.eigvalsh(mixing) if symmetric(topology, size) else np.linalg.eigvals(mixing)
    found = found[np.argsort(-np.abs(found), kind="stable")]
    found.flags.writeable = False
    return found


@lru_cache(maxsize=256)
def spectral_gap(topology: Topology, size: int) -> float:
    r"""Return one minus the factor by which differences shrink per step, in the long run.

    The factor is the second largest modulus of the eigenvalues of a period's product, $|\lambda_2|^{1/T}$ with T the
    period, which is $|\lambda_2(W)|$ for a static graph. If a period reaches the exact average, the factor is 0 and the
    gap 1.
    """
    if steps_to_average(topology, size) is not None:
        return 1.0
    moduli = np.sort(np.abs(np.linalg.eigvals(_product(topology, size))))
    return float(1.0 - moduli[-2] ** (1.0 / topology.period(size)))


@lru_cache(maxsize=256)
def contraction(topology: Topology, size: int) -> float:
    """Return the largest share of any disagreement that is left after one period, in the 2-norm."""
    return _left(_product(topology, size))


@lru_cache(maxsize=256)
def steps_to(topology: Topology, size: int, left: float = CLOSE) -> int | None:
    """Return the steps until at most the share `left` of any disagreement is left; None if never."""
    if not connected(topology, size):
        return None
    # Square the product of a period until it is past the goal, then find the number of periods bit by bit.
    done = np.eye(size)
    powers = [_product(topology, size)]
    while _left(powers[-1]) > left:
        if len(powers) > _MOST_DOUBLINGS:
            return None
        powers.append(_normed(powers[-1] @ powers[-1]))
    periods = 0
    for exponent in reversed(range(len(powers) - 1)):
        trial = _normed(powers[exponent] @ done)
        if _left(trial) > left:
            done, periods = trial, periods + 2**exponent
    steps = periods * topology.period(size)
    mixings = cycle(matrices(topology, size))
    while _left(done) > left:
        done, steps = next(mixings) @ done, steps + 1
    return steps


def steps_to_average(topology: Topology, size: int) -> int | None:
    """Return the steps to the exact average; None for graphs that only approach it."""
    steps = steps_to(topology, size, _EXACT)
    return steps if steps == steps_to(topology, size, _JUST_BEFORE) else None


def disagreement(topology: Topology, size: int, steps: int) -> NDArray[np.float64]:
    """Return the largest share of any disagreement that is left after 0, 1, ... `steps` steps."""
    return np.array([_left(product) for product in _products(topology, size, steps)])


@dataclass(frozen=True)
class Traffic:
    """The number of vectors that workers send at a step.

    Attributes:
        mean: per worker and step, over all workers and steps.
        busiest: the mean over steps for the worker that sends or receives most.
        peak: the most that a worker sends or receives at any step.
    """

    mean: float
    busiest: float
    peak: int


def traffic(topology: Topology, size: int) -> Traffic:
    """Return how many vectors workers send and receive; a vector has the size of the parameters."""
    edges = (matrices(topology, size) > 0) & ~np.eye(size, dtype=bool)
    at_once = np.stack([edges.sum(1), edges.sum(2)])
    return Traffic(float(edges.sum((1, 2)).mean() / size), float(at_once.mean(1).max()), int(at_once.max()))


@dataclass(frozen=True)
class Facts:
    """The properties of a graph for a number of workers; see the functions of the same names.

    Attributes:
        period: steps after which the graph repeats.
        static: every step is the same.
        symmetric: weights are the same in both directions of every edge.
        doubly_stochastic: the plain average is preserved.
        column_stochastic: the sum is preserved, as push-sum needs.
        vectors_per_step: sent per worker and step.
        busiest_vectors_per_step: sent or received by the busiest worker, mean over steps.
        most_vectors_at_once: the most that any worker sends or receives at any step.
        spectral_gap: one minus the long-run factor per step.
        contraction: the largest share of any disagreement that is left after a period.
        smallest_eigenvalue: of a static symmetric graph.
        steps_to_average: steps to the exact average.
        steps_to_a_thousandth: steps until 0.1 % of any disagreement is left.
    """

    period: int
    static: bool
    symmetric: bool
    doubly_stochastic: bool
    column_stochastic: bool
    vectors_per_step: float
    busiest_vectors_per_step: float
    most_vectors_at_once: int
    spectral_gap: float
    contraction: float
    smallest_eigenvalue: float | None
    steps_to_average: int | None
    steps_to_a_thousandth: int | None


def facts(topology: Topology, size: int) -> Facts:
    """Return all properties of a graph for a number of workers."""
    plain = static(topology, size) and symmetric(topology, size)
    sent = traffic(topology, size)
    return Facts(
        period=topology.period(size),
        static=static(topology, size),
        symmetric=symmetric(topology, size),
        doubly_stochastic=doubly_stochastic(topology, size),
        column_stochastic=column_stochastic(topology, size),
        vectors_per_step=sent.mean,
        busiest_vectors_per_step=sent.busiest,
        most_vectors_at_once=sent.peak,
        spectral_gap=spectral_gap(topology, size),
        contraction=contraction(topology, size),
        smallest_eigenvalue=float(np.real(eigenvalues(topology, size)).min()) if plain else None,
        steps_to_average=steps_to_average(topology, size),
        steps_to_a_thousandth=steps_to(topology, size),
    )


def _products(topology: Topology, size: int, steps: int) -> Iterator[Matrix]:
    """Yield the products of the first 0, 1, ... steps."""
    product = np.eye(size)
    yield product
    for _, mixing in zip(range(steps), cycle(matrices(topology, size)), strict=False):
        product = mixing @ product
        yield product


@lru_cache(maxsize=32)
def _product(topology: Topology, size: int) -> Matrix:
    """Return the product of a period's mixing matrices."""
    *_, product = _products(topology, size, topology.period(size))
    return product


def _left(product: Matrix) -> float:
    """Return the largest share of any disagreement that is left after these steps."""
    shares = product / product.sum(1, keepdims=True)
    return float(np.linalg.norm(shares - 1.0 / len(shares), 2))


def _normed(product: Matrix) -> Matrix:
    """Scale columns to sum to one; over thousands of steps rounding would change these sums."""
    return product / product.sum(0)
