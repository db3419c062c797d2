# SPDX-License-Identifier: Apache-2.0
"""Metrics that strategies record while they train: from the wire to the report."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

from tests.engine import attach, batches, steps
from tests.lab.report.samples import write_run
from tests.lab.report.test_page import Page
from tests.rules import for_each
from thinwire import (
    Comm,
    DecentLaM,
    DoubleAveraging,
    EagerPushSum,
    ExactDiffusion,
    Gossip,
    Local,
    PushSum,
    QuasiGlobal,
    Strategy,
    run_threads,
)
from thinwire.core.replica.replica import Replica
from thinwire.lab.report.page import write
from thinwire.lab.report.runs import Step
from thinwire.lab.runs.engine import ThinwireEngine
from thinwire.lab.runs.folder import RunFolder
from thinwire.lab.runs.measure import share


def test_the_distance_to_the_mean_is_estimated_from_what_a_neighbour_sends():
    draw = torch.Generator().manual_seed(0)
    workers = 3 + 0.5 * torch.randn(8, 200_000, generator=draw)
    truth = (workers - workers.mean(0)).norm(dim=1).mean() * math.sqrt(8 / 7)

    def work(comm: Comm) -> float:
        r = Replica(workers[comm.rank], torch.empty(0), comm, lr=lambda: 0.1)
        r.record_distance(r.x, [workers[(comm.rank + 1) % 8], workers[(comm.rank + 3) % 8]])
        return float(r.metrics["consensus_distance"])

    assert run_threads(8, work) == pytest.approx([float(truth)] * 8, rel=0.02)


def test_a_worker_without_neighbours_records_nothing():
    def work(comm: Comm) -> dict[str, object]:
        r = Replica(torch.ones(3), torch.empty(0), comm, lr=lambda: 0.1)
        r.record_distance(r.x, [])
        return dict(r.metrics)

    assert run_threads(1, work) == [{}]


def test_metrics_are_read_and_not_cleared_but_a_run_records_each_once():
    def work(comm: Comm) -> list[dict[str, float]]:
        worker = attach(comm, Local())
        worker.replicas[0].metrics["consensus_distance"] = torch.tensor(2.0)
        engine = ThinwireEngine(worker, worker.optimizer)
        return [worker.metrics(), worker.metrics(), engine.metrics(), engine.metrics()]

    distance = {"consensus_distance": 2.0}
    assert run_threads(1, work) == [[distance, distance, distance, {}]]


def test_metrics_are_means_over_the_workers_that_recorded_them():
    def work(comm: Comm) -> list[Step]:
        mine = [
            Step(1, 1.0, 2.0, 3.0, 4.0, 5.0, {"a": float(comm.rank)} if comm.rank else {}),
            Step(2, 2.0, 2.0, 3.0, 4.0, 5.0, {"b": 7.0}),
            Step(3, 3.0, 2.0, 3.0, 4.0, 5.0),
        ]
        return share(comm, mine, torch.device("cpu"))[0]

    for records in run_threads(3, work):
        assert [record.metrics for record in records] == [{"a": 1.5}, {"b": 7.0}, {}]
        assert "metrics" not in records[2].line()


@pytest.mark.slow
def test_metrics_survive_a_rewind_and_are_drawn(tmp_path: Path):
    write_run(tmp_path, steps=60)
    (tmp_path / "timeline.jsonl").unlink()
    rows = [json.loads(row) for row in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if "loss" in row and row["step"] % 2 == 0:
            row["metrics"] = {"consensus_distance": 100.0 / row["step"]}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    written = write(tmp_path)
    assert (tmp_path / "plots" / "metrics-consensus-distance.png") in written.plots
    assert "Consensus distance" in written.report.read_text()
    kept = RunFolder(tmp_path).rewind(40)
    assert kept[39].metrics == {"consensus_distance": 2.5}
    assert kept[38].metrics == {}


HOSTILE = [
    '"><script>alert(1)</script>',
    "x' onload='alert(1)",
    "../../outside",
    r"back\1slash\g<0>",
    "two $x$ and $\\frac$ dollars",
    "a b",
    "a_b",
]


@pytest.mark.slow
def test_a_metric_s_name_is_never_markup_nor_a_path(tmp_path: Path):
    folder = tmp_path / "a" / "b" / "run"
    write_run(folder, steps=20)
    rows = [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if "loss" in row:
            row["metrics"] = dict.fromkeys(HOSTILE, 1.0 + row["step"])
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    written = write(folder)
    page = Page(written.report.read_text())
    assert "script" not in {tag for tag, _ in page.tags}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    assert all(re.fullmatch(r"[\w.-]+", each) for each in ids)
    plots = [path for path in written.plots if path.name.startswith("metrics-")]
    assert len({*plots}) == len(HOSTILE)
    assert all(path.parent == folder / "plots" and path.exists() for path in plots)


@for_each(
    [
        *(Gossip(), Gossip(order="after"), DecentLaM(), QuasiGlobal(), DoubleAveraging(), ExactDiffusion()),
        *(PushSum(), PushSum(staleness=1), EagerPushSum(staleness=0)),
    ]
)
def test_gossip_strategies_record_the_consensus_distance(strategy: Strategy):
    def work(comm: Comm) -> list[float]:
        worker = attach(comm, strategy, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05))
        seen: list[float] = []
        for x, y in batches(comm.rank, 4):
            steps(worker, [(x, y)])
            seen.append(worker.metrics().get("consensus_distance", math.nan))
        return seen

    for seen in run_threads(3, work):
        assert all(distance > 0 for distance in seen[1:])
        assert max(seen[1:]) < 1.0
