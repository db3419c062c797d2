"""`thinwire topology`: who sends to whom on a graph of workers, and how fast it agrees."""

from __future__ import annotations

import json as json_text
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import Positional

from thinwire.cli.console import out
from thinwire.errors import ConfigError
from thinwire.report.units import count, digits, nbytes, rate, seconds

if TYPE_CHECKING:
    from thinwire.report.picture import Picture
    from thinwire.topology import Topology as Graph
    from thinwire.topology.analysis import Facts

_BYTES_PER_PARAMETER = 4
_MOST_STEPS = 8
_MOST_EDGES = 16
_WIDE = 150
_CURVE_STEPS = 40


@dataclass(frozen=True)
class Topology:
    """Say who sends to whom on a graph of workers, how fast it agrees and what that costs; without a name, of all.

    Example: thinwire topology "PPeerExponential(degree=2)" --workers 12 --parameters 6.5e6 --link 100mbit

    Args:
        name: of the graph, such as Ring or "Hierarchical(node_size=8)".
        workers: how many.
        parameters: of the model, such as 6.5e6; traffic is then given in bytes too, in fp32.
        link: the workers' links, [RANK:]RATE[+DELAY], several by commas, such as 100mbit; the slowest rate counts.
        out: draw the graph's steps, or without a name how fast all graphs agree, into this PNG file.
        json: print everything as JSON.
    """

    name: Positional[str | None] = None
    workers: int = 8
    parameters: float | None = None
    link: str | None = None
    out: Path | None = None
    json: bool = False

    def __call__(self) -> int:
        """Show one graph, or all; returns 0."""
        self._check()
        if self.name is None:
            self._show_all()
        else:
            self._show_one(self.name)
        return 0

    def _check(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"--workers {self.workers}: must be at least 1")
        if self.parameters is not None and (self.parameters < 1 or self.parameters % 1):
            raise ConfigError(f"--parameters {self.parameters:g}: must be a whole number from 1, such as 6.5e6")
        if self.link is not None and self.parameters is None:
            raise ConfigError(f"--link {self.link}: seconds need bytes; say how many --parameters the model has")
        self._bits_per_second()
        if self.out is not None and self.out.suffix.lower() != ".png":
            raise ConfigError(f"--out {self.out}: is drawn as a PNG; give the file a name that ends in .png")

    def _show_one(self, name: str) -> None:
        from thinwire.strategies.recipe import brief, parse_topology
        from thinwire.topology.analysis import facts, matrices
        from thinwire.topology.base import check_edges

        graph = parse_topology(name)
        check_edges(graph, self.workers)
        found, strategies = facts(graph, self.workers), _strategies(graph, self.workers)
        if self.out is not None:
            from thinwire.report.graph import graph_picture

            self._draw(graph_picture(self.out.stem, brief(graph), matrices(graph, self.workers)))
        if self.json:
            described = {"topology": brief(graph), "workers": self.workers, **asdict(found), **self._cost(found)}
            out.print(json_text.dumps({**described, "refused_by": strategies}), markup=False)
            return
        out.print(str(graph), style="bold", markup=False)
        out.print(f"{self.workers} workers\n", markup=False)
        for words, value in (*_properties(found), *self._traffic(found), *_agreement(found), *_served(strategies)):
            out.print(f"  {words:<12}{value}", markup=False)
        out.print("\nWho sends to whom", style="bold")
        for line in sketch(graph, self.workers):
            out.print(f"  {line}", markup=False)

    def _show_all(self) -> None:
        from thinwire.strategies.recipe import brief
        from thinwire.topology.analysis import disagreement, facts
        from thinwire.topology.base import check_edges

        known: dict[Graph, Facts] = {}
        refused: dict[str, str] = {}
        for graph in _all_graphs():
            try:
                check_edges(graph, self.workers)
                known[graph] = facts(graph, self.workers)
            except ConfigError as error:
                refused[brief(graph)] = str(error)
        if self.out is not None:
            from thinwire.report.graph import agreement_picture

            curves = {brief(graph): disagreement(graph, self.workers, _CURVE_STEPS).tolist() for graph in known}
            self._draw(agreement_picture(self.out.stem, curves, self.workers))
        if self.json:
            rows = [{"topology": brief(graph), **asdict(each), **self._cost(each)} for graph, each in known.items()]
            out.print(json_text.dumps({"workers": self.workers, "topologies": rows, "refused": refused}), markup=False)
            return
        self._tabulate({brief(graph): each for graph, each in known.items()})
        for reason in refused.values():
            out.print(f"{reason}", markup=False)

    def _tabulate(self, known: dict[str, Facts]) -> None:
        from rich.console import Console
        from rich.table import Table

        costs = ["bytes a step"] * (self.parameters is not None) + ["transfer"] * (self.link is not None)
        table = Table(title=f"{self.workers} workers", title_justify="left")
        table.add_column("topology", no_wrap=True)
        for heading in ("weights", "period", "vectors a step", "busiest", *costs, "spectral gap", "exact", "to 1e-3"):
            table.add_column(heading, justify="left" if heading == "weights" else "right")
        for name, each in known.items():
            cost = self._cost(each)
            sent = [nbytes(cost["bytes_per_step"])] if "bytes_per_step" in cost else []
            sent += [seconds(value) for key, value in cost.items() if key == "busiest_seconds_per_step"]
            table.add_row(
                name,
                _kind(each),
                str(each.period),
                digits(each.vectors_per_step),
                digits(each.busiest_vectors_per_step),
                *sent,
                digits(each.spectral_gap),
                _steps(each.steps_to_average),
                _steps(each.steps_to_a_thousandth),
            )
        Console(highlight=False, width=None if out.is_terminal else _WIDE).print(table)

    def _draw(self, picture: Picture) -> None:
        assert self.out is not None
        path = picture.png(self.out.parent)
        if not self.json:
            out.print(f"{path}\n", markup=False)

    def _cost(self, found: Facts) -> dict[str, float]:
        """Bytes and seconds of a step, as far as they were asked for."""
        if self.parameters is None:
            return {}
        vector = self.parameters * _BYTES_PER_PARAMETER
        cost = {
            "bytes_per_step": found.vectors_per_step * vector,
            "busiest_bytes_per_step": found.busiest_vectors_per_step * vector,
        }
        speed = self._bits_per_second()
        if speed is not None:
            cost |= {"busiest_seconds_per_step": 8 * cost["busiest_bytes_per_step"] / speed}
        return cost

    def _bits_per_second(self) -> float | None:
        """The slowest of the links; None without a limit."""
        from thinwire.emulate import parse_links

        if self.link is None:
            return None
        rates = [link.bits_per_second for link in parse_links(self.link, self.workers)]
        return min((each for each in rates if each is not None), default=None)

    def _traffic(self, found: Facts) -> Iterator[tuple[str, str]]:
        reduced = 2 * (self.workers - 1) / self.workers
        mean, busiest, peak = found.vectors_per_step, found.busiest_vectors_per_step, found.most_vectors_at_once
        most = "" if peak == mean else f"; the busiest {digits(busiest)}, at most {peak} at once"
        yield "sent", f"{digits(mean)} vectors per worker and step{most}; an all-reduce sends {digits(reduced)}"
        cost, speed = self._cost(found), self._bits_per_second()
        if self.parameters is not None:
            size = f"{count(self.parameters)} parameters in fp32"
            yield "bytes", f"{nbytes(cost['bytes_per_step'])} per worker and step, with {size}"
        if speed is not None:
            yield rate(speed), f"{seconds(cost['busiest_seconds_per_step'])} of transfer a step for the busiest worker"


