# SPDX-License-Identifier: Apache-2.0
"""`thinwire topology`: facts, tables, drawings and refusals."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from tests.grids import fast_where
from tests.methods.topology.graphs import KEEPING
from thinwire import ConfigError, OnePeerExponential, Ring
from thinwire.cli import main
from thinwire.methods.strategies.recipe import parse_topology
from thinwire.methods.topology.analysis import facts, matrices

Capture = pytest.CaptureFixture[str]


def printed(capsys: Capture, *arguments: str) -> str:
    assert main(["topology", *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys: Capture, *arguments: str) -> str:
    """The error for arguments that cannot work: one message, no traceback, exit code 2."""
    assert main(["topology", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("thinwire:") == 1 and "Traceback" not in output.err
    return output.err


def picture_in(path: Path) -> np.ndarray:
    from matplotlib.image import imread  # for slow tests only

    return imread(path)


def test_a_graph_is_described_and_drawn_as_text(capsys: Capture) -> None:
    out = printed(capsys, "OnePeerExponential", "--workers", "4")
    assert "changing, repeats after 2 steps" in out
    assert "doubly stochastic, not symmetric" in out
    assert "1.00 vectors per worker and step; an all-reduce sends 1.50" in out
    assert "exact after 2 steps" in out
    assert "step 0      0->1  1->2  2->3  3->0" in out and "step 1      0--2  1--3" in out
    serves = out.partition("serves")[2].partition("\n")[0]
    assert "PushSum" in serves and "Gossip" in serves


def test_strategies_that_refuse_a_graph_give_the_reason(capsys: Capture) -> None:
    out = printed(capsys, "Star(weights='push-sum')", "--workers", "5")
    assert "column-stochastic alone: only push-sum finds the plain average" in out
    serves = out.partition("serves")[2].partition("\n")[0]
    assert "PushSum" in serves and "Gossip" not in serves
    assert "refused     Gossip" in out and "the weights are not doubly stochastic" in out
    assert "1.60 vectors per worker and step; the busiest 4.00, at most 4 at once" in out
    assert "every step  0--1  0--2  0--3  0--4" in out


def test_long_periods_and_many_edges_are_cut_short(capsys: Capture) -> None:
    out = printed(capsys, "RandomMatching(draws=11)", "--workers", "64")
    assert "and 16 more" in out and "step 7 " in out and "step 8 " not in out and "and 3 more steps" in out
    assert "nobody" in printed(capsys, "Ring", "--workers", "1")


def test_json_has_the_facts_of_the_analysis(capsys: Capture) -> None:
    found = json.loads(printed(capsys, "Ring", "--workers", "6", "--json"))
    assert {key: found[key] for key in vars(facts(Ring(), 6))} == vars(facts(Ring(), 6))
    assert (found["topology"], found["workers"], found["refused_by"]["Gossip"]) == ("Ring()", 6, None)
    found = json.loads(printed(capsys, "--workers", "6", "--json"))
    rows = {row["topology"]: row for row in found["topologies"]}
    assert rows["OnePeerExponential()"]["contraction"] == facts(OnePeerExponential(), 6).contraction
    assert list(found["refused"]) == ["Hierarchical()", "Hypercube()"]


def test_the_figures_of_the_documentation_are_those_of_the_graphs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "explanation" / "graphs.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+\(.*?\))` \| ([\d.]+) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == 14
    for name, vectors, cells in rows:
        graph = parse_topology(name)
        assert float(vectors) == pytest.approx(facts(graph, 16).vectors_per_step, abs=0.005)
        for n, cell in zip((8, 12, 16, 64), cells.split(" | "), strict=True):
            if cell == "none":
                with pytest.raises(ConfigError):
                    graph.check(n)
                continue
            found = facts(graph, n)
            assert int(cell.strip("*")) == found.steps_to_a_thousandth, (name, n)
            assert cell.startswith("**") == (found.steps_to_average == found.steps_to_a_thousandth), (name, n)


def test_all_graphs_are_listed_and_those_that_do_not_exist_with_the_reason(capsys: Capture) -> None:
    out = printed(capsys, "--workers", "7")
    for graph in {type(each).__name__ for each in KEEPING}:
        assert f"{graph}(" in out
    assert "Hypercube() with 7 workers: needs a power of two" in out
    assert "BipartiteExponential() with 7 workers: needs an even number" in out


DRAWN = ("Ring", "OnePeerExponential", "RandomMatching", "Complete", "Star('push-sum')", "BaseGraph(degree=3)")


@pytest.mark.parametrize(
    ("name", "workers"),
    # One step, several, and without an edge.
    fast_where(
        lambda each: each in (("Star('push-sum')", 11), ("OnePeerExponential", 11), ("Ring", 1)),
        product(DRAWN, (1, 11, 40)),
    ),
)
@pytest.mark.slow
def test_a_graph_is_drawn_step_by_step(capsys: Capture, tmp_path: Path, name: str, workers: int) -> None:
    path = tmp_path / "new" / "graph.png"
    out = printed(capsys, name, "--workers", str(workers), "--out", str(path))
    assert str(path) in out
    picture = picture_in(path)
    assert picture.shape[0] > 300 and picture.shape[1] > 300 and np.ptp(picture) > 0.5


@pytest.mark.slow
def test_agreement_of_all_graphs_is_drawn_in_one_picture(capsys: Capture, tmp_path: Path) -> None:
    printed(capsys, "--workers", "8", "--out", str(tmp_path / "all.png"), "--json")
    assert [path.name for path in tmp_path.iterdir()] == ["all.png"]
    assert picture_in(tmp_path / "all.png").shape[1] > 600


@pytest.mark.slow
def test_pictures_show_each_step_once_and_name_what_they_leave_out() -> None:
    from thinwire.lab.report.graph import graph_picture

    def panels(name: str, n: int) -> list[str]:
        picture = graph_picture("graph", name, matrices(parse_topology(name), n))
        return [axes.get_title() for axes in picture.figure.axes if axes.get_title()] + [picture.caption]

    assert panels("Ring()", 5)[0] == "every step" and len(panels("Ring()", 5)) == 2
    assert panels("OnePeerExponential()", 5)[:3] == ["step 0", "step 1", "step 2"]
    long = panels("RandomMatching()", 5)
    assert len(long) == 9 and long[-1].endswith("The first 8 of 32 steps.")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["Rings"], "topology 'Rings': 'Rings' is unknown; did you mean Ring, "),
        (["LocalSGD"], "is a LocalSGD, not a topology. Write it like Ring()"),
        (["PPeerExponential(degre=2)"], "has no 'degre'; did you mean degree?"),
        (["Ring("], "topology 'Ring('"),
        (["Hypercube", "--workers", "6"], "Use 4 or 8 workers"),
        (["BipartiteExponential", "--workers", "3"], "needs an even number"),
        (["FromGraph([(0, 1), (2, 3)])", "--workers", "4"], "no message travels from rank 0 to rank 2"),
        (["--workers", "0"], "--workers 0: must be at least 1"),
        (["Ring", "--out", "ring.jpg"], "Give the file a name that ends in .png"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_the_fix(capsys: Capture, arguments: list[str], words: str) -> None:
    assert words in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("graph", "workers", "words"),
    [
        ("Complete", "100000", "at most 128 workers"),
        ("Ring", "129", "at most 128 workers"),
        ("Ring", "9" * 20, "at most 128 workers"),
        ("Hierarchical(node_size=10**9)", "8", ""),
    ],
)
def test_graphs_that_would_take_minutes_are_refused_at_once(
    graph: str, workers: str, words: str, capsys: Capture
) -> None:
    assert words in refused(capsys, graph, "--workers", workers)


@pytest.mark.parametrize("width", [40, 60, 100, 200])
def test_on_a_narrow_terminal_no_figure_is_cut(width: int, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.cli.topology._WIDE", width)
    out = printed(capsys, "--workers", "8")
    assert "\u2026" not in out
    assert all(words in out for words in ("Ring()", "spectral gap", "OnePeerExponential()"))


def test_more_workers_than_any_graph_is_looked_at_with_are_refused_once(capsys: Capture) -> None:
    assert main(["topology", "--workers", "129"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("Use at most 128 workers") == 1
