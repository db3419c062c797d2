# SPDX-License-Identifier: Apache-2.0
"""A rendezvous store that does not answer: every call to it has a timeout."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.pool import start_processes
from thinwire import CommTimeoutError, GroupComm
from thinwire.tensor2d.mesh import mesh_2d

TIMEOUT = 2.0


def stop_rank_0_before(connect: Callable[[], object], seconds: float, folder: str) -> str:
    """Rank 0, which hosts the store, stops between `init_process_group` and its first comm."""
    dist.barrier()
    if dist.get_rank() == 0:
        Path(folder, "pid").write_text(str(os.getpid()))
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGSTOP)
        return ""
    time.sleep(0 if seconds else 0.5)
    with pytest.raises(CommTimeoutError) as caught:
        connect()
    return str(caught.value)


def make_comm() -> object:
    return GroupComm(timeout=TIMEOUT)


def make_mesh() -> object:
    return mesh_2d((1, 3), timeout=TIMEOUT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("connect", "seconds", "words"),
    [
        (
            make_comm,
            0.0,
            "before step 0: no answer within 2 s from the rendezvous store; rank 0, which hosts it, is not answering",
        ),
        (
            make_mesh,
            0.0,
            "before step 0: no answer within 2 s from the rendezvous store; rank 0, which hosts it, is not answering",
        ),
        (make_comm, 1.0, "step 0, connecting: no answer within 2 s; rank 0 is not answering (timed out)"),
    ],
    ids=["comm", "mesh", "connecting"],
)
def test_a_store_whose_process_has_stopped_is_named_after_the_timeout(
    connect: Callable[[], object], seconds: float, words: str, tmp_path: Path
) -> None:
    stopped, *survivors = start_processes(3, stop_rank_0_before, connect, seconds, str(tmp_path))
    deadline = time.monotonic() + 30
    try:
        for rank, worker in enumerate(survivors, start=1):
            worker.finish(deadline)
            assert worker.error is None, worker.error
            assert worker.result == f"rank {rank}, {words}"
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGCONT)
        stopped.finish(deadline)
