# SPDX-License-Identifier: Apache-2.0
"""Every oracle behind one signature: from a setting to all workers' parameters at the end of its run."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.battery.runs import PARTS, SHAPES, SIZES, Oracle, Setting
from tests.methods.strategies.async_runs import end_step, replicas
from tests.methods.strategies.leader_runs import losses_of
from tests.methods.strategies.test_dynamic import Means, two_stages
from tests.methods.strategies.test_server import run_in_order
from tests.methods.strategies.test_sketched import matrix
from tests.oracles import asynchronous, backup, codecs, one_bit, sketched, updates
from tests.oracles.common import Mixing
from tests.oracles.machines import Machine, path
from thinwire import ADPSGD, DQSGD, ParameterServer, RandomMatching
from thinwire.core.kernels import uniform
from thinwire.methods.codecs.base import draw_key

Graph = Callable[[int, torch.dtype], Mixing]


def machine(make: Callable[[], Machine]) -> Oracle:
    """A machine with every worker's own optimizer."""
    return lambda s: _driven(make(), s)


def on_graph(graph: Graph, make: Callable[[Mixing], Machine]) -> Oracle:
    """One that is made from the mixing matrices of a graph."""
    return lambda s: _driven(make(graph(s.size, s.dtype)), s)


def _driven(each: Machine, s: Setting) -> Tensor:
    problem: Any = s.problem
    return path(each, problem.gradient, s.start, s.update(), s.rates, losses_of(problem))[-1]


def stacked(method: Callable[..., Tensor], **words: Any) -> Oracle:
    """A method around every worker's own optimizer."""
    return lambda s: method(s.problem.gradient, s.start, s.update(), s.steps, **words)


def matching(graph: RandomMatching) -> Graph:
    """The pairs that are drawn for each step, who share evenly."""
    return lambda n, dtype: lambda k: torch.tensor(graph.matrix(n, k), dtype=dtype)


def gradients(mean: Callable[[Setting], codecs.Agreed]) -> Oracle:
    """Gradients whose means are coded, where there are several workers."""

    def oracle(s: Setting) -> Tensor:
        agreed = mean(s) if s.size > 1 else lambda rows, _: rows[0]
        return updates.mean_of(agreed, s.problem.gradient, s.start, s.update(), s.steps)

    return oracle


def coded_gradients(block: int) -> Oracle:
    """Gradients in signs, bucket by bucket, with the errors kept for the next step."""
    parts = [part.stop - part.start for part in PARTS]
    return gradients(lambda s: codecs.TwoStages(codecs.signs(block), block, parts))


def first_factor(rank: int, key: Callable[[int], int]) -> Callable[[int], Tensor]:
    """The right factor that a matrix begins with, from the key of the message it is in."""
    columns = {0: 4, 24: 2}

    def first(place: int) -> Tensor:
        n = columns[place]
        return uniform(n * rank, draw_key(key(place), place)).sub(0.5).view(n, rank)

    return first


def low_rank_gradients(rank: int) -> Oracle:
    """Gradients as two factors of each matrix, with the errors kept."""
    # A bucket begins at each matrix.
    first = first_factor(rank, lambda place: draw_key(0, 0, offset=place))
    return gradients(lambda s: codecs.LowRank(rank, SHAPES, first))


def low_rank(rank: int, first_step: int) -> Callable[[], codecs.Agreed]:
    """Means of the whole vector as two factors of each matrix; the first one is of that step."""
    return lambda: codecs.LowRank(rank, SHAPES, first_factor(rank, lambda _: draw_key(0, first_step)))


def in_signs(block: int) -> Callable[[], codecs.TwoStages]:
    """Means of the whole vector in signs, with the errors kept."""
    return lambda: codecs.TwoStages(codecs.signs(block), block, [sum(SIZES)])


def in_nearest(bits: int, block: int) -> Callable[[], codecs.Agreed]:
    """Means of the whole vector to the nearest levels, with the errors kept."""
    return lambda: codecs.TwoStages(codecs.nearest(bits, block), block, [sum(SIZES)])


def in_levels(bits: int, block: int) -> Callable[[], codecs.Agreed]:
    """Means of the whole vector in levels that are drawn."""
    return lambda: lambda rows, k: two_stages(rows, bits, block, draw_key(0, k), dither=False)


def coded(make: Callable[..., Machine], mean: Callable[[], codecs.Agreed], *, tracked: bool = False) -> Oracle:
    """A machine whose means are coded; tracked, where workers keep places of their own and errors are kept."""
    return machine(lambda: make(agree=(codecs.Known if tracked else codecs.coded)(mean())))


def served_overlap(block: int, **words: Any) -> Oracle:
    """Overlap Local-SGD in signs, whose servers move the anchor."""
    return lambda s: codecs.served_overlap(s.problem.gradient, s.start, s.update(), s.steps, in_signs(block)(), **words)


def quantized(strategy: DQSGD) -> Oracle:
    """DQ-SGD, with the bits that the rule chooses."""
    return gradients(lambda s: Means(strategy, PARTS, s.plain_rates))


