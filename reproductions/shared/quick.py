# SPDX-License-Identifier: Apache-2.0
"""Quick forms run again and again: whether each gives one verdict, and how long it takes.

python -m reproductions.shared.quick [NAME ...] [--times 3]

Each claim is run until it has so many runs by its present rule. A run is kept in the claim's folder as soon as it is
there, in quick.json, and `docs/claims.md` tells them. Times count on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reproductions.shared.claims import MODULES, Claim, Outcome, claim, is_present, verdict_of
from thinwire.core.storage.files import write_atomically

_HOME = Path(__file__).parents[1]
TIMES = 3


def runs_of(which: Claim) -> list[dict[str, Any]]:
    """The committed runs of a claim's quick form by its present rule, the oldest first.

    Parts that only the full form decides are left open in earlier runs too, which had judged them.
    """
    found = [each for each in _kept(which) if is_present(which, each)]
    parts = [which.decided_by_quick(each["parts"]) for each in found]
    return [each | {"parts": own, "verdict": verdict_of(own)} for each, own in zip(found, parts, strict=True)]


def _kept(which: Claim) -> list[dict[str, Any]]:
    path = _path(which)
    return json.loads(path.read_bytes()) if path.is_file() else []


def told(which: Claim) -> str:
    """The verdicts of the quick form's runs and their minutes, in words."""
    found = runs_of(which)
    if not found:
        return "its quick form has not been run by the present rule"
    verdicts = [each["verdict"] for each in found]
    minutes = [each["seconds"] / 60 for each in found]
    if len(found) == 1:
        return f"one run of its quick form took {minutes[0]:.1f} minutes, with the verdict: {verdicts[0]}"
    took = f"{len(found)} runs of its quick form took {min(minutes):.1f} to {max(minutes):.1f} minutes"
    if len(set(verdicts)) == 1:
        return f"{took}, all with the verdict: {verdicts[0]}{_left_open(which)}"
    outcomes = {name: [each["parts"][name] for each in found] for name in which.parts}
    differ = [f"{name} ({', '.join(each)})" for name, each in outcomes.items() if len(set(each)) > 1]
    turned = [name for name, each in outcomes.items() if {Outcome.HOLDS, Outcome.FAILS} <= set(each)]
    word = f"{', '.join(turned) or 'no part'} holds in one run and does not hold in another"
    return f"{took}. {len(outcomes) - len(differ)} of {len(outcomes)} parts agree, and {word}; {'; '.join(differ)}"


def _left_open(which: Claim) -> str:
    return f" (left to the full form: {', '.join(which.full_only)})" if which.full_only else ""


def run_again(which: Claim) -> dict[str, Any]:
    """Run a quick form once, and keep what came of it.

    Raises:
        CalledProcessError: it ended without a result.
    """
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "run"
        command = [sys.executable, "-m", "reproductions", which.name, "--quick", "--out", str(home)]
        start = time.monotonic()
        done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        seconds = time.monotonic() - start
        # 1 says as well that the claim does not hold.
        if not (home / "result.json").is_file():
            raise subprocess.CalledProcessError(done.returncode, command)
        result = json.loads((home / "result.json").read_bytes())
    kept = {key: result[key] for key in ("when", "thinwire", "rule", "protocol", "verdict", "parts", "measured")}
    found = {**kept, "seconds": round(seconds, 1)}
    write_atomically(_path(which), (json.dumps([*_kept(which), found], indent=1) + "\n").encode())
    return found


def _path(which: Claim) -> Path:
    return _HOME / which.name.replace("-", "_") / "quick.json"


def main(arguments: Sequence[str]) -> None:
    """Run what is missing, and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(MODULES)}; all of them without")
    parser.add_argument("--times", type=int, default=TIMES)
    chosen = parser.parse_args(arguments)
    claims = [claim(name) for name in chosen.names or MODULES]
    # Round by round, so that an interrupted command has a run of each.
    for count in range(1, chosen.times + 1):
        for which in claims:
            if len(runs_of(which)) < count:
                found = run_again(which)
                sys.stdout.write(f"{which.name}: {found['verdict']} ({found['seconds'] / 60:.1f} minutes)\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
