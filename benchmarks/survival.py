# SPDX-License-Identifier: Apache-2.0
"""What the arrival of a worker costs, as processes over an emulated link. `benchmarks.storm` measures losses.

    python -m benchmarks.survival [--link 100mbit] [--recipe RECIPE ...] [--waiting]

The rule, which was written before any run:

- The GPT of 6 M parameters on `text`, 4 sequences a worker and step, AdamW, a thread a worker, every worker in a
  network namespace of its own. The store is a process in another one, with a link of 1 Gbit.
- Workers train; one comes later. *Rate* is the bytes of its state over the time in which it received them, from
  when it could begin to wait, as a share of the link's; the bar is 0.8, with one worker that trains, so that nothing
  else uses the link. *Stall* is the longest time of a step of the others in the rounds around the view in which it came
  and of the round after, less the *own length*: the median time of the steps of its kind (those that end a round, for
  a method with rounds) before. With `--waiting` the state is sent as for methods without rounds, while all wait.

Each result is a line of JSON, and of benchmarks/results/survival/NAME.jsonl with `--save NAME`.
"""

from __future__ import annotations

import argparse
import json
import os
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
MOST_SECONDS = 240.0


class Watched:
    """What the workers of a run have said so far."""

    workers: Workers

    def __init__(self) -> None:
        self.steps: dict[int, list[tuple[float, int]]] = {}
        self.received: list[dict[str, Any]] = []

    def read(self, rank: int, stream: str, line: str) -> None:
        """A line of a worker."""
        if not line.startswith("{"):
            if stream == "stderr" and "Error" in line:
                print(f"rank {rank}: {line}", file=sys.stderr)
            return
        said = json.loads(line)
        if "step" in said:
            self.steps.setdefault(rank, []).append((said["at"], said["step"]))
        else:
            self.received.append(said)

    def until(self, enough: Callable[[], bool]) -> None:
        """Poll until then."""
        end = time.monotonic() + MOST_SECONDS
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


def join(options: argparse.Namespace, recipe: str, size: int) -> dict[str, Any]:
    """Start a store and so many workers, and let one more join."""
    import thinwire

    period = int(getattr(thinwire.parse(recipe), "period", 1))  # 1 for methods without rounds
    links = parse_links("1gbit", 1) + parse_links(options.link, size + 1)
    command = [sys.executable, "-m", "benchmarks.survival", "--worker", "--size", str(size), "--recipe", recipe]
    command += ["--waiting"] * options.waiting
    environment = {"THINWIRE_STORE": f"{address(0)}:{RENDEZVOUS_PORT}", "THINWIRE_WORKERS": str(size)}
    watched, there, newcomer = Watched(), range(1, size + 1), size + 1
    with (
        Network(links) as network,
        Workers(
            command, len(links), network=network, environment=environment, on_line=watched.read, survives=True
        ) as workers,
    ):
        watched.workers = workers
        watched.until(lambda: all(watched.rounds(rank, 0.0, period) >= WARM for rank in there))
        own = {rank: statistics.median(b - a for a, b in watched.gaps(rank, period)) for rank in there}
        asked = time.monotonic()
        os.kill(workers.pids[newcomer], signal.SIGUSR1)
        watched.until(lambda: watched.rounds(newcomer, 0.0, period) >= 1)
        came = watched.steps[newcomer][0][0]
        watched.until(lambda: all(watched.rounds(rank, came, period) >= 1 for rank in there))
        fleet.kill(workers.pids)
        workers.poll(2.0)
    stall = max(b - a - own[rank] for rank in there for a, b in watched.gaps(rank, period) if b > asked)
    parts = [part for part in watched.received if part["nbytes"] > 1 << 20]
    nbytes, seconds = (sum(part[name] for part in parts) for name in ("nbytes", "seconds"))
    bits = links[1].bits_per_second or float("inf")
    return {
        "what": "join", "recipe": recipe, "link": options.link, "workers": size, "waiting": options.waiting,
        "own_seconds": round(max(own.values()), 3), "stall_seconds": round(stall, 3), "nbytes": nbytes,
        "receiving_seconds": round(seconds, 3), "rate": round(8 * nbytes / max(seconds, 1e-9) / bits, 3),
        "rounds": max(watched.rounds(rank, asked, period) for rank in there),
    }  # fmt: skip


def worker(options: argparse.Namespace) -> None:
    """Host the store, train, or wait to be told to join."""
    rank = int(os.environ["RANK"])
    if rank == 0:
        from thinwire.core.comm.rendezvous import host_store

        _store = host_store(address(0), RENDEZVOUS_PORT)  # lives as long as the object
        signal.pause()
    if rank > options.size:
        signal.signal(signal.SIGUSR1, lambda *_: None)
    from thinwire import attach

    trainer = fleet.Trainer(options.size + 1, rank - 1, size="6m")
    if rank > options.size:
        signal.pause()
    os.environ["THINWIRE_RANK"] = str(min(rank - 1, options.size - 1))
    time_receiving(waiting=options.waiting)
    trained = attach(trainer.model, trainer.optimizer, options.recipe[0], elastic=True, timeout=60)
    while True:
        trainer.step(trained.step)
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
    parser.add_argument("--recipe", action="append")
    parser.add_argument("--link", default="100mbit")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--waiting", action="store_true")
    parser.add_argument("--save")
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    for recipe in options.recipe or RECIPES:
        fleet.keep((join(options, recipe, size) for size in options.sizes), options.save)


if __name__ == "__main__":
    main()
