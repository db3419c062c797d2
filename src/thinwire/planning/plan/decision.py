# SPDX-License-Identifier: Apache-2.0
"""The whole plan for a job: the recipes by their time to the loss, the choice, its reason, and what would change it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from math import inf, isfinite
from typing import Any

from thinwire.planning.plan.candidates import CANDIDATES, DENSE, Accuracy
from thinwire.planning.plan.late import recommend
from thinwire.planning.plan.network_words import rates_differ
from thinwire.planning.plan.search import (
    FASTEST,
    NEARLY,
    SLOWEST,
    Crossing,
    Job,
    Option,
    Planner,
    choose,
    within_noise,
    words_of_rate,
)
from thinwire.planning.plan.timings import Timings
from thinwire.planning.simulate import Network, Pair, Racks, Special
from thinwire.planning.units import digits, nbytes, rate, seconds


@dataclass(frozen=True)
class Decision:
    """The result of `decide`.

    Attributes:
        planner: made the predictions; its `job` is what was planned for.
        options: every recipe with its prediction, best first; those that cannot serve last.
        chosen: the recommended one.
        crossings: the link rates at which another recipe would be chosen.
        late: a quorum and a grace window for workers of unequal speeds; None if all have one speed.
    """

    planner: Planner
    options: list[Option]
    chosen: Option
    crossings: list[Crossing]
    late: dict[str, float] | None

    @property
    def why(self) -> str:
        """Why it was chosen, in a few sentences."""
        return why(self.options, self.chosen)

    @property
    def changes(self) -> str:
        """Return what would change the choice, in one sentence."""
        return _changes(self.crossings, self.planner.job.network)

    @property
    def timings(self) -> str:
        """Where the timings come from, in one sentence; empty if nothing was timed."""
        return "" if self.planner.timings.oldest is None else _timings_in_words(self.planner.timings)

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON can have it: None stands for infinity and for what is not known."""
        network, planner = self.planner.job.network, self.planner
        return {
            "workers": planner.job.workers,
            "bits_per_second": network.bits_per_second,
            "latency": network.latency,
            "contention": network.contention,
            "racks": network.racks and _finite(network.racks),
            "workers_that_differ": [_finite(each) for each in network.specials],
            "links_that_differ": [_finite(each) for each in network.pairs],
            "recommended": self.chosen.recipe,
            "why": self.why,
            "within_noise": [each.recipe for each in within_noise(self.options) if each is not self.chosen],
            "crossings": [asdict(each) for each in self.crossings],
            "timings": _timings_as_json(planner.timings),
            "accuracy": {"provenance": planner.table.provenance, "command": planner.table.command},
            "options": [_fields(each) for each in self.options],
            "late": self.late,
        }


def decide(
    job: Job,
    recipes: Sequence[str] = CANDIDATES,
    *,
    timings: Timings | None = None,
    tell: Callable[[str], None] = lambda part: None,
    expect: Callable[[int | None], None] = lambda parts: None,
) -> Decision:
    """Simulate recipes for a job and choose the one that needs the least time to the loss of AllReduce().

    Args:
        job: the parameters, the workers, the network and the time of a training step.
        recipes: candidates, as text.
        timings: keeps what is timed on this machine for later plans; in memory unless given.
        tell: called with each part that begins.
        expect: called with the number of parts that follow, or None where it is not known.

    Example:
        >>> from thinwire.planning.plan.predict import ModelTime
        >>> job = Job([(1000, 1000)], 2, Network(1e6, 1e-3), ModelTime(0.01, 0.02))
        >>> decide(job, ["AllReduce()", "AllReduce(codec=Bf16())"]).chosen.recipe
        'AllReduce(codec=Bf16())'
    """
    planner = Planner(job, recipes, tell=tell, timings=timings or Timings())
    expect(len(recipes))
    options = planner.options()
    chosen = choose(options)
    expect(None)
    tell("what would change the choice")
    return Decision(planner, options, chosen, planner.crossings(options), late_merging(job.network, job.workers))


def late_merging(network: Network, workers: int) -> dict[str, float] | None:
    """Recommend when rounds of unequal workers close; None if all have one speed."""
    slowdowns = network.slowdowns(workers)
    if len(set(slowdowns)) == 1:
        return None
    (quorum, deviations), late, waiting = recommend([each / min(slowdowns) for each in slowdowns])
    return {
        "quorum": quorum,
        "deviations": deviations,
        "goodput": late.goodput,
        "goodput_of_waiting": waiting.goodput,
    }


def _timings_as_json(timings: Timings) -> dict[str, Any]:
    oldest = None if timings.oldest is None else datetime.fromtimestamp(timings.oldest).astimezone()
    return {
        "file": timings.path and str(timings.path),
        "kept": timings.kept,
        "measured": timings.measured,
        "oldest": oldest and oldest.isoformat(timespec="seconds"),
    }


