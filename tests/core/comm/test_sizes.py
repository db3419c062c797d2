# SPDX-License-Identifier: Apache-2.0
"""Processes that are out of step, and so make calls of different sizes at the same time."""

from __future__ import annotations

import pytest
import torch

from tests.pool import run_processes
from thinwire import CommTimeoutError, GroupComm


def unlike(call: str) -> str:
    """Rank 0 sends and awaits more than the others in the same call."""
    comm = GroupComm(timeout=2.0)
    x = torch.zeros(40 if comm.rank == 0 else 24, dtype=torch.uint8)
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    with pytest.raises(CommTimeoutError) as caught:
        if call == "all_gather":
            comm.all_gather(x).wait()
        elif call == "all_to_all":
            comm.all_to_all([x] * comm.size, [x.numel()] * comm.size).wait()
        else:
            comm.send_recv(x, others, others).wait()
    return str(caught.value)


@pytest.mark.parametrize("call", ["all_gather", "all_to_all", "send_recv"])
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_calls_of_different_sizes_end_no_process_and_are_named_at_the_timeout(call: str, size: int) -> None:
    for rank, text in enumerate(run_processes(size, unlike, call)):
        assert text.startswith(f"rank {rank}, step 0, {call}"), text
