# SPDX-License-Identifier: Apache-2.0
"""Install what was built in clean environments, and use it: `python tools/smoke.py dist`.

The wheel and the source distribution are each installed in a new environment, with `thinwire --version`, a look at what
`import thinwire` brings along, and a run of two processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUN = ["train", "--task", "digits", "--steps", "20", "--workers", "2", "--strategy", "LocalSGD(period=4)", "--json"]


def call(*command: str | Path, folder: Path) -> str:
    """Run a command in a folder outside of the checkout; returns what it printed, or ends the program."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True, timeout=1800
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def check(artefact: Path) -> None:
    """Install one file in a new environment, and use it."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        venv.create(folder / "venv", with_pip=True)
        bin_ = folder / "venv" / "bin"
        constraints = ROOT / "constraints.txt"
        call(bin_ / "pip", "install", "-q", "-c", constraints, f"{artefact}[cli,data]", folder=folder)
        version = call(bin_ / "thinwire", "--version", folder=folder).strip()
        summary = json.loads(call(bin_ / "thinwire", *RUN, folder=folder))
        if summary["steps"] != 20:
            sys.exit(f"{artefact.name}: the run took {summary['steps']} steps instead of 20")
        sys.stdout.write(f"{artefact.name}: {version} installs, and two processes train\n")


def main(folder: Path) -> int:
    """Check the newest wheel and source distribution in a folder."""
    artefacts = [path.resolve() for kind in ("*.whl", "*.tar.gz") for path in sorted(folder.glob(kind))]
    if len(artefacts) != 2:
        sys.exit(f"{folder}: one wheel and one source distribution are needed; it has {[p.name for p in artefacts]}")
    for artefact in artefacts:
        check(artefact)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "dist")))
