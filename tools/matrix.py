# SPDX-License-Identifier: Apache-2.0
"""The core tests on each Python that is installed, with the oldest, the pinned and the newest torch.

`python tools/matrix.py` makes one environment for each pair in `.matrix` and prints a table. `--only 3.13` or `--only
torch-2.11.0` runs a part of it, and `-- -k comm` gives pytest arguments of its own. Environments are kept for the next
run; each takes several gigabytes where PyPI's torch brings CUDA. A Python that is missing, or a torch without a wheel
for it, gets a row with the reason.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PINNED = re.findall(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]
TORCHES = ("2.11.0", PINNED, "newest")


def environment(python: str, torch: str, folder: Path) -> str:
    """Install torch and the project in `folder`; returns why that failed, or nothing."""
    if (folder / "ok").exists():
        return ""
    pins = (ROOT / "constraints.txt").read_text().replace(f"torch=={PINNED}\n", "")
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet"]
    wanted = "torch>=2.11" if torch == "newest" else f"torch=={torch}"
    steps: list[list[str | Path]] = [[python, "-m", "venv", folder], [*pip, "--upgrade", "pip>=25.1"]]
    steps += [[*pip, wanted, "numpy"]]
    for command in steps:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            return (done.stderr.strip().splitlines() or ["it failed and printed nothing"])[-1]
    (folder / "pins.txt").write_text(f"{pins}torch=={installed(folder)}\n")
    command = [*pip, "-c", folder / "pins.txt", "-e", ".[all,tune]", "--group", "dev"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["it failed and printed nothing"])[-1]
    (folder / "ok").touch()
    return ""


def installed(folder: Path) -> str:
    """The version of torch in an environment, without the part that names its build."""
    program = "import torch; print(torch.__version__.partition('+')[0])"
    return subprocess.run(
        [folder / "bin" / "python", "-c", program], capture_output=True, text=True, check=True
    ).stdout.strip()


def test(folder: Path, more: list[str]) -> tuple[bool, str]:
    """Run the core tests, those that failed once more and alone; returns whether all passed, and pytest's last line."""
    pytest = [
        folder / "bin" / "python",
        "-m",
        "pytest",
        "-m",
        "not slow",
        "--cases",
        "3",
        "-o",
        f"cache_dir={folder / 'cache'}",
    ]
    with (folder / "tests.log").open("w") as log:
        done = subprocess.run([*pytest, "-n", "2", "--dist", "worksteal", *more], cwd=ROOT, stdout=log, check=False)
        if done.returncode == 1:
            again = ["--last-failed", "--last-failed-no-failures", "none"]
            done = subprocess.run([*pytest, *again], cwd=ROOT, stdout=log, check=False)
    ends = re.findall(r"^=*\s*(\d+ (?:passed|failed).*?) in .*$", (folder / "tests.log").read_text(), re.MULTILINE)
    return done.returncode == 0, "; alone: ".join(ends) or f"pytest ended with {done.returncode}"


def main() -> int:
    """Run all rows and print the table; 1 if a row failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the rows whose name contains this text")
    parser.add_argument("--folder", type=Path, default=ROOT / ".matrix", help="where the environments are")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    options = parser.parse_args()
    rows: list[dict[str, str]] = []
    for python in PYTHONS:
        for torch in TORCHES:
            name = f"python-{python}-torch-{torch}"
            if options.only not in name:
                continue
            row = {"python": python, "torch": torch, "result": "", "seconds": ""}
            rows.append(row)
            found = shutil.which(f"python{python}")
            if found is None:
                row["result"] = f"not run: no python{python} on PATH"
                continue
            folder = options.folder / name
            if reason := environment(found, torch, folder):
                row["result"] = f"not run: {reason}"
                continue
            row["torch"] = installed(folder)
            start = time.monotonic()
            passed, line = test(folder, options.pytest)
            row["result"], row["seconds"] = (
                f"{'passed' if passed else 'FAILED'}: {line}",
                f"{time.monotonic() - start:.0f}",
            )
            sys.stdout.write(f"{json.dumps(row)}\n")
            sys.stdout.flush()
    sys.stdout.write("| Python | torch | result | seconds |\n|---|---|---|---:|\n")
    for row in rows:
        sys.stdout.write(f"| {' | '.join(row.values())} |\n")
    ran = [row for row in rows if not row["result"].startswith("not run")]
    return 0 if ran and all(row["result"].startswith("passed") for row in ran) else 1


if __name__ == "__main__":
    sys.exit(main())
