# SPDX-License-Identifier: Apache-2.0
"""`thinwire up`: an unmodified training script, on several workers."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path

from thinwire.cli.console import err, print_error, print_json
from thinwire.cli.options import words_of
from thinwire.errors import ConfigError
from thinwire.planning.units import nbytes, seconds

_LAST_LINES = 20
_RENDEZVOUS = "THINWIRE_RENDEZVOUS"

# What each process prints after Ctrl-C.
_INTERRUPTED = "thinwire: interrupted"


@dataclass(frozen=True)
class Up:
    """Run an unmodified training script for one process on several workers.

    Example: thinwire up train.py --processes 2 --strategy "LocalSGD(period=8)" -- --epochs 3

    The script's model and optimizer are found in its first forward pass, and attached. A script with several models or
    optimizers is refused. Each worker runs the whole script: it reads its own part of every DataLoader that is read for
    training, and draws its own random numbers from the first step on. The script's own arguments follow `--`.

    Under torchrun, on one machine or several, the command is one of torchrun's workers. Rank 0 prints what the script
    prints; other ranks do not write files with torch.save.

    Args:
        script: the Python script.
        strategy: the recipe.
        processes: start so many workers on this machine.
        rendezvous: the URL of a bucket or a shared folder over which the workers train, such as s3://bucket/run. Run
            the same command on each machine, with the same THINWIRE_KEY. Each worker then reads all data in its own
            order. By default that of THINWIRE_RENDEZVOUS.
        workers: with --rendezvous, the fixed number of workers; they may join and leave at any time unless given.
        seed: of torch, numpy and random where the script sets none.
        export: write the model that all workers agree on to this safetensors file at the end. What the script itself
            saves is rank 0's own replica.
        timeout: how long one wait may last, in seconds.
        json: print the steps, bytes and waits as JSON at the end, after what the script prints.
        arguments: the script's own, after `--`.
    """

    script: Path
    _: KW_ONLY
    strategy: str = "AllReduce()"
    processes: int | None = None
    rendezvous: str | None = None
    workers: int | None = None
    seed: int = 0
    export: Path | None = None
    timeout: float = 60.0
    json: bool = False
    arguments: tuple[str, ...] = ()

    def __call__(self) -> int:
        """Run the script; returns 0, or 1 where a worker failed."""
        from thinwire.core.comm.rendezvous import started_by_torchrun
        from thinwire.core.storage.bucket import check_url
        from thinwire.methods.strategies.recipe import parse

        if self.rendezvous is None and os.environ.get(_RENDEZVOUS):
            return replace(self, rendezvous=os.environ[_RENDEZVOUS])()
        parse(self.strategy)  # before any process starts
        if self.rendezvous is not None:
            check_url(self.rendezvous)
        if not self.script.is_file():
            raise ConfigError(
                f"{self.script}: no such file. Give a Python script that trains a model, such as train.py"
            )
        if self.workers is not None and self.rendezvous is None:
            raise ConfigError(f"--workers {self.workers}: is for --rendezvous. Use --processes {self.workers}")
        if self.rendezvous is not None and self.processes is None:
            if not started_by_torchrun():
                _note(f"on each other machine, with the same THINWIRE_KEY, run:\n  {self._on_machines()}")
            return self._work()
        if started_by_torchrun():
            if self.processes is not None:
                raise ConfigError(f"--processes {self.processes}: torchrun has started the workers. Leave it out")
            return self._work()
        if self.processes is None:
            raise ConfigError(
                "the number of workers is not known: nothing says where they run. Give --processes 2 for two on this "
                f"machine, or start each machine with:\n  {self._on_machines()}"
            )
        if self.processes < 1:
            raise ConfigError(f"--processes {self.processes}: must be at least 1")
        return self._launch(self.processes)

    def _work(self) -> int:
        """Run the script as one worker."""
        from thinwire.integrations.script import run_script

        done = run_script(
            self.script,
            self.arguments,
            self.strategy,
            seed=self.seed,
            export=self.export,
            note=_note,
            timeout=self.timeout,
            rendezvous=self.rendezvous,
            workers=self.workers,
        )
        if done.rank == 0:
            stats = done.stats
            sent, waited = nbytes(stats.payload_bytes), seconds(stats.wait_seconds)
            if self.json:
                print_json(
                    {
                        "steps": stats.steps,
                        "payload_bytes": stats.payload_bytes,
                        "wait_seconds": stats.wait_seconds,
                        "export": self.export,
                    }
                )
            _note(f"{stats.steps} steps; each worker sent {sent} and waited {waited} for messages")
            if self.export is not None:
                _note(f"the model that all workers agree on is in {self.export}")
        return 0

    def _launch(self, processes: int) -> int:
        """Run the script on workers of this machine."""
        from thinwire.lab.emulate import Stream, Workers

        _note(
            f"{processes} workers on this machine. For several machines, run on each of them:\n  {self._on_machines()}"
        )
        last: dict[int, list[str]] = {}

        def show(rank: int, stream: Stream, line: str) -> None:
            if line == _INTERRUPTED:
                return  # this process prints it too
            if rank == 0:
                (sys.stdout if stream == "stdout" else sys.stderr).write(f"{line}\n")
                (sys.stdout if stream == "stdout" else sys.stderr).flush()
            elif stream == "stderr":
                last[rank] = [*last.get(rank, ()), line][-_LAST_LINES:]

        command = [sys.executable, "-m", "thinwire", *self._own_words()]
        environment = {"PYTHONUNBUFFERED": "1"}
        with Workers(command, processes, on_line=show, environment=environment, timeout=None) as workers:
            workers.wait()
        if workers.failure is None:
            return 0
        for line in last.get(workers.failure.rank, ()):
            err.print(f"[{workers.failure.rank}] {line}")
        print_error(workers.failure)
        return workers.failure.code if workers.failure.code in (1, 2) else 1

    def _on_machines(self) -> str:
        """Return the command that starts one worker on each of two machines."""
        if self.rendezvous is not None:
            return shlex.join(["thinwire", *self._own_words()])
        start = "torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m thinwire"
        return f"{start} {shlex.join(self._own_words())}"

    def _own_words(self) -> list[str]:
        """Return this command without --processes."""
        words = ["up", str(self.script), *words_of(replace(self, processes=None))]
        return [*words, "--", *self.arguments] if self.arguments else words


def _note(text: str) -> None:
    err.print(f"thinwire up: {text}")