def sketched_sgd(k: int, *, columns: int, rows: int, momentum: float, second_round: int) -> Oracle:
    """Sketched SGD, whose sketch is a matrix."""

    def oracle(s: Setting) -> Tensor:
        run = sketched.Sketched(
            k, second_round * k, momentum, lambda t: matrix(sum(SIZES), rows, columns * k, draw_key(0, t))
        )
        return _repeated(run.run(s.problem.gradient, s.start, s.rates, decay=s.decay)[-1], s)  # type: ignore[arg-type]

    return oracle


def fetch_sgd(k: int, *, columns: int, rows: int, momentum: float) -> Oracle:
    """FetchSGD, whose sketch is a matrix."""

    def oracle(s: Setting) -> Tensor:
        fixed = matrix(sum(SIZES), rows, columns * k, draw_key(0, 0))
        path, _ = sketched.fetch_sgd(
            s.problem.gradient,
            s.start,
            s.rates,  # type: ignore[arg-type]
            k=k,
            momentum=momentum,
            matrix=fixed,
            decay=s.decay,
        )
        return _repeated(path[-1], s)

    return oracle


def one_bit_adam(block: int, warmup: int) -> Oracle:
    """1-bit Adam; the vector is one layer, so that learning rates may be vectors."""

    def oracle(s: Setting) -> Tensor:
        hyperparameters = one_bit.Hyperparameters(rate=s.rates[0], decay=s.decay)  # type: ignore[arg-type]
        code = one_bit.signs(block)
        run = one_bit.OneBit([sum(SIZES)], hyperparameters, warmup, one_bit.TwoStages(code, code), adam=True)
        return _repeated(run.run(s.problem.gradient, s.start, s.steps)[-1], s)

    return oracle


def zero_one_adam(block: int, averages: set[int], agrees: set[int]) -> Oracle:
    """0/1 Adam with its two sets of steps."""

    def oracle(s: Setting) -> Tensor:
        hyperparameters, code = one_bit.Hyperparameters(decay=s.decay), one_bit.signs(block)
        agree = one_bit.TwoStages(code, code)
        run = one_bit.ZeroOne(SIZES, hyperparameters, frozenset(averages), frozenset(agrees), agree, s.rates)  # type: ignore[arg-type]
        return run.run(s.problem.gradient, s.start)[-1]

    return oracle


def backup_workers(s: Setting) -> Tensor:
    """One process that is told the members of every step."""
    model = s.problem.model()
    optimizer = s.make_optimizer(model)
    rates = iter(s.plain_rates)

    def before_step(*_: object) -> None:
        rate = next(rates)
        for group, factor in zip(optimizer.param_groups, s.factors, strict=True):
            group["lr"] = rate * factor

    optimizer.register_step_pre_hook(before_step)
    return _repeated(backup.backup_workers(model, optimizer, s.loss, s.log), s)


# -- methods whose workers do not wait for each other: in an order that is given ---------------------------------------


def pairs_in_order(strategy: ADPSGD) -> Callable[[Setting], Tensor]:
    """AD-PSGD by one thread, which takes the workers' steps in turn, and their parameters with what is in flight."""

    def real(s: Setting) -> Tensor:
        workers = replicas(strategy, s.start)
        for rank in _in_turn(s):
            r = workers[rank]
            end_step(strategy, r, s.case.rate * _own_gradient(s, rank, r.x, r.step))
        answers = [None if (work := r.inflight.get("answer")) is None else work.wait()[0] for r in workers]
        return torch.stack([
            r.state["published"] + (r.x - r.state["snapshot"]) if "published" in r.state
            else r.x if answer is None else r.x + answer
            for r, answer in zip(workers, answers, strict=True)
        ])  # fmt: skip

    return real


def pairs(strategy: ADPSGD) -> Oracle:
    """AD-PSGD, event by event."""

    def oracle(s: Setting) -> Tensor:
        def partner(rank: int, step: int) -> int:
            return strategy.topology.peers(rank, s.size, step).dst[0]

        def gradient(rank: int, x: Tensor, step: int) -> Tensor:
            return _own_gradient(s, rank, x, step)

        return asynchronous.pair_averages(gradient, s.start, s.case.rate, _in_turn(s), partner)

    return oracle


def server_in_order(strategy: ParameterServer) -> Callable[[Setting], Tensor]:
    """A parameter server whose workers take their steps in an order that is drawn; the gradients are of a bowl."""

    def real(s: Setting) -> Tensor:
        found = run_in_order(strategy, _drawn_order(s), s.size, lambda rank, x: x - rank, s.case.rate)
        return torch.stack([x for x, _ in found])

    return real


def server(s: Setting) -> Tensor:
    """The same, event by event."""
    begun = torch.zeros(5, dtype=torch.float64)
    x, _ = backup.async_sgd(lambda rank, at: at - rank, begun, s.case.rate, _drawn_order(s))
    return _repeated(x, s)


def _in_turn(s: Setting) -> list[int]:
    return [rank for _ in range(s.steps) for rank in range(s.size)]


def _drawn_order(s: Setting) -> list[int]:
    draw = random.Random(s.size)
    return [draw.randrange(s.size) for _ in range(s.size * s.steps)]


def _own_gradient(s: Setting, rank: int, x: Tensor, step: int) -> Tensor:
    return s.problem.gradient(x.expand(s.size, -1), step)[rank]


def _repeated(x: Tensor, s: Setting) -> Tensor:
    return x.expand(s.size, -1)
