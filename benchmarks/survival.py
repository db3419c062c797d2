# SPDX-License-Identifier: Apache-2.0
"""What the loss and the arrival of workers cost, as processes over an emulated link.

    python -m benchmarks.survival kills [--link 100mbit] [--recipe RECIPE ...] [--order 0,2,1]
    python -m benchmarks.survival join  [--link 100mbit] [--recipe RECIPE ...] [--waiting]

The rule, which was written before any run:

- The GPT of 6 M parameters on `text`, 4 sequences a worker and step, AdamW, a thread a worker, every worker in a
  network namespace of its own. The store is a process in another one, with a link of 1 Gbit.
- `kills`: four workers; one after the other gets SIGKILL, in the given order of ranks, at a random moment after it has
  taken `WARM` rounds in a view, until one is left. So the last kill is that of one of two workers.
- *Own length* is the median time of the steps of its kind (those that end a round, for a method with rounds) in the
  view before. The *delay* of a survivor is the time from the kill, or from the start of the step if that was later, to
  the end of the step or round in which it went over to the next view, less its own length. Told is the largest of all
  survivors. The bar is 2 s.
- `join`: workers train; one comes later. *Rate* is the bytes of its state over the time in which it received them, from
  when it could begin to wait, as a share of the link's; the bar is 0.8, with one worker that trains, so that nothing
  else uses the link. *Stall* is the longest time of a step of the others in the rounds around the view in which it came
  and of the round after, less the own length. With `--waiting` the state is sent as for methods without rounds, while
  all wait.

Each result is a line of JSON, and of benchmarks/results/survival/NAME.jsonl with `--save NAME`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from benchmarks import fleet
from thinwire.lab.emulate import Network, Workers, parse_links
from thinwire.lab.emulate.network import RENDEZVOUS_PORT, address

RECIPES = ("AllReduce()", "LocalSGD(period=8)", "SlowMo(period=8)", "DiLoCo(period=8)", "PushSum(staleness=1)")
WARM = 3
WORKERS = 4
MOST_SECONDS = 240.0


class Watched:
    """What the workers of a run have said so far."""

    def __init__(self, workers: Workers | None = None) -> None:
        self.workers = workers
        self.steps: dict[int, list[tuple[float, int]]] = {}
        self.views: dict[int, list[tuple[float, int, int]]] = {}
        self.received: list[dict[str, Any]] = []

    def read(self, rank: int, stream: str, line: str) -> None:
        """A line of a worker."""
        if not line.startswith("{"):
            if stream == "stderr" and ("Error" in line or line.startswith("view ")):
                print(f"rank {rank}: {line}", file=sys.stderr)
            return
        said = json.loads(line)
        if "step" in said:
            self.steps.setdefault(rank, []).append((said["at"], said["step"]))
        elif "view" in said:
            self.views.setdefault(rank, []).append((said["at"], said["view"], said["size"]))
        else:
            self.received.append(said)

    def until(self, enough: Callable[[], bool]) -> None:
        """Poll until then."""
        end = time.monotonic() + MOST_SECONDS
        assert self.workers is not None
        while not enough():
            if time.monotonic() > end or not self.workers.poll(0.05):
                raise SystemExit("the run ended, or took too long")

    def rounds(self, rank: int, since: float, period: int) -> int:
        """How many rounds, or steps without them, a worker has ended since then."""
        return sum(1 for at, step in self.steps.get(rank, []) if at > since and step % period == 0)

    def gaps(self, rank: int, period: int) -> list[tuple[float, float]]:
        """When each round's last step began and ended."""
        steps = self.steps[rank]
        return [(a, b) for (a, _), (b, step) in pairwise(steps) if step % period == 0]


def launch(
    what: Callable[[Watched], list[dict[str, Any]]], options: argparse.Namespace, recipe: str, size: int, more: int
) -> list[dict[str, Any]]:
    """Start a store, so many workers, and those that wait to join; returns what the parent made of it."""
    links = parse_links("1gbit", 1) + parse_links(options.link, size + more)
    arguments = ["--size", str(size), "--recipe", recipe, *(["--waiting"] if options.waiting else [])]
    command = [sys.executable, "-m", "benchmarks.survival", "worker", *arguments]
    watched = Watched()
    environment = {"THINWIRE_STORE": f"{address(0)}:{RENDEZVOUS_PORT}", "THINWIRE_WORKERS": str(size)}
    with (
        Network(links) as network,
        Workers(
            command, len(links), network=network, environment=environment, on_line=watched.read, survives=True
        ) as workers,
    ):
        watched.workers = workers
        try:
            return what(watched)
        finally:
            fleet.kill(workers.pids)
            workers.poll(2.0)


def period_of(recipe: str) -> int:
    """Steps in a round; 1 for methods without."""
    import thinwire

    return int(getattr(thinwire.parse(recipe), "period", 1))