def _timings_in_words(timings: Timings) -> str:
    assert timings.oldest is not None, "only called where something was timed"
    if not timings.kept:
        return f"All {timings.measured} timings were measured now, and are kept in {timings.path}."
    oldest = datetime.fromtimestamp(timings.oldest).strftime("%Y-%m-%d %H:%M")
    return (
        f"{timings.kept} timings of this machine were kept from earlier plans, the oldest from {oldest} "
        f"({timings.path}), and {timings.measured} were measured now; --measure-again measures all of them."
    )


def _finite(part: Racks | Special | Pair | Accuracy) -> dict[str, Any]:
    """Return a part of a plan for JSON, in which no number is infinite: None is no limit, or never."""
    return {name: None if value == inf else value for name, value in asdict(part).items()}


def _fields(option: Option) -> dict[str, Any]:
    found, accuracy = option.prediction, option.accuracy
    return {
        "recipe": option.recipe,
        "refused": option.refused,
        "seconds_per_step": found and found.seconds,
        "efficiency": found and found.efficiency,
        "exposed_seconds_per_step": found and found.exposed,
        "own_seconds_per_step": found and found.own_seconds,
        "payload_bytes_per_step": found and found.payload_bytes,
        "busiest_payload_bytes_per_step": found and found.busiest_bytes,
        "memory_bytes": found and found.memory_bytes,
        "relative_steps": accuracy and _finite(accuracy),
        "relative_seconds_to_loss": option.to_loss if isfinite(option.to_loss) else None,
    }


def why(options: list[Option], chosen: Option) -> str:
    """Say in a few sentences why an option was chosen."""
    dense = next((each for each in options if each.recipe == DENSE and each.prediction), None)
    found = chosen.prediction
    assert found is not None, "what is chosen can serve"
    if dense is None or dense.prediction is None:
        reason = f"It needs the least time to the loss: {seconds(found.seconds)} a step."
    elif chosen is dense:
        reason = (
            f"A step takes {seconds(found.seconds)}, of which {seconds(found.exposed)} are waits for the network. "
            "Nothing else would reach the loss clearly sooner, and nothing changes training less."
        )
    else:
        plain = dense.prediction
        reason = (
            f"AllReduce() would wait {seconds(plain.exposed)} in each step of {seconds(plain.seconds)}; this waits "
            f"{seconds(found.exposed)} of {seconds(found.seconds)}, sending {nbytes(found.payload_bytes)} instead of "
            f"{nbytes(plain.payload_bytes)}. With the steps that it needed where that was measured it reaches the loss "
            f"{digits(dense.to_loss / chosen.to_loss)} times as soon."
        )
    return reason + _noise(options, chosen) + _missed(options, chosen)


def _noise(options: list[Option], chosen: Option) -> str:
    """Name what is within noise of the best, and the rule by which one of them was chosen; "" if nothing else is."""
    others = [each.recipe for each in within_noise(options) if each is not chosen]
    if not others:
        return ""
    which = f"{', '.join(others)} {'is' if len(others) == 1 else 'are'} within noise of it"
    return f" {which} ({100 * (NEARLY - 1):.0f} % of the best); of these the one that changes training least is chosen."


def _missed(options: list[Option], chosen: Option) -> str:
    """Name the recipe that would be sooner where it reached the loss, and how often it did not; "" if there is none."""
    sooner = [
        (each.seconds * max(1.0, each.accuracy.most), each, each.accuracy)
        for each in options
        if each.accuracy is not None and 0 < each.accuracy.missed < each.accuracy.runs
    ]
    took, option, accuracy = min(sooner, key=lambda each: each[0], default=(inf, chosen, None))
    if accuracy is None or took * NEARLY > chosen.to_loss:
        return ""
    return (
        f" {option.recipe} may be sooner still, but it never reached the loss in {accuracy.missed} of {accuracy.runs} "
        "measured runs; thinwire compare shows whether it does on your task."
    )


def _changes(crossings: list[Crossing], network: Network) -> str:
    # Where links differ, one rate is not that of all.
    differ, usual = rates_differ(network), network.bits_per_second
    if not crossings and differ:
        between = f"{digits(min(1, SLOWEST / usual))} and {digits(max(1, FASTEST / usual))} times as fast"
        return f"Nothing would change that, were all links between {between}."
    if not crossings:
        return f"No link between {rate(SLOWEST)} and {rate(FASTEST)} would change that."
    words = {"slower": "below", "faster": "above"}
    each = [
        f"if all links were {digits(x.factor)} times as fast, {x.recipe}"
        if differ
        else f"{words[x.side]} {words_of_rate(x.bits_per_second)} {x.recipe}"
        for x in crossings
    ]
    return f"What would change that: {'; '.join(each)}."
