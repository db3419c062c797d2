# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a run connect, and who else can."""

import os
import re
import sys
from pathlib import Path

import pytest

from thinwire.lab.emulate import run_workers

LOOPBACK = ("0100007F", "00000000000000000000000001000000")
LISTEN = "0A"


def listening_addresses() -> list[str]:
    """The addresses on which this process listens for TCP, as the kernel writes them."""
    sockets = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            sockets |= set(re.findall(r"socket:\[(\d+)\]", str(entry.readlink())))
        except OSError:  # the descriptor of the folder itself
            continue
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/self/net/{name}").read_text().splitlines()]
    return [row[1].partition(":")[0] for row in rows if row[3] == LISTEN and row[9] in sockets]


PROGRAM = """
from tests.lab.runs.test_processes import listening_addresses
from thinwire.lab.runs import resolve
from thinwire.lab.runs.worker import connected

with connected(resolve({"task": "digits", "workers": 2})) as (comm, control):
    import torch
    print("total", int(comm.all_reduce_(torch.ones(1)).wait()), *listening_addresses())
    control.all_reduce_(torch.ones(1)).wait()
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="needs Linux's table of sockets")
def test_on_one_machine_all_ports_of_a_run_are_on_the_loopback() -> None:
    lines: list[list[str]] = []
    root = Path(__file__).parents[3]
    exits = run_workers(
        [sys.executable, "-c", PROGRAM],
        2,
        environment={"PYTHONPATH": os.pathsep.join([str(root), str(root / "src")])},
        on_line=lambda rank, stream, line: lines.append(line.split()),
        timeout=60,
    )
    assert not [each for each in exits if each.failed], lines
    told = [line for line in lines if line[:1] == ["total"]]
    assert [line[1] for line in told] == ["2", "2"]
    assert len(told[0]) > 3
    for line in told:
        assert set(line[2:]) <= set(LOOPBACK)
