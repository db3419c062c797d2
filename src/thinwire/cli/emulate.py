"""`thinwire emulate`: any command, once per worker, over links that are as slow as asked for."""

import json as json_text
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text
from tyro.conf import Positional

from thinwire.cli.console import complain, err, out
from thinwire.emulate import (
    Network,
    Stream,
    Traffic,
    WorkerExit,
    Workers,
    available,
    parse_links,
    parse_stragglers,
    straggler_environment,
)
from thinwire.errors import ConfigError

COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "red")


@dataclass(frozen=True)
class Emulate:
    """Run a command once per worker, as torchrun would, each in a network of its own with a link to the others.

    Example: thinwire emulate --workers 4 --link 100mbit,0:10mbit -- python train.py

    Links are shaped by the kernel in both directions and the bytes are those that it counted. Without a limit or a
    delay, and where networks cannot be emulated, the workers run in this machine's own network and no bytes are
    counted.

    Args:
        command: the program and its arguments, after `--`; workers find each other by torchrun's variables.
        workers: how many copies to run.
        link: [RANK:]RATE[+DELAY], several by commas: none, 100mbit, 1gbit+5ms, 100mbit,0:10mbit. RATE is each
            direction of a worker's link, DELAY is how much later what it sends arrives.
        slow: [RANK:]FACTORx, several by commas: 2:3x makes worker 2 take three times as long to compute. It is kept by
            thinwire's own training, and by scripts that call Straggler.from_environment().pause(step, seconds).
        stall: [RANK:]PROBABILITY:DURATION, several by commas: 0.15:200ms stalls 15 % of the steps; kept as slow is.
        seed: which steps stall.
        timeout: stop everything after so long.
        json: print the table as JSON; what the workers say then goes to the standard error.
    """

    command: Positional[tuple[str, ...]]
    workers: int = 4
    link: str = "none"
    slow: str | None = None
    stall: str | None = None
    seed: int = 0
    timeout: float | None = None
    json: bool = False

    def __call__(self) -> int:
        """Run the workers; returns 0, or 1 when one of them failed."""
        if self.workers < 1:
            raise ConfigError(f"--workers {self.workers}: must be at least 1")
        if not self.command:
            raise ConfigError("there is no command to run; write it after --, such as -- python train.py")
        parse_stragglers(self.slow, self.stall, workers=self.workers, seed=self.seed)
        with ExitStack() as contexts:
            network = self._network()
            if network is not None:
                contexts.enter_context(network)
            workers = contexts.enter_context(self._start(network))
            exits = workers.wait()
            traffic = network.traffic() if network else (None,) * self.workers
        self._show(exits, traffic)
        if workers.failure is not None:
            complain(workers.failure)
        return 0 if workers.failure is None else 1

    def _network(self) -> Network | None:
        network = Network(parse_links(self.link, self.workers))
        reason = None if any(str(link) != "none" for link in network.links) else available()
        if reason is None:
            return network
        err.print(f"no network of their own for the workers, so no bytes are counted: {reason}", markup=False)
        return None

    def _start(self, network: Network | None) -> Workers:
        return Workers(
            self.command,
            self.workers,
            network=network,
            environment=straggler_environment(self.slow, self.stall, seed=self.seed),
            on_line=self._say,
            timeout=self.timeout,
        )

    def _say(self, rank: int, stream: Stream, line: str) -> None:
        console = out if stream == "stdout" and not self.json else err
        console.print(Text.assemble((f"[{rank}]", COLOURS[rank % len(COLOURS)]), " ", line))

    def _show(self, exits: Sequence[WorkerExit], traffic: Sequence[Traffic | None]) -> None:
        rows = [_facts(record, carried) for record, carried in zip(exits, traffic, strict=True)]
        if self.json:
            out.print_json(json_text.dumps({"link": self.link, "workers": rows}))
        else:
            out.print(_table(rows))


def _facts(record: WorkerExit, carried: Traffic | None) -> dict[str, float | str | None]:
    """What is known of one worker, in base units."""
    facts: dict[str, float | str | None] = {
        "rank": record.rank,
        "exit": record.how,
        "seconds": record.seconds,
        "cpu_seconds": record.cpu_seconds,
        "sent_bytes": None,
        "received_bytes": None,
        "sent_bits_per_second": None,
    }
    if carried is not None:
        facts["sent_bytes"] = carried.sent_bytes
        facts["received_bytes"] = carried.received_bytes
        facts["sent_bits_per_second"] = 8 * carried.sent_bytes / record.seconds
    return facts


def _table(rows: Sequence[dict[str, float | str | None]]) -> Table:
    table = Table("rank", "exit", "seconds", "CPU seconds", "MB sent", "MB received", "mean Mbit/s sent")
    for row in rows:
        table.add_row(
            str(row["rank"]),
            str(row["exit"]),
            _number(row["seconds"], 1),
            _number(row["cpu_seconds"], 1),
            _number(row["sent_bytes"], 1e-6),
            _number(row["received_bytes"], 1e-6),
            _number(row["sent_bits_per_second"], 1e-6),
        )
    return table


def _number(value: float | str | None, scale: float) -> str:
    return f"{float(value) * scale:.2f}" if value is not None else "-"
