# SPDX-License-Identifier: Apache-2.0
"""`thinwire doctor`: what is wrong with the machines and links of a job, and what a training step costs on them."""

from __future__ import annotations

import json as json_text
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from thinwire.cli.console import err, out, print_json
from thinwire.cli.options import words_of
from thinwire.cli.step_time import ModelOptions
from thinwire.core.storage.files import check_writable, write_atomically
from thinwire.errors import ConfigError
from thinwire.planning.units import nbytes, rate, seconds

if TYPE_CHECKING:
    from thinwire.planning.doctor.findings import Examination, Finding
    from thinwire.planning.doctor.verdict import Cost

_GOOD, _NEARLY = 0.9, 0.95
# Seconds for what ranks measure besides waiting for answers: links, all-reduces, steps, and the simulations after them.
_LONGEST = 240
_COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan"}


@dataclass(frozen=True, kw_only=True)
class Doctor(ModelOptions):
    """Examine the machines and links of a job: what is wrong, how fast they are, what a training step costs on them.

    On your machines, start it as you start training, on all of them at about the same time:

        torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m thinwire.cli doctor

    Without torchrun it examines this machine alone; with --workers it starts so many ranks here, over emulated links.
    Takes about a minute. Every wait has an end, and ranks that do not answer are named.

    Example: thinwire doctor --workers 3 --link 100mbit,1:35mbit

    Args:
        batch_size: examples per worker and step of the task's model; the task's own unless given.
        workers: start so many ranks on this machine.
        link: with --workers, their emulated links, [RANK:]RATE[+DELAY], separated by commas.
        timeout: seconds to wait for an answer of another rank.
        out: a file for everything as JSON, for thinwire plan --doctor and attach(..., "auto").
        json: print everything as JSON.
    """

    batch_size: int | None = None
    workers: int | None = None
    link: str | None = None
    timeout: float = 15.0
    out: Path | None = None
    json: bool = False

    def __call__(self) -> int:
        """Examine; returns 0, or 1 where something will break training.

        Raises:
            ConfigError: an option that cannot work, or a file that cannot be written.
            CommTimeoutError: the rendezvous or rank 0 does not answer.
        """
        from thinwire.core.comm.rendezvous import started_by_torchrun

        if not 1 <= self.timeout <= 600:
            raise ConfigError(f"--timeout {self.timeout:g}: must be 1 to 600 seconds")
        # Before anything is measured; rank 0 writes.
        if self.out is not None and os.environ.get("RANK", "0") == "0":
            _or_refused(self.out, check_writable)
        if self.workers is not None:
            if started_by_torchrun():
                raise ConfigError("--workers starts ranks on this machine, but torchrun has started this one already")
            return self._emulated(self.workers)
        if self.link is not None:
            raise ConfigError(f"--link {self.link}: emulates links of --workers. Give that too")
        return self._examine()

    def _examine(self) -> int:
        from thinwire.core.comm.rendezvous import started_by_torchrun
        from thinwire.planning.doctor.examination import examine
        from thinwire.planning.doctor.findings import findings_of
        from thinwire.planning.doctor.rendezvous import join
        from thinwire.planning.doctor.verdict import costs_of

        made = self.made(batch_size=self.batch_size)
        rendezvous = os.environ["MASTER_ADDR"] if started_by_torchrun() else ""
        peers = join(seconds=self.timeout)

        def tell(part: str) -> None:
            if peers.rank == 0:
                err.print(f"measuring {part} ...", style="dim")

        seen = examine(peers, rendezvous, made.timed, answer=self.timeout, tell=tell)
        if seen is None:
            return 0
        findings = findings_of(seen)
        tell("strategies, in a simulation")
        costs = list(costs_of(seen))
        if self.json:
            print_json(_as_json(seen, findings, costs))
        else:
            _print(seen, findings, costs)
        # Last: what was measured is seen, whatever becomes of the disk.
        if self.out is not None:
            content = (json_text.dumps(_as_json(seen, findings, costs), indent=1) + "\n").encode()
            _or_refused(self.out, lambda path: write_atomically(path, content))
        return int(any(finding.severity == "error" for finding in findings))

    def _emulated(self, workers: int) -> int:
        from thinwire.lab.emulate import Network, parse_links, run_workers

        out_file = None if self.out is None else self.out.absolute()
        options = words_of(replace(self, workers=None, link=None, out=out_file))
        command = [sys.executable, "-m", "thinwire.cli", "doctor", *options]

        def show(rank: int, stream: str, line: str) -> None:
            if rank == 0 and stream == "stdout":
                out.print(Text.from_ansi(line))
            else:
                err.print(Text.assemble(f"[{rank}] " if rank else "", Text.from_ansi(line)))

        environment = {"COLUMNS": str(out.width), **({"FORCE_COLOR": "1"} if out.is_terminal else {})}
        with ExitStack() as contexts:
            network = None if self.link is None else contexts.enter_context(Network(parse_links(self.link, workers)))
            timeout = _LONGEST + 20 * self.timeout
            exits = run_workers(
                command, workers, network=network, environment=environment, on_line=show, timeout=timeout
            )
        return max((1 if each.code is None else each.code for each in exits), default=0)


