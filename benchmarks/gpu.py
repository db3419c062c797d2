# SPDX-License-Identifier: Apache-2.0
"""Everything that needs a GPU, in at most eight minutes: the tests, and then every figure.

python -m benchmarks.gpu [--out FOLDER] [--only NAME ...]

Each part is a process with a time limit; what it prints goes to FOLDER/NAME.log as it comes, and the name of each test
to FOLDER/NAME.tests before and after it runs. A part that fails or runs out of time does not stop the others.
FOLDER/summary.json has each part's exit code, its seconds, and the tests that have failed or not ended.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

from tests.progress import failures
from thinwire.core.storage.files import write_atomically
from thinwire.lab import emulate

ROOT = Path(__file__).parents[1]
# Only the files that have such tests: to collect them all takes as long as to run these.
_MARKED = sorted(
    str(file.relative_to(ROOT)) for file in ROOT.glob("tests/**/test_*.py") if "mark.gpu" in file.read_text()
)
_ELASTIC = "tests/gpu/test_elastic.py"  # by itself, since it prints how long the survivors of a loss wait
_PYTEST = ["-m", "pytest", "-rfEs", "--tb=short", "-p", "no:benchmark", "-p", "no:randomly", "-p", "tests.progress"]
_PARALLEL = [*_PYTEST, "-n", "14", "--dist", "worksteal"]
HEADLINE = "OverlapLocalSGD(period=8, codec=ErrorFeedback(Nearest(bits=4)))"
_GRACE_SECONDS = 10.0
# 131,072 tokens a step, which take some 0.5 s where two workers share an H200.
_LINK = ["--device", "cuda", "--link", "100mbit", "--context", "1024", "--batch", "32", "--micro", "4"]
PARTS: dict[str, tuple[list[str], int]] = {
    "tests": ([*_PARALLEL, "-m", "gpu", *(file for file in _MARKED if file != _ELASTIC)], 110),
    "elastic": ([*_PYTEST, "-m", "gpu", "-s", _ELASTIC], 60),
    "pretended": ([*_PARALLEL, "tests/battery/test_on_gpu.py", "tests/gpu/test_waits.py"], 40),
    "codes": (["-m", "benchmarks.kernels", "--device", "cuda"], 50),
    "link": (
        ["-m", "benchmarks.gpt124m", *_LINK, "--steps", "24", "--strategy", "LocalSGD(period=1000)", HEADLINE],
        100,
    ),
    "adapters": (["-m", "benchmarks.adapters", "gpu"], 60),
    "arrays": (["-m", "reproductions.hfta.gpu", "--seconds", "120"], 150),
}


def run(command: list[str], seconds: float, log: Path) -> int | None:
    """Run a command in a process group of its own; returns its exit code, or None after its time.

    It is interrupted first, so that tests print what has failed.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            for number in (signal.SIGINT, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE_SECONDS)
            return None


def main() -> int:
    """Run the parts; returns 0 if all succeeded."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder for logs and summary.json")
    parser.add_argument("--only", nargs="+", choices=sorted(PARTS), default=list(PARTS), help="parts to run")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no GPU: there is nothing to measure", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    summary: dict[str, object] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    failed = False
    for name, (command, limit) in PARTS.items():
        if name not in options.only:
            continue
        if name == "link" and (problem := emulate.available()) is not None:
            summary[name] = {"skipped": problem}
            continue
        began, tests = time.monotonic(), options.out / f"{name}.tests"
        tests.unlink(missing_ok=True)
        logged = ["--progress", str(tests)] if "pytest" in command else []
        code = run([sys.executable, *command, *logged], limit, options.out / f"{name}.log")
        part = {"exit code": code, "seconds": round(time.monotonic() - began, 1), "limit": limit}
        wrong = failures(tests)
        summary[name] = {**part, "tests": wrong} if logged else part
        failed = failed or code != 0
        print(f"{name}: {part}", *wrong, sep="\n  ", flush=True)
        write_atomically(options.out / "summary.json", json.dumps(summary, indent=2).encode())
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
