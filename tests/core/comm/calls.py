# SPDX-License-Identifier: Apache-2.0
"""Calls that every comm must support, with their results on each rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thinwire import Comm

SIZES = [1, 2, 3, 4]


def numbers(*tensors: Tensor) -> list[Any]:
    return [x.tolist() for x in tensors]


def total(comm: Comm) -> list[Any]:
    x = torch.arange(3.0) + comm.rank
    result = comm.all_reduce_(x).wait()
    assert result.data_ptr() == x.data_ptr()
    return numbers(x)


def total_in_dtypes(comm: Comm) -> list[Any]:
    """Sums in every dtype of gradients, votes and counters."""
    dtypes = [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]
    return numbers(*(comm.all_reduce_(torch.tensor([1, 2]).to(dtype)).wait() for dtype in dtypes))


def part_of_a_vector(comm: Comm) -> list[Any]:
    whole = torch.zeros(10)
    whole[3:5] = comm.rank + 1
    comm.all_reduce_(whole[3:5]).wait()
    return numbers(whole)


def from_the_last(comm: Comm) -> list[Any]:
    return numbers(comm.broadcast_(torch.full((2,), float(comm.rank)), comm.size - 1).wait())


def flags_from_the_first(comm: Comm) -> list[Any]:
    return numbers(comm.broadcast_(torch.tensor([comm.rank == 0, True, False]), 0).wait())


def phases_from_the_first(comm: Comm) -> list[Any]:
    return [complex(z) for z in comm.broadcast_(torch.tensor([1j * comm.rank, 2.0]), 0).wait()]


def rows(comm: Comm) -> list[Any]:
    return numbers(*comm.all_gather(torch.tensor([[comm.rank, 7]], dtype=torch.uint8)).wait())


def columns(comm: Comm) -> list[Any]:
    """A matrix whose memory is not in order."""
    return numbers(*comm.all_gather((torch.arange(4.0).view(2, 2) + comm.rank).t()).wait())


def deal(comm: Comm) -> list[Any]:
    """Rank i sends i + j + 1 elements to rank j."""
    sent = [torch.full((comm.rank + j + 1,), float(10 * comm.rank + j)) for j in range(comm.size)]
    return numbers(*comm.all_to_all(sent, [j + comm.rank + 1 for j in range(comm.size)]).wait())


def deal_some(comm: Comm) -> list[Any]:
    """Only rank 0 sends, and nothing to itself."""
    counts = [j if comm.rank == 0 else 0 for j in range(comm.size)]
    sent = [torch.full((n,), 5, dtype=torch.uint8) for n in counts]
    return numbers(*comm.all_to_all(sent, [comm.rank if j == 0 else 0 for j in range(comm.size)]).wait())


def around(comm: Comm) -> list[Any]:
    x = torch.tensor([float(comm.rank)])
    if comm.size == 1:
        return numbers(*comm.send_recv(x, [], []).wait())
    return numbers(*comm.send_recv(x, [(comm.rank + 1) % comm.size], [(comm.rank - 1) % comm.size]).wait())


def with_everyone(comm: Comm) -> list[Any]:
    others = [j for j in range(comm.size) if j != comm.rank]
    return numbers(*comm.send_recv(torch.tensor([comm.rank]), others, list(reversed(others))).wait())


def to_the_first(comm: Comm) -> list[Any]:
    """Edges that are not symmetric, and a rank that sends nothing."""
    dst = [] if comm.rank == 0 else [0]
    src = list(range(1, comm.size)) if comm.rank == 0 else []
    return numbers(*comm.send_recv(torch.tensor([float(comm.rank)]), dst, src).wait())


def several_at_once(comm: Comm) -> list[Any]:
    in_flight = [comm.all_reduce_(torch.tensor([float(comm.rank), i])) for i in range(5)]
    return numbers(*(work.wait() for work in reversed(in_flight)))


Expected = Callable[[int, int], list[Any]]
CALLS: dict[str, tuple[Callable[[Comm], list[Any]], Expected]] = {
    "total": (total, lambda r, n: [[n * i + n * (n - 1) / 2 for i in range(3)]]),
    "total in dtypes": (total_in_dtypes, lambda r, n: [[n, 2 * n]] * 6),
    "part of a vector": (part_of_a_vector, lambda r, n: [[0] * 3 + [n * (n + 1) / 2] * 2 + [0] * 5]),
    "from the last": (from_the_last, lambda r, n: [[n - 1, n - 1]]),
    "flags": (flags_from_the_first, lambda r, n: [[True, True, False]]),
    "phases": (phases_from_the_first, lambda r, n: [0j, 2 + 0j]),
    "rows": (rows, lambda r, n: [[[i, 7]] for i in range(n)]),
    "columns": (columns, lambda r, n: [[[i, 2 + i], [1 + i, 3 + i]] for i in range(n)]),
    "deal": (deal, lambda r, n: [[10 * j + r] * (j + r + 1) for j in range(n)]),
    "deal some": (deal_some, lambda r, n: [[5] * (r if j == 0 else 0) for j in range(n)]),
    "around": (around, lambda r, n: [[(r - 1) % n]] if n > 1 else []),
    "with everyone": (with_everyone, lambda r, n: [[j] for j in reversed(range(n)) if j != r]),
    "to the first": (to_the_first, lambda r, n: [[j] for j in range(1, n)] if r == 0 else []),
    "several at once": (several_at_once, lambda r, n: [[n * (n - 1) / 2, n * i] for i in reversed(range(5))]),
}


def figures(comm: Comm) -> dict[str, float]:
    """The bytes that a comm's meter counts for some calls."""
    n, rank = comm.size, comm.rank
    comm.all_reduce_(torch.zeros(10)).wait()
    comm.all_reduce_(torch.zeros(10, dtype=torch.bfloat16)).wait()
    comm.broadcast_(torch.zeros(10), 0).wait()
    comm.all_gather(torch.zeros(3)).wait()
    comm.all_to_all([torch.zeros(j + 1) for j in range(n)], [rank + 1] * n).wait()
    comm.send_recv(torch.zeros(6), [(rank + 1) % n], [(rank - 1) % n]).wait()
    assert comm.meter.messages == 6
    assert math.isclose(comm.meter.payload_bytes, sum(comm.meter.by_operation.values()), rel_tol=1e-12)
    return comm.meter.by_operation