def _or_refused(path: Path, write: Callable[[Path], None]) -> None:
    """Write the file of --out.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        write(path)
    except OSError as error:
        raise ConfigError(
            f"--out {path}: cannot be written ({error.strerror}). Name a file in a folder you may write to"
        ) from None


def _as_json(seen: Examination, findings: list[Finding], costs: list[Cost]) -> dict[str, Any]:
    from thinwire.planning.doctor.verdict import network_of

    measured = any(not pair.problem for pair in seen.pairs)
    return {
        **asdict(seen),
        "contention": network_of(seen).contention if measured else 0.0,
        "sharing": seen.sharing,
        "findings": [asdict(finding) for finding in findings],
        "strategies": [asdict(cost) for cost in costs],
    }


# -- for people -------------------------------------------------------------------------------------------------------


def _print(seen: Examination, findings: list[Finding], costs: list[Cost]) -> None:
    heads = ("rank", "machine", "address", "interface", "cores", "threads", "step", "step amid messages")
    out.table("machines", heads, _machines(seen))
    if seen.pairs:
        out.table("links", ("ranks", "round trip", "there", "back", "both at once", "4 streams"), _links(seen))
    if seen.all_reduces:
        heads = ("all-reduce of", "takes", "rate of sending")
        out.table("all-reduce over Gloo", heads, _all_reduces(seen))
    for finding in findings:
        out.print(Text.assemble((f"{finding.severity}: ", _COLOURS[finding.severity]), finding.text))
        out.print(Text.assemble("  → ", finding.fix))
    if not findings:
        out.print("no fault was found in these machines and links", style="green")
    if costs:
        heads = ("strategy", "step", "of linear speed", "sent per step")
        figures = [(x.recipe, seconds(x.seconds), f"{x.efficiency:.2f}", nbytes(x.payload_bytes)) for x in costs]
        out.table("on these links, simulated", heads, figures)
    out.print(_verdict(seen, costs))


def _machines(seen: Examination) -> Iterator[tuple[str, ...]]:
    for rank, host in seen.hosts.items():
        used = host.interface_of(host.gloo_address)
        times = (f"{1e3 * each[rank].seconds:.1f} ms" if rank in each else "-" for each in (seen.steps, seen.loaded))
        address = (host.gloo_address or "none", used.name if used else "none")
        yield str(rank), host.name, *address, str(host.cores), str(host.threads), *times


def _links(seen: Examination) -> Iterator[tuple[str, ...]]:
    for pair in sorted(seen.pairs, key=lambda pair: (pair.a, pair.b)):
        ranks = f"{pair.a} - {pair.b}"
        if pair.problem:
            yield ranks, "no answer" if pair.connected else "no connection", "-", "-", "-", "-"
        else:
            rates = map(rate, (pair.there, pair.back, pair.both, pair.several))
            yield ranks, f"{1e3 * pair.seconds_per_round_trip:.2f} ms", *rates


def _all_reduces(seen: Examination) -> Iterator[tuple[str, ...]]:
    for size, taken in seen.all_reduces.items():
        sent = 2 * (seen.size - 1) / seen.size * size
        yield nbytes(size), seconds(taken), rate(8 * sent / taken)


def _verdict(seen: Examination, costs: list[Cost]) -> str:
    """Return what these links make of the user's model, in a few sentences."""
    from thinwire.planning.plan.all_reduces import all_reduce_seconds

    if not seen.steps:
        return "no training step was timed"
    step = max(seen.steps.values(), key=lambda each: each.seconds)
    model = f"{step.name} ({step.parameters / 1e6:.3g} M parameters)"
    words = f"A step of {model} takes {seconds(step.seconds)} without communication"
    reduce = all_reduce_seconds(seen.all_reduces, step.nbytes)
    words += "." if reduce is None else f"; an all-reduce of its gradients, {nbytes(step.nbytes)}, {seconds(reduce)}."
    if not costs:
        return words
    plain, best = costs[0], max(costs, key=lambda cost: cost.efficiency)
    if plain.efficiency > _GOOD:
        return f"{words} Plain data parallelism suits these links: {plain.efficiency:.2f} of linear speed."
    share = f"{1 / plain.speed:.2g} times slower than" if plain.speed < 1 else f"{plain.speed:.2g} times as fast as"
    # Of what is nearly as fast, the one that changes training least.
    advised = next(cost for cost in costs if cost.efficiency > _NEARLY * best.efficiency)
    return (
        f"{words} These links make {seen.size} workers under DDP or AllReduce() {share} one of them alone. "
        f"{advised.recipe} would run at {advised.efficiency:.2f} of linear speed, {advised.speed:.2g} times one "
        "worker; what it costs in accuracy, `thinwire compare` measures on your task, and "
        "`thinwire plan --doctor FILE` weighs it; --out FILE writes that file."
    )
