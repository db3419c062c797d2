# SPDX-License-Identifier: Apache-2.0
"""`thinwire topology`: which worker sends to which on a graph, and how fast it mixes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.cli.console import Output, out, print_json
from thinwire.core.validation import check_ranges
from thinwire.errors import ConfigError
from thinwire.planning.units import digits

if TYPE_CHECKING:
    from thinwire.lab.report.picture import Picture
    from thinwire.methods.topology.analysis import Facts
    from thinwire.methods.topology.base import Topology as Graph

# Longer lists of steps, or of messages in a step, are cut short.
_MOST_STEPS = 8
_MOST_EDGES = 16
# What strategies make of larger graphs takes longer than anyone waits.
_MOST_WORKERS = 128
# Columns of the table where the output is not a terminal.
_WIDE = 150
_CURVE_STEPS = 40


@dataclass(frozen=True)
class Topology:
    """Show which worker sends to which on a graph, and how fast averaging on it converges.

    Example: thinwire topology "PPeerExponential(degree=2)" --workers 12

    Without a name, all graphs are compared in a table.

    Args:
        name: the graph, such as Ring or "Hierarchical(node_size=8)"; all of them unless given.
        workers: how many workers the graph joins.
        out: a PNG file to draw into: the graph at each step, or without a name the convergence of all graphs.
        json: print everything as JSON.
    """

    name: str | None = None
    _: KW_ONLY
    workers: int = 8
    out: Path | None = None
    json: bool = False

    def __call__(self) -> int:
        """Show one graph, or all; returns 0.

        Raises:
            ConfigError: a value that cannot be read.
        """
        check_ranges(self, workers=("1..", "8 is usual"))
        if self.out is not None and self.out.suffix.lower() != ".png":
            raise ConfigError(f"--out {self.out}: is drawn as a PNG. Give the file a name that ends in .png")
        if self.name is None:
            self._show_all()
        else:
            self._show_one(self.name)
        return 0

    def _show_one(self, name: str) -> None:
        from thinwire.methods.strategies.recipe import parse_topology
        from thinwire.methods.topology.analysis import facts, matrices
        from thinwire.methods.topology.base import check_edges, check_size
        from thinwire.registry import canonical

        graph = parse_topology(name)
        check_size(graph, self.workers, most_workers=_MOST_WORKERS)
        check_edges(graph, self.workers)
        found, refusals = facts(graph, self.workers), _refusals(graph, self.workers)
        if self.out is not None:
            from thinwire.lab.report.graph import graph_picture

            self._draw(graph_picture(self.out.stem, str(graph), matrices(graph, self.workers)))
        if self.json:
            described = {"topology": canonical(graph), "workers": self.workers, **asdict(found)}
            print_json({**described, "refused_by": refusals})
            return
        out.print(str(graph), style="bold")
        out.print(f"{self.workers} workers\n")
        for words, value in self._lines(found, refusals):
            out.print(f"  {words:<12}{value}")
        out.print("\nWho sends to whom", style="bold")
        for line in sketch(graph, self.workers):
            out.print(f"  {line}")

    def _show_all(self) -> None:
        from thinwire.methods.topology.analysis import disagreement, facts
        from thinwire.methods.topology.base import check_edges, check_size
        from thinwire.registry import canonical

        known: dict[Graph, Facts] = {}
        refused: dict[str, str] = {}
        for graph in _all_graphs():
            try:
                check_size(graph, self.workers, most_workers=_MOST_WORKERS)
                check_edges(graph, self.workers)
                known[graph] = facts(graph, self.workers)
            except ConfigError as error:
                refused[canonical(graph)] = str(error)
        if not known:
            raise ConfigError(next(iter(refused.values())))
        if self.out is not None:
            from thinwire.lab.report.graph import agreement_picture

            curves = {canonical(graph): disagreement(graph, self.workers, _CURVE_STEPS).tolist() for graph in known}
            self._draw(agreement_picture(self.out.stem, curves, self.workers))
        if self.json:
            rows = [{"topology": canonical(graph), **asdict(each)} for graph, each in known.items()]
            print_json({"workers": self.workers, "topologies": rows, "refused": refused})
            return
        self._tabulate({canonical(graph): each for graph, each in known.items()})
        for reason in refused.values():
            out.print(f"{reason}")

    def _lines(self, found: Facts, refusals: dict[str, str | None]) -> Iterator[tuple[str, str]]:
        """Yield what is known about one graph, as (name, words)."""
        yield "graph", "the same at every step" if found.static else f"changing, repeats after {found.period} steps"
        if found.doubly_stochastic:
            symmetry = "symmetric" if found.symmetric else "not symmetric"
            yield "weights", f"doubly stochastic, {symmetry}: keeps the plain average"
        else:
            yield "weights", "column-stochastic alone: only push-sum finds the plain average"
        if found.smallest_eigenvalue is not None:
            yield "eigenvalues", f"from {digits(found.smallest_eigenvalue)} to 1"

        reduced = 2 * (self.workers - 1) / self.workers
        mean, busiest, peak = found.vectors_per_step, found.busiest_vectors_per_step, found.most_vectors_at_once
        most = "" if peak == mean else f"; the busiest {digits(busiest)}, at most {peak} at once"
        yield "sent", f"{digits(mean)} vectors per worker and step{most}; an all-reduce sends {digits(reduced)}"

        left = digits(1 - found.spectral_gap)
        yield "gap", f"{digits(found.spectral_gap)}: in the long run, each step multiplies disagreement by {left}"
        exact = found.steps_to_average
        yield "average", f"exact after {exact} steps" if exact is not None else "approached, but never exact"
        yield "to 1e-3", f"{_steps(found.steps_to_a_thousandth)} steps until a thousandth of any disagreement is left"

        yield "serves", ", ".join(name for name, reason in refusals.items() if reason is None) or "no strategy"
        for reason in refusals.values():
            if reason is not None:
                yield "refused", reason

    def _tabulate(self, known: dict[str, Facts]) -> None:
        from rich.table import Table

        headings = ["weights", "period", "vectors a step", "busiest", "spectral gap", "exact", "to 1e-3"]
        rows: list[list[str]] = []
        for name, each in known.items():
            figures = [digits(each.vectors_per_step), digits(each.busiest_vectors_per_step)]
            mixing = [digits(each.spectral_gap), _steps(each.steps_to_average), _steps(each.steps_to_a_thousandth)]
            rows.append([name, _kind(each), str(each.period), *figures, *mixing])
        console = Output(width=None if out.is_terminal else _WIDE)
        columns = zip(["topology", *headings], *rows, strict=True)
        if sum(max(map(len, column)) + 3 for column in columns) >= console.width:
            # A narrower table would cut its figures.
            console.print(f"{self.workers} workers")
            for name, *values in rows:
                console.print(f"\n{name}", style="bold")
                for heading, value in zip(headings, values, strict=True):
                    console.print(f"  {heading:<16}{value}")
            return
        table = Table(title=f"{self.workers} workers", title_justify="left")
        table.add_column("topology", no_wrap=True)
        for heading in headings:
            table.add_column(heading, justify="left" if heading == "weights" else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)

    def _draw(self, picture: Picture) -> None:
        assert self.out is not None
        path = picture.png(self.out.parent)
        if not self.json:
            out.print(f"{path}\n")


def _all_graphs() -> list[Graph]:
    """Return every graph with its default arguments, except FromGraph, which by default has no edges."""
    from thinwire.methods.topology.base import Topology as Graph
    from thinwire.registry import recipe_classes

    return [kind() for name, kind in recipe_classes().items() if issubclass(kind, Graph) and name != "FromGraph"]


def _kind(found: Facts) -> str:
    """Return the kind of mixing matrix, in a few words."""
    if not found.doubly_stochastic:
        return "push-sum"
    return f"{'symmetric' if found.symmetric else 'directed'}, {'static' if found.static else 'changing'}"


def _steps(steps: int | None) -> str:
    return "-" if steps is None else f"{steps}"


def _refusals(graph: Graph, workers: int) -> dict[str, str | None]:
    """Return by the name of each strategy with a topology: why it refuses this one, or None where it accepts it."""
    from thinwire.registry import recipe_classes

    refusals: dict[str, str | None] = {}
    for name, kind in recipe_classes().items():
        if "topology" in {field.name for field in fields(kind)}:
            try:
                kind(topology=graph).check(workers)
                refusals[name] = None
            except ConfigError as error:
                refusals[name] = str(error)
    return refusals


def sketch(graph: Graph, workers: int) -> Iterator[str]:
    """Yield a line for each step of a period: 0->1 is a message from 0 to 1, 0--1 a message in each direction."""
    from thinwire.methods.topology.analysis import static

    period = 1 if static(graph, workers) else graph.period(workers)
    for step in range(min(period, _MOST_STEPS)):
        sent = {(rank, dst) for rank in range(workers) for dst in graph.peers(rank, workers, step).dst}
        edges = [f"{i}{'--' if (j, i) in sent else '->'}{j}" for i, j in sorted(sent) if i < j or (j, i) not in sent]
        more = f"  and {len(edges) - _MOST_EDGES} more" if len(edges) > _MOST_EDGES else ""
        name = "every step" if period == 1 else f"step {step}"
        yield f"{name:<12}{'  '.join(edges[:_MOST_EDGES]) or 'nobody'}{more}"
    if period > _MOST_STEPS:
        yield f"and {period - _MOST_STEPS} more steps"
