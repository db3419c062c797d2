# SPDX-License-Identifier: Apache-2.0
"""Small programs and probes for the tests of launching and emulation."""

import subprocess
import sys
import time
from pathlib import Path

import thinwire

BARE_PYTHON = [sys.executable, "-I", "-S", "-c"]
PACKAGE = Path(thinwire.__file__).parent

# A launcher that has thinwire.lab.emulate without thinwire itself, and so without torch: it starts in a moment.
LIGHT = f"""
import os, sys, types
package = types.ModuleType("thinwire")
package.__path__ = [{str(PACKAGE)!r}]
sys.modules["thinwire"] = package
from thinwire.lab.emulate import *
"""

SLEEP = [*BARE_PYTHON, "import time; print('up', flush=True); time.sleep(60)"]


def start_launcher(body: str) -> subprocess.Popen[str]:
    """A process of its own that runs ``body`` with the names of thinwire.lab.emulate."""
    return subprocess.Popen(
        [sys.executable, "-c", LIGHT + body], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def comes_true(fact, seconds: float = 10.0) -> bool:
    """Whether ``fact()`` becomes true in time."""
    until = time.monotonic() + seconds
    while not fact():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended but was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def processes_in(namespaces: set[int]) -> list[int]:
    """The processes that are in one of these network namespaces, or hold one open."""
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if _held_by(entry) & namespaces]


def _held_by(process: Path) -> set[int]:
    held = set()
    for path in (process / "ns" / "net", *_descriptors(process)):
        try:
            held.add(path.stat().st_ino)
        except OSError:
            continue
    return held


def _descriptors(process: Path) -> list[Path]:
    try:
        return list((process / "fd").iterdir())
    except OSError:
        return []


def host_links() -> str:
    """The interfaces and the named namespaces of the host."""
    names = [subprocess.run(["ip", *words], capture_output=True, text=True).stdout for words in (["netns"], ["link"])]
    return "".join(names)
