# SPDX-License-Identifier: Apache-2.0
"""Every strategy on networks and with faults that are drawn from a seed, and what must hold in every run.

python -m tests.planning.simulate.faults --seeds 300            # all strategies; prints what fails, and the counts
python -m tests.planning.simulate.faults --first 17 --seeds 1 --only "PushSum()"   # one run once more
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random

import torch
from torch import Tensor, nn

import thinwire
from tests.battery.cases import STRATEGIES
from tests.battery.runs import Case, Setting, begin, go_on
from tests.planning.simulate.helpers import setting_of
from tests.problems import flat
from thinwire import ADPSGD, BackupWorkers, EagerPushSum, Gossip, PushSum, Strategy, Worker
from thinwire.asynchronous.quorum.log import memberships
from thinwire.errors import CommError, CommTimeoutError, PeerLostError
from thinwire.planning.simulate import Death, Duration, Network, Pair, Pause, Racks, SimulatedComm, Special, simulate

STEPS = 6
# Beside the table's: forms that depend on the order in which messages arrive.
MORE = (EagerPushSum(staleness=2), BackupWorkers(backups=1))
CASES = [
    *(each for each in STRATEGIES if each.strategy not in MORE),
    *(replace(next(each for each in STRATEGIES if type(each.strategy) is type(s)), strategy=s) for s in MORE),
]
MEAN_PRESERVING = (Gossip, PushSum, EagerPushSum, ADPSGD)


@dataclass
class Seen:
    """What was seen in runs.

    Attributes:
        events: how often: "runs", "late drop", "stale message", "dead peer", "silent death", "pause", "late message".
        wrong: what did not hold, in words.
    """

    events: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])


def drawn_network(random: Random, size: int) -> Network:
    """Rates, latencies and faults."""
    scale = 10 ** random.uniform(-3, -1)  # of a step, in seconds
    compute = random.choice(
        [
            Duration("constant", scale),
            Duration("uniform", scale / 2, 2 * scale),
            Duration("exponential", scale),
            Duration("pareto", scale / 2, 1.5),
        ]
    )
    ranks = range(size)
    pauses = [Pause(random.choice(ranks), random.uniform(0, 6 * scale), random.uniform(0, 9 * scale)) for _ in ranks]
    return Network(
        bits_per_second=10 ** random.uniform(5, 9),
        latency=random.choice([0.0, 1e-4, 1e-2]),
        compute=compute,
        racks=random.choice([None, Racks(2, bits_per_second=1e6, latency=1e-3)]),
        specials=(Special((random.choice(ranks),), slowdown=random.choice([1.0, 3.0, 20.0]), latency=1e-3),),
        pairs=(Pair((0, 1), bits_per_second=1e5, latency=2e-2),) if random.random() < 0.3 else (),
        delayed=random.choice([0.0, 0.1, 0.5]),
        delay=Duration("exponential", 3 * scale),
        overtaking=random.random() < 0.5,
        pauses=tuple(pauses[: random.randrange(size)]),
        deaths=tuple(drawn_deaths(random, size, scale)),
    )


def drawn_deaths(random: Random, size: int, scale: float) -> Iterator[Death]:
    """At most one, in every third run."""
    if random.random() < 0.33:
        rank, silent = random.randrange(size), random.random() < 0.3
        if random.random() < 0.5:
            yield Death(rank, step=random.randrange(STEPS), silent=silent)
        else:
            yield Death(rank, at=random.uniform(0, 2 * STEPS * scale), silent=silent)


def try_seed(each: Case, seed: int, seen: Seen) -> None:
    """One run of one case, and what must hold after it."""
    random = Random(f"{each}/{seed}")
    sizes = [size for size in (2, 3, 4, 5) if size not in each.refuses]
    size = random.choice(sizes if not isinstance(each.strategy, BackupWorkers) else [3, 4, 5])
    network = drawn_network(random, size)
    setting = replace(setting_of(each, size), steps=STEPS, case=replace(each, lockstep=False))
    where = f"{each}, seed {seed}, {size} workers"

    def wrong(words: str) -> None:
        seen.wrong.append(f"{where}: {words}")

    seen.events["runs"] += 1
    seen.events["pause"] += bool(network.pauses)
    try:
        ended = simulate(size, lambda comm: work(comm, setting, seen, wrong), network=network, seed=seed, timeout=1e4)
    except CommError as error:  # a deadlock
        wrong(str(error))
        return
    seen.events["late message"] += ended.record.late_messages
    agreed = [result for result in ended.results if result is not None]
    if ended.died:
        check_death(network, ended.failures, seen, wrong)
        seen.events["survivor"] += len(agreed)
        # Other methods end with the loss; some of their workers may have finished before it.
        if isinstance(each.strategy, BackupWorkers) and any(not torch.equal(x, agreed[0]) for x in agreed[1:]):
            wrong("survivors end with different parameters")
        return
    if ended.failures:
        wrong(f"nobody has died, and {next(iter(ended.failures.values()))!r}")
        return
    if any(not torch.equal(each, agreed[0]) for each in agreed[1:]):
        wrong("the consensus differs between ranks")


def work(comm: SimulatedComm, setting: Setting, seen: Seen, wrong: object) -> Tensor:
    """A training run whose steps are looked at; returns the consensus."""
    strategy, say = setting.case.strategy, wrong
    assert callable(say)
    worker = begin(comm, setting)
    comm.compute()

    def look(worker: Worker) -> None:
        r = worker.replicas[0]
        if strategy.traits.averages_at(worker.step) and not strategy.traits.skips_steps:
            rows = comm.all_gather(r.x.clone()).wait()
            if any(not torch.equal(row, rows[0]) for row in rows):
                say(f"replicas differ after step {worker.step}, where all go on from one average")
        age = float(worker.metrics().get("message_age_steps", 0.0))
        seen.events["stale message"] += age > 0
        if isinstance(strategy, EagerPushSum) and age > strategy.staleness:
            say(f"a message of {age:g} steps: the bound is {strategy.staleness}")
        comm.compute()

    go_on(worker, setting, after_step=look)
    members = list(memberships(worker.replicas[0]))
    seen.events["late drop"] += sum(len(each) < comm.size for each in members)
    if not flat(worker.model).isfinite().all():
        say("parameters are not finite")
    with worker.consensus() as model:
        agreed = flat(model)
    worker.detach()
    return agreed


def check_death(network: Network, failures: dict[int, BaseException], seen: Seen, wrong: object) -> None:
    """Whoever could not go on without the dead worker says its name."""
    assert callable(wrong)
    dead = network.deaths[0]
    seen.events["silent death" if dead.silent else "dead peer"] += bool(failures)
    for rank, error in failures.items():
        if not isinstance(error, PeerLostError | CommTimeoutError):
            wrong(f"rank {dead.rank} has died, and rank {rank} ends with {error!r}")
        # After a silent loss a rank that waits for messages names the one that it waits for, which may wait itself.
        elif not (
            re.search(rf"\branks? [0-9, rank]*\b{dead.rank}\b", str(error))
            or (dead.silent and " waited " in str(error))
        ):
            wrong(f"rank {dead.rank} has died, and rank {rank} says: {error}")


# -- what an average over workers is: mass is neither made nor lost ----------------------------------------------------


def try_mass(strategy: Strategy, seed: int, seen: Seen) -> None:
    """With constant gradients the mean over workers, messages in flight included, is known."""
    random = Random(f"mass/{strategy}/{seed}")
    size = random.choice([2, 4, 6])
    network = replace(drawn_network(random, size), deaths=())
    steps = random.randrange(1, 9)

    def train(comm: SimulatedComm) -> Tensor:
        model = nn.ParameterList([torch.zeros(3, dtype=torch.float64)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        worker = thinwire.attach(model, optimizer, strategy, comm=comm)
        for _ in range(steps):
            comm.compute()
            model[0].grad = torch.full_like(model[0], comm.rank)
            optimizer.step()
        with worker.consensus() as agreed:
            found = flat(agreed)
        worker.detach()
        return found

    ended = simulate(size, train, network=network, seed=seed)
    seen.events["runs"] += 1
    expected = -0.5 * steps * (size - 1) / 2
    for rank, found in enumerate(ended.results):
        if found is None or (found - expected).abs().max() > 1e-9:
            seen.wrong.append(f"{strategy}, mass, seed {seed}, rank {rank}: {found}, not {expected}")


PRESERVING: list[Strategy] = [
    *dict.fromkeys(each.strategy for each in CASES if type(each.strategy) in MEAN_PRESERVING),
]


def main() -> int:
    """Try seeds of all strategies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    seen = Seen()
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        for each in CASES:
            if arguments.only in str(each):
                try_seed(each, seed, seen)
        for strategy in PRESERVING:
            if arguments.only in str(strategy):
                try_mass(strategy, seed, seen)
        for words in seen.wrong:
            sys.stdout.write(f"{words}\n")
        seen.events["wrong"] += len(seen.wrong)
        seen.wrong.clear()
        if seed % 10 == 9:
            sys.stdout.write(f"seed {seed}: {dict(seen.events)}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{dict(seen.events)}\n")
    return int(seen.events["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
