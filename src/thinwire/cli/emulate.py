# SPDX-License-Identifier: Apache-2.0
"""`thinwire emulate`: any command, once per worker, over emulated links."""

from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from typing import Any

from rich.text import Text

from thinwire.cli.console import err, out, print_error, print_json
from thinwire.core.validation import check_ranges
from thinwire.errors import ConfigError
from thinwire.lab.emulate import (
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

COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "red")


@dataclass(frozen=True)
class Emulate:
    """Run a command once per worker, as torchrun does, each worker in its own network namespace with its own link.

    Example: thinwire emulate --workers 4 --link 100mbit,0:10mbit -- python train.py

    The kernel limits both directions of each link and counts the bytes. If no link is limited or delayed, and this
    machine does not allow network namespaces, the workers run in its own network and no bytes are counted.

    Args:
        command: the program and its arguments, after `--`. It gets torchrun's environment variables: RANK, WORLD_SIZE,
            MASTER_ADDR and so on.
        workers: how many copies to run.
        link: the workers' links, [RANK:]RATE[+DELAY], separated by commas; such as 100mbit, 1gbit+5ms, or
            100mbit,0:10mbit where worker 0 has another one. RATE limits each direction, DELAY is added to every
            message that the worker sends.
        slow: workers that compute slower, [RANK:]FACTORx, separated by commas; with 2:3x worker 2 takes three times as
            long. Works in thinwire's own training, and in scripts that call
            Straggler.from_environment().pause(step, seconds).
        stall: workers that pause in random steps, [RANK:]PROBABILITY:DURATION, separated by commas; with 0.15:200ms
            every worker pauses for 200 ms in 15 % of its steps. Works where --slow does.
        seed: random seed that decides which steps stall.
        timeout: stop all workers after so many seconds.
        json: print the table as JSON, and the workers' lines to the standard error.
    """

    command: tuple[str, ...] = ()
    _: KW_ONLY
    workers: int = 4
    link: str = "none"
    slow: str | None = None
    stall: str | None = None
    seed: int = 0
    timeout: float = 86_400.0
    json: bool = False

    def __call__(self) -> int:
        """Run the workers; returns 0, or 1 when one of them failed."""
        check_ranges(self, workers=("1..", "4 is usual"), timeout=("(0, inf)", "A day is 86400"), seed=("0..", "Use 0"))
        if not self.command:
            raise ConfigError("there is no command to run. Write it after --, such as -- python train.py")
        parse_stragglers(self.slow, self.stall, workers=self.workers, seed=self.seed)
        network: Network | None = Network(parse_links(self.link, self.workers))
        reason = None if any(str(link) != "none" for link in network.links) else available()
        if reason is not None:
            # Only where no link is limited: a limit that cannot be kept is an error.
            err.print(f"the workers use this machine's network, so no bytes are counted: {reason}")
            network = None
        with ExitStack() as contexts:
            if network is not None:
                contexts.enter_context(network)
            workers = contexts.enter_context(
                Workers(
                    self.command,
                    self.workers,
                    network=network,
                    environment=straggler_environment(self.slow, self.stall, seed=self.seed),
                    on_line=self._print_line,
                    timeout=self.timeout,
                )
            )
            exits = workers.wait()
            # Before the network is left, because its counters end with it.
            traffic = network.traffic() if network else (None,) * self.workers
        rows = [_row(record, carried) for record, carried in zip(exits, traffic, strict=True)]
        if self.json:
            print_json({"link": self.link, "workers": rows})
        else:
            heads = ("rank", "exit", "seconds", "CPU seconds", "MB sent", "MB received", "mean Mbit/s sent")
            out.table("", heads, map(_words, rows))
        if workers.failure is not None:
            print_error(workers.failure)
        return 0 if workers.failure is None else 1

    def _print_line(self, rank: int, stream: Stream, line: str) -> None:
        console = out if stream == "stdout" and not self.json else err
        console.print(Text.assemble((f"[{rank}]", COLOURS[rank % len(COLOURS)]), " ", line))


def _row(record: WorkerExit, carried: Traffic | None) -> dict[str, Any]:
    """Return one worker's figures, in seconds, bytes and bits per second."""
    sent, received = (None, None) if carried is None else (carried.sent_bytes, carried.received_bytes)
    return {
        "rank": record.rank,
        "exit": record.how,
        "seconds": record.seconds,
        "cpu_seconds": record.cpu_seconds,
        "sent_bytes": sent,
        "received_bytes": received,
        "sent_bits_per_second": None if sent is None else 8 * sent / record.seconds,
    }


def _words(row: dict[str, Any]) -> list[str]:
    rank, how, *figures = row.values()
    scaled = zip(figures, (1, 1, 1e-6, 1e-6, 1e-6), strict=True)
    return [str(rank), how, *("-" if each is None else f"{each * scale:.2f}" for each, scale in scaled)]
