# SPDX-License-Identifier: Apache-2.0
"""`thinwire simulate`: the code that trains, on simulated workers of a simulated network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.cli.console import err, out, print_json
from thinwire.cli.progress import Bar
from thinwire.errors import ConfigError
from thinwire.planning.units import nbytes, seconds, share

if TYPE_CHECKING:
    from thinwire.lab.runs.folder import RunFolder
    from thinwire.lab.runs.simulated_training import Outcome, Summary, Training
    from thinwire.methods.strategies.base import Strategy
    from thinwire.planning.simulate import Network, Simulation

_EVENTS_PER_UPDATE = 2000
_MOST_TRACED_RANKS = 32
_MOST_FAILURES = 8
_NOT_SIMULATED = {"device": "a simulation is the same bit for bit and times no codec; thinwire plan does"}


@dataclass(frozen=True, kw_only=True)
class Simulate:
    """Run a strategy's own code on many simulated workers, and show how long its steps take and which waits for which.

    Example: thinwire simulate --strategy "PushSum()" --workers 64 --network examples/network.toml --steps 20

    Workers minimize a quadratic, each its own, so that thousands of them fit in one process; --meta computes nothing at
    all. All times are virtual: the same seed gives the same run, bit for bit.

    Args:
        strategy: the recipe, such as "SlowMo(base=PushSum(), period=48)".
        workers: how many.
        network: a file in TOML with the rates, latencies, racks and faults of the network; 1 Gbit/s and 0.1 ms unless
            given.
        steps: training steps.
        seed: of the workers' data and of all random draws.
        compute_time: of one step, such as 50ms or "lognormal(50ms, 0.2)", instead of the network file's; 50ms unless
            either is given.
        parameters: of the quadratic, such as 1e4.
        meta: tensors without numbers, for times and bytes of many workers.
        timeout: how long one wait may last, in virtual seconds.
        out: a folder for the run, which thinwire report draws; intervals of time are recorded of up to 32 workers.
        json: print everything as JSON.
    """

    strategy: str
    workers: int = 8
    network: Path | None = None
    steps: int = 100
    seed: int = 0
    compute_time: str | None = None
    parameters: float = 1e4
    meta: bool = False
    timeout: float = 60.0
    out: Path | None = None
    json: bool = False

    def __call__(self) -> int:
        """Simulate, and print the figures; returns 0, or 1 where workers have failed.

        Raises:
            ConfigError: a value that cannot be read, or options that exclude each other.
        """
        if self.parameters < 1 or self.parameters % 1:
            raise ConfigError(f"--parameters {self.parameters:g}: must be a whole number from 1, such as 1e4")
        from thinwire.lab.runs.folder import RunFolder
        from thinwire.lab.runs.recipes import parse_strategy
        from thinwire.lab.runs.simulated_training import Training, summarise
        from thinwire.methods.strategies.base import check_workers
        from thinwire.planning.simulate.running import check_call

        strategy = parse_strategy(self.strategy, "whose code cannot be simulated. AllReduce() does what ddp does")
        # Before anything is simulated, so that a mistake is told as one.
        if self.workers > 0:
            check_workers(strategy, self.workers)
        training = Training(strategy, self.steps, int(self.parameters), self.meta, self.seed)
        network = self._network()
        check_call(self.workers, network, self.timeout)
        # Last, so that a mistake leaves nothing behind.
        folder = None if self.out is None else RunFolder(self.out)
        if folder is not None:
            folder.create()
        ended = self._simulate(training, network)
        summary = summarise(ended)
        if folder is not None:
            _write(folder, strategy, self, ended, summary)
        if self.json:
            print_json(summary)
        else:
            _print(summary, strategy)
        return 1 if summary.failures else 0

    def _network(self) -> Network:
        from dataclasses import replace

        from thinwire.planning.plan.networks import check_entries
        from thinwire.planning.simulate import Duration, Network, load_network
        from thinwire.planning.simulate.durations import parse_distribution

        network = Network() if self.network is None else load_network(self.network, name=f"--network {self.network}")
        check_entries(network, f"--network {self.network}", _NOT_SIMULATED)
        if self.compute_time is not None:
            argument = f"--compute-time {self.compute_time}"
            return replace(network, compute=parse_distribution(self.compute_time, argument=argument))
        return network if network.compute is not None else replace(network, compute=Duration("constant", 0.05))

    def _simulate(self, training: Training, network: Network) -> Simulation[Outcome]:
        from thinwire.planning.simulate import simulate

        total, events = self.workers * self.steps, count(1)
        with Bar("simulating") as bar:

            def advance(now: float, done: int) -> None:
                if next(events) % _EVENTS_PER_UPDATE == 0:
                    bar.show(completed=done, total=total, words=seconds(now))

            return simulate(
                self.workers,
                training,
                network=network,
                seed=self.seed,
                timeout=self.timeout,
                tracing=self.out is not None,
                progress=advance if err.is_terminal else None,
            )


def _print(summary: Summary, strategy: Strategy) -> None:

    out.print(str(strategy), style="bold")
    out.print(f"{summary.workers} simulated workers, {summary.steps} steps, {seconds(summary.seconds)}\n")
    for name, words in _lines(summary):
        out.print(f"  {name:<12}{words}")
    for rank, words in list(summary.failures.items())[:_MOST_FAILURES]:
        out.print(f"  rank {rank} failed: {words}")


def _lines(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield the figures in words: (name, words)."""
    median, computed = seconds(summary.median_seconds_per_step), seconds(summary.computed_seconds_per_step)
    yield (
        "step",
        f"{seconds(summary.seconds_per_step)}; a worker's own median {median}, of which it computes {computed}",
    )
    if (slow := summary.longest) is not None:
        yield "longest", f"{seconds(slow['end'] - slow['start'])}, step {slow['step']} of rank {slow['rank']}"
    sent, messages = summary.payload_bytes_per_worker_per_step, summary.messages_per_worker_per_step
    yield "sent", f"{nbytes(sent)} a step by each worker, in {messages:.3g} messages"
    if summary.waits:
        late = [f"rank {rank} {seconds(each)}" for rank, each in list(summary.waited_on.items())[:5]]
        yield (
            "waits",
            f"{share(summary.waited_for_transfers)} of all waiting is for transfers, the rest for late workers",
        )
        if late:
            yield "waited for", f"longest, all waits together: {', '.join(late)}"
        for wait in summary.waits[:3]:
            on = "transfers" if wait.on is None else f"rank {wait.on}"
            yield "", f"rank {wait.rank} has waited {seconds(wait.seconds)} for {on}"
    if summary.late_messages:
        yield "delayed", f"{summary.late_messages} messages"
    for rank, at in summary.died.items():
        yield "died", f"rank {rank} at {seconds(at)}"
    if summary.loss is not None:
        yield "loss", f"{summary.loss:.6g}, of the model that all workers agree on"


def _write(
    folder: RunFolder, strategy: Strategy, command: Simulate, ended: Simulation[Outcome], summary: Summary
) -> None:
    """Write a run folder, which `thinwire report` reads."""
    from thinwire.registry import canonical

    facts = {
        "strategy": canonical(strategy),
        "task": "quadratic",
        "model": f"{command.parameters:g} parameters",
        "workers": command.workers,
        "link": None if command.network is None else str(command.network),
        "simulated": True,
        "seed": command.seed,
    }
    folder.write("config.json", facts)
    spans = (
        {"rank": rank, **asdict(each)}
        for rank, comm in enumerate(ended.comms[:_MOST_TRACED_RANKS])
        for each in (*ended.record.computing[rank], *comm.meter.intervals)
    )
    folder.append("timeline.jsonl", spans)
    figures = asdict(summary) | {
        "compute_seconds_per_step": summary.computed_seconds_per_step,
        "exposed_seconds_per_step": max(0.0, summary.seconds_per_step - summary.computed_seconds_per_step),
        "train_loss": summary.loss,
    }
    folder.write("summary.json", facts | figures)
