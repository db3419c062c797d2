# SPDX-License-Identifier: Apache-2.0
"""`thinwire init`: a training script for the user's case, as one file to change."""

from __future__ import annotations

import json as json_text
import shlex
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from thinwire.cli.console import out, print_json
from thinwire.core.storage.files import make_folder_of
from thinwire.core.validation import check_ranges
from thinwire.errors import ConfigError

_TEMPLATE = Path(__file__).with_name("init_template.txt")
_OVER_BUCKET = "LocalSGD(period=50)"


@dataclass(frozen=True)
class Init:
    """Write a training script that divides data among workers, evaluates, saves, resumes and leaves on a signal.

    Example: thinwire init train.py --strategy "LocalSGD(period=8)" --workers 4

    The script runs as it is, on made-up data. Replace its model and its data by yours. It prints the command that
    starts it: python for one worker, torchrun for several, and over a bucket the same command on every machine.

    Args:
        path: the script to write; it must not exist yet.
        strategy: the recipe; LocalSGD(period=8), over a bucket LocalSGD(period=50), unless given.
        workers: number of workers that train together.
        rendezvous: the URL of a bucket or a shared folder over which the workers train, such as s3://bucket/run; the
            workers connect to each other unless given.
        json: print the path and the command as JSON.
    """

    path: Path = Path("train.py")
    _: KW_ONLY
    strategy: str | None = None
    workers: int = 2
    rendezvous: str | None = None
    json: bool = False

    def __call__(self) -> int:
        """Write the script; returns 0.

        Raises:
            ConfigError: the file exists, a recipe or URL cannot be read, or there is no worker.
        """
        from thinwire.core.storage.bucket import check_url
        from thinwire.methods.strategies.recipe import parse

        if self.path.suffix != ".py":
            raise ConfigError(f"{self.path}: must be a Python script. Name it {self.path.with_suffix('.py')}")
        check_ranges(self, workers=("1..", "2 is usual"))
        strategy = self.strategy or ("LocalSGD(period=8)" if self.rendezvous is None else _OVER_BUCKET)
        parse(strategy).check(self.workers)
        if self.rendezvous is not None:
            check_url(self.rendezvous)
        command = self._command()
        make_folder_of(self.path)
        try:
            with self.path.open("x", encoding="utf-8") as file:
                file.write(self._text(strategy, command))
        except FileExistsError:
            raise ConfigError(f"{self.path}: exists, and is not replaced. Name another file, or remove it") from None
        if self.json:
            print_json({"path": self.path, "command": command})
        else:
            out.print(f"{self.path}: replace make_model and make_data by yours. Start it with:\n{command}")
        return 0

    def _command(self) -> str:
        path = shlex.quote(str(self.path))
        if self.rendezvous is not None:
            return f"THINWIRE_KEY=... THINWIRE_RANK=0 python {path}"
        if self.workers == 1:
            return f"python {path}"
        return f"torchrun --standalone --nproc-per-node {self.workers} {path}"

    def _text(self, strategy: str, command: str) -> str:
        where = ""
        if self.rendezvous is not None:
            where = f", rendezvous={json_text.dumps(self.rendezvous)}, workers={self.workers}"
            command += "\n\nThe key is what `thinwire bucket key` prints. Each machine has its own rank, "
            command += f"0 to {self.workers - 1}."
        text = _TEMPLATE.read_text(encoding="utf-8")
        for name, value in {"STRATEGY": json_text.dumps(strategy), "WHERE": where, "COMMAND": command}.items():
            text = text.replace(f"<{name}>", value)
        return text
