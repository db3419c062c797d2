# SPDX-License-Identifier: Apache-2.0
"""Those that race, and the figures of the rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BUDGET, EVALUATED_EVERY, AVERAGED, MOST = 240, 10, 3, 2
TUNING_STEPS, TUNING_EVALUATED_EVERY = 96, 24
AVERAGED_STEPS = 30
PAIRED_ROUNDS = 16
TUNING_SEED, SEEDS = 100, (0, 1, 2)
OUTER_RATES = (0.4, 0.7, 1.0)
WARM_STEPS, FEWEST_STEPS = 5, 30
FEW_WARM_STEPS, FEW_STEPS, FEW_BLOCK = 2, 8, 2
LINKS = ("100mbit", "20mbit", "1gbit", "none", "100mbit+50ms")
# Curves, and so seconds to the target, are of the first number of workers; with the other one only steps are timed.
SIZES = (4, 8)


@dataclass(frozen=True)
class Work:
    """What is trained.

    Args:
        model: of the task.
        optimizer: of all racers that do not name their own.
        batch_size: of a worker and step.
        eval_limit: held-out examples of an evaluation.
        bytes: of the parameters in fp32.
        rates: tried for every racer, as multiples of the task's rate for that optimizer, whatever the racer's own is.
        places: links and numbers of workers.
        seeds: of those that are judged.
    """

    model: str
    optimizer: str
    batch_size: int
    eval_limit: int
    bytes: float
    rates: tuple[float, ...]
    places: tuple[tuple[str, int], ...]
    seeds: tuple[int, ...]


WORKS = {
    # The task's rate is for models of a sixth of this size or less; this one learns faster at a third of it, 1e-3.
    "text": Work(
        "6m",
        "adamw",
        2,
        64,
        25.92e6,
        (0.15, 0.3, 0.6),
        tuple((link, size) for size in SIZES for link in LINKS),
        SEEDS,
    ),
    "cifar10": Work("resnet20", "sgd", 64, 1024, 1.09e6, (0.5, 1.0, 2.0), (("100mbit", 4),), SEEDS[:1]),
}
"""By task; all figures of a race are among racers of one task."""
PLACES = tuple((task, *place) for task, work in WORKS.items() for place in work.places)
"""Where it is raced: task, link, workers."""


@dataclass(frozen=True)
class Racer:
    """One of those that race.

    Args:
        name: in tables and file names.
        recipe: with {outer} where an outer optimizer's rate goes.
        whose: "thinwire", "torch", or the library that it comes from.
        task: that it trains on.
        optimizer: if not that of the work.
        inner: of a racer with an outer rate, whose inner rate it takes.
        rates_of: the racer whose rates it takes.
        same_as: the racer whose rates and curves it takes, because it computes the same.
        headline: raced first, everywhere and with all seeds; others on one link with 4 workers and one seed.
        link: where those race that are not in the headline.
        library: that has an environment of its own, if it is not torch or thinwire.
        period: steps after which its communication repeats.
        dense: it sends all gradients, or a cast of them, at every step.
        dense_steps: it begins with so many steps that send all gradients, and take as long as those of `dense_as`.
        dense_as: another racer.
        timed: the recipe whose later steps are timed, if that begins with fewer of them.
    """

    name: str
    recipe: str
    whose: str = "thinwire"
    task: str = "text"
    optimizer: str | None = None
    inner: str | None = None
    rates_of: str | None = None
    same_as: str | None = None
    headline: bool = True
    link: str = LINKS[0]
    library: str | None = None
    period: int = 8
    dense: bool = False
    dense_steps: int = 0
    dense_as: str | None = None
    timed: str | None = None

    @property
    def work(self) -> Work:
        """What it trains."""
        return WORKS[self.task]

    @property
    def curve_of(self) -> Racer:
        """The racer whose curves are its own."""
        return self if self.same_as is None else named(self.same_as)

    @property
    def tuned_as(self) -> Racer:
        """The racer whose rates are its own."""
        own = self.curve_of
        return own if own.rates_of is None else named(own.rates_of)

    @property
    def outer(self) -> bool:
        """Whether it has an outer rate."""
        return "{outer}" in self.recipe

    @property
    def seeds(self) -> Sequence[int]:
        """Those that it races with."""
        return self.work.seeds if self.headline else SEEDS[:1]

    def races_at(self, link: str, workers: int) -> bool:
        """Whether it races there."""
        return self.headline or (link, workers) == (self.link, SIZES[0])


CODED = "ErrorFeedback(Nearest(bits=4))"
OUTER = "OuterOptimizer('SGD', lr={outer}, momentum=0.9, nesterov=True)"
LOCALS = {"text": Racer("Local", "Local()"), "cifar10": Racer("resnet-Local", "Local()", task="cifar10")}
"""By task, the step without communication."""
LATER_LOCAL = Racer("Local-later", "Local()", headline=False)
"""The same on a link in the hour of those that are not in the headline."""
# Of torch's PowerSGD the first ten steps send whole gradients; a form that has two such steps is timed.
_POWER = {"dense_steps": 10, "dense_as": "ddp"}
# In the order in which they are run.
RACERS = (
    Racer("ddp", "ddp", "torch", dense=True),
    Racer("powersgd-4", "ddp+powersgd(rank=4)", "torch", timed="ddp+powersgd(rank=4, start=2)", **_POWER),
    Racer("LocalSGD", "LocalSGD(period=8)"),
    Racer("post-local-sgd", "post-local-sgd(period=8)", "torch", rates_of="LocalSGD"),
    Racer("Overlap-4bit", f"OverlapLocalSGD(period=8, codec={CODED})"),
    Racer("DiLoCo-12-4bit", f"DiLoCo(period=12, codec={CODED}, outer={OUTER})", inner="LocalSGD", period=12),
    Racer(
        "DiLoCo-8-4bit",
        f"DiLoCo(period=8, delay=4, mixing=0.5, codec={CODED}, outer={OUTER})",
        inner="LocalSGD",
    ),
    Racer(
        "DiLoCo-4bit",
        f"DiLoCo(period=32, fragments=2, delay=8, mixing=0.5, codec={CODED}, outer={OUTER})",
        inner="LocalSGD-32",
        period=32,
    ),
    Racer(
        "torchft-streaming",
        "torchft-diloco(lr={outer}, fragments=2, delay=8, alpha=0.5)",
        "torchft",
        rates_of="DiLoCo-4bit",
        library="torchft",
        period=32,
    ),
    Racer("hivemind", "hivemind-averaging", "hivemind", rates_of="LocalSGD-32", library="hivemind", period=32),
    Racer("AllReduce", "AllReduce()", same_as="ddp", dense=True),
    # Those that follow have one seed, and race on one link.
    Racer("Overlap", "OverlapLocalSGD(period=8)", rates_of="Overlap-4bit", headline=False),
    Racer("accelerate", "accelerate-local-sgd", "Accelerate", same_as="LocalSGD", headline=False, library="accelerate"),
    Racer("torchft", "torchft-local-sgd", "torchft", same_as="LocalSGD", headline=False, library="torchft"),
    Racer("DiLoCo", f"DiLoCo(period=32, outer={OUTER})", inner="LocalSGD-32", headline=False, period=32),
    Racer(
        "torchft-diloco",
        "torchft-diloco(lr={outer})",
        "torchft",
        same_as="DiLoCo",
        headline=False,
        library="torchft",
        period=32,
    ),
    Racer("ddp-bf16", "ddp+bf16", "torch", rates_of="ddp", headline=False, dense=True),
    Racer(
        "powersgd-1", "ddp+powersgd(rank=1)", "torch", headline=False, timed="ddp+powersgd(rank=1, start=2)", **_POWER
    ),
    Racer(
        "powersgd-2", "ddp+powersgd(rank=2)", "torch", headline=False, timed="ddp+powersgd(rank=2, start=2)", **_POWER
    ),
    Racer(
        "fairscale-slowmo",
        "fairscale-slowmo",
        "fairscale",
        rates_of="LocalSGD",
        headline=False,
        library="fairscale",
        period=48,
    ),
    Racer(
        "fairscale-sgp", "fairscale-sgp", "fairscale", rates_of="ddp", headline=False, library="fairscale", dense=True
    ),
    Racer("PowerSGD", "AllReduce(codec=PowerSGD(rank=4))", headline=False),
    Racer("LocalSGD-4bit", f"LocalSGD(period=8, codec={CODED})", rates_of="LocalSGD", headline=False),
    Racer("Overlap-4bit-16", f"OverlapLocalSGD(period=16, codec={CODED})", headline=False, period=16),
    Racer(
        "SparseLoCo",
        "DiLoCo(period=32, outer=OuterOptimizer('SGD', lr={outer}), "
        "codec=ErrorFeedback(ChunkedTopK(kept=64, chunk=4096, bits=2), decay=0.95))",
        inner="LocalSGD-32",
        headline=False,
        period=32,
    ),
    Racer("PushSum", "PushSum()", headline=False, dense=True),
    # What `thinwire plan` recommended there: the one before messages counted that need the processor, and since.
    Racer("AllReduce-bf16", "AllReduce(codec=Bf16())", rates_of="ddp", headline=False, link="1gbit", dense=True),
    Racer("PushSum-stale", "PushSum(staleness=1)", rates_of="PushSum", headline=False, link="1gbit", dense=True),
    Racer(
        "OneBitAdam",
        "CompressedMomentum(warmup_steps=48)",
        optimizer="onebit-adam",
        headline=False,
        dense_steps=48,
        dense_as="AllReduce",
        timed="CompressedMomentum(warmup_steps=2)",
    ),
    Racer("LocalSGD-32", "LocalSGD(period=32)", headline=False, period=32),
    Racer("SlowMo", "SlowMo(period=32, momentum=0.4, lr={outer})", inner="LocalSGD-32", headline=False, period=32),
    Racer("resnet-ddp", "ddp", "torch", task="cifar10", dense=True),
    Racer(
        "resnet-powersgd-4",
        "ddp+powersgd(rank=4)",
        "torch",
        task="cifar10",
        dense_steps=10,
        dense_as="resnet-ddp",
        timed="ddp+powersgd(rank=4, start=2)",
    ),
    Racer("resnet-Overlap-4bit", f"OverlapLocalSGD(period=8, codec={CODED})", task="cifar10"),
    Racer("resnet-post-local-sgd", "post-local-sgd(period=8)", "torch", task="cifar10"),
    Racer("resnet-PowerSGD", "AllReduce(codec=PowerSGD(rank=4))", task="cifar10"),
    Racer("resnet-AllReduce", "AllReduce()", same_as="resnet-ddp", task="cifar10", headline=False, dense=True),
)


def named(name: str) -> Racer:
    """The racer of that name."""
    return next(racer for racer in (*LOCALS.values(), LATER_LOCAL, *RACERS) if racer.name == name)


def of_task(task: str) -> list[Racer]:
    """Those that train on it."""
    return [racer for racer in RACERS if racer.task == task]


def ddp_of(task: str) -> Racer:
    """The one whose losses are the target."""
    return of_task(task)[0]