def kills(options: argparse.Namespace, recipe: str) -> list[dict[str, Any]]:
    """Kill all workers but one, one after the other."""
    period, draw = period_of(recipe), random.Random(0)

    def once(watched: Watched, alive: list[int], victim: int, since: float) -> dict[str, Any]:
        watched.until(lambda: all(watched.rounds(rank, since, period) >= WARM for rank in alive))
        own = {rank: statistics.median(b - a for a, b in watched.gaps(rank, period) if a > since) for rank in alive}
        strikes = time.monotonic() + draw.random() * period * statistics.median(own.values())
        watched.until(lambda: time.monotonic() > strikes)
        assert watched.workers is not None
        killed = time.monotonic()
        os.kill(watched.workers.pids[victim], signal.SIGKILL)
        alive.remove(victim)
        watched.until(lambda: all(watched.rounds(rank, killed, period) >= 2 for rank in alive))
        delays: list[float] = []
        for rank in alive:
            changed = next(at for at, _, _ in watched.views[rank] if at > killed)
            begun, ended = next((a, b) for a, b in watched.gaps(rank, period) if b > changed)
            delays.append(ended - max(killed, begun) - own[rank])
        return {
            "what": "kill", "recipe": recipe, "link": options.link, "rank": victim - 1, "of": len(alive) + 1,
            "own_seconds": round(max(own[rank] for rank in alive), 3), "delay_seconds": round(max(delays), 3),
        }  # fmt: skip

    def body(watched: Watched) -> list[dict[str, Any]]:
        alive, rows, since = list(range(1, WORKERS + 1)), [], 0.0
        for victim in [int(each) + 1 for each in options.order.split(",")]:
            rows.append(once(watched, alive, victim, since))
            since = max(at for rank in alive for at, _, _ in watched.views[rank])
        return rows

    return launch(body, options, recipe, WORKERS, 0)


def join(options: argparse.Namespace, recipe: str) -> list[dict[str, Any]]:
    """One more comes to a run of one worker, and to one of three."""
    period = period_of(recipe)
    bits = parse_links(options.link, 1)[0].bits_per_second or float("inf")

    def body(watched: Watched) -> list[dict[str, Any]]:
        there = list(range(1, len(watched.workers.pids) - 1))  # type: ignore[union-attr]
        newcomer = there[-1] + 1
        watched.until(lambda: all(watched.rounds(rank, 0.0, period) >= WARM for rank in there))
        own = {rank: statistics.median(b - a for a, b in watched.gaps(rank, period)) for rank in there}
        asked = time.monotonic()
        os.kill(watched.workers.pids[newcomer], signal.SIGUSR1)  # type: ignore[union-attr]
        watched.until(lambda: watched.rounds(newcomer, 0.0, period) >= 1)
        came = watched.steps[newcomer][0][0]
        watched.until(lambda: all(watched.rounds(rank, came, period) >= 1 for rank in there))
        stall = max(b - a - own[rank] for rank in there for a, b in watched.gaps(rank, period) if b > asked)
        parts = [part for part in watched.received if part["nbytes"] > 1 << 20]
        nbytes = sum(part["nbytes"] for part in parts)
        seconds = sum(part["seconds"] for part in parts)
        row = {
            "what": "join", "recipe": recipe, "link": options.link, "workers": len(there), "waiting": options.waiting,
            "own_seconds": round(max(own.values()), 3), "stall_seconds": round(stall, 3), "nbytes": nbytes,
            "receiving_seconds": round(seconds, 3), "rate": round(8 * nbytes / max(seconds, 1e-9) / bits, 3),
            "rounds": max(watched.rounds(rank, asked, period) for rank in there),
        }  # fmt: skip
        return [row]

    return [row for size in options.sizes for row in launch(body, options, recipe, size, 1)]


def worker(options: argparse.Namespace) -> None:
    """Host the store, train, or wait to be told to join."""
    rank = int(os.environ["RANK"])
    if rank == 0:
        from thinwire.core.comm.rendezvous import host_store

        _store = host_store(address(0), RENDEZVOUS_PORT)  # lives as long as the object
        signal.pause()
    if rank > options.size:
        signal.signal(signal.SIGUSR1, lambda *_: None)
    import torch

    from thinwire import attach
    from thinwire.lab import tasks

    torch.set_num_threads(1)
    task = tasks.load("text")
    shard = task.shards(options.size + 1, split="iid", seed=0)[rank - 1]
    model = task.model("6m", seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if rank > options.size:
        signal.pause()
    os.environ["THINWIRE_RANK"] = str(min(rank - 1, options.size - 1))
    time_receiving(waiting=options.waiting)
    trained = attach(model, optimizer, options.recipe[0], elastic=True, timeout=60)
    trained.on_view(lambda view: fleet.tell(view=view.epoch, size=view.size))
    while True:
        batch = task.batch(shard, trained.step, batch_size=4, seed=0, rank=rank)
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
        fleet.tell(step=trained.step)


def time_receiving(*, waiting: bool) -> None:
    """Print how long this worker receives each part of a state."""
    from thinwire.elastic import handover, rounds

    if waiting:
        rounds.can_copy = lambda _: False

    receive = handover.receive

    def timed(comm: Any, src: int) -> Any:
        start = time.monotonic()
        content = receive(comm, src)
        print(json.dumps({"nbytes": content.numel(), "seconds": time.monotonic() - start}), flush=True)
        return content

    handover.receive = timed


def main() -> None:
    """Run what is asked for, or be one of its workers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["kills", "join", "worker"])
    parser.add_argument("--recipe", action="append")
    parser.add_argument("--link", default="100mbit")
    parser.add_argument("--order", default="0,2,1")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--size", type=int, default=WORKERS, help=argparse.SUPPRESS)
    parser.add_argument("--waiting", action="store_true")
    parser.add_argument("--save")
    options = parser.parse_args()
    if options.what == "worker":
        worker(options)
        return
    for recipe in options.recipe or RECIPES:
        fleet.keep((kills if options.what == "kills" else join)(options, recipe), options.save)


if __name__ == "__main__":
    main()