def _all_graphs() -> list[Graph]:
    """Every graph at its defaults, less the one that has no edges until somebody names them."""
    from thinwire import topology

    kinds: list[type[Any]] = [getattr(topology, name) for name in topology.__all__]
    return [kind() for kind in kinds if hasattr(kind, "__dataclass_fields__") and kind is not topology.FromGraph]


def _kind(found: Facts) -> str:
    """Weights and steps in a few words."""
    if not found.doubly_stochastic:
        return "push-sum"
    return f"{'symmetric' if found.symmetric else 'directed'}, {'static' if found.static else 'changing'}"


def _steps(steps: int | None) -> str:
    return "-" if steps is None else f"{steps}"


def _properties(found: Facts) -> Iterator[tuple[str, str]]:
    yield "graph", "the same at every step" if found.static else f"changing, repeats after {found.period} steps"
    if found.doubly_stochastic:
        weights = f"doubly stochastic, {'symmetric' if found.symmetric else 'not symmetric'}: keeps the plain average"
    else:
        weights = "column-stochastic alone: only push-sum finds the plain average"
    yield "weights", weights
    if found.smallest_eigenvalue is not None:
        yield "eigenvalues", f"from {digits(found.smallest_eigenvalue)} to 1"


def _agreement(found: Facts) -> Iterator[tuple[str, str]]:
    left = digits(1 - found.spectral_gap)
    yield "gap", f"{digits(found.spectral_gap)}: in the long run a step leaves {left} of what there was of differences"
    exact = found.steps_to_average
    yield "average", f"exact after {exact} steps" if exact is not None else "closer and closer, never exact"
    yield "to 1e-3", f"{_steps(found.steps_to_a_thousandth)} steps until a thousandth of any disagreement is left"


def _strategies(graph: Graph, workers: int) -> dict[str, str | None]:
    """By strategy with a topology, why it refuses this one; None where it accepts it."""
    from thinwire.strategies.recipe import WORDS

    kinds = {name: kind for name, kind in WORDS.items() if "topology" in {field.name for field in fields(kind)}}
    return {name: _refusal(kind, graph, workers) for name, kind in kinds.items()}


def _refusal(kind: type, graph: Graph, workers: int) -> str | None:
    try:
        kind(topology=graph).check(workers)
    except ConfigError as error:
        return str(error)
    return None


def _served(strategies: dict[str, str | None]) -> Iterator[tuple[str, str]]:
    yield "serves", ", ".join(name for name, reason in strategies.items() if reason is None) or "no strategy"
    for reason in strategies.values():
        if reason is not None:
            yield "refused", reason


def sketch(graph: Graph, workers: int) -> Iterator[str]:
    """A line for each step of a period: 0->1 is a message, 0--1 one in either direction."""
    from thinwire.topology.analysis import static

    period = 1 if static(graph, workers) else graph.period(workers)
    for step in range(min(period, _MOST_STEPS)):
        sent = {(rank, dst) for rank in range(workers) for dst in graph.peers(rank, workers, step).dst}
        edges = [f"{i}{'--' if (j, i) in sent else '->'}{j}" for i, j in sorted(sent) if i < j or (j, i) not in sent]
        more = f"  and {len(edges) - _MOST_EDGES} more" if len(edges) > _MOST_EDGES else ""
        name = "every step" if period == 1 else f"step {step}"
        yield f"{name:<12}{'  '.join(edges[:_MOST_EDGES]) or 'nobody'}{more}"
    if period > _MOST_STEPS:
        yield f"and {period - _MOST_STEPS} more steps"
