# SPDX-License-Identifier: Apache-2.0
"""Parameters that a strategy keeps equal, and that differ by rounding, as between processors of different kinds."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.errors import MismatchError
from thinwire.worker.state import WorkerState

_LOGGER = logging.getLogger("thinwire")
# Of the norm. What is rounded otherwise in five hundred steps is far less in fp32. In 16 bits a single digit is more:
# the limit there is the largest share of a number that its last digit can be, so that one digit of each may differ.
_MOST = 1e-5


def settle(worker: WorkerState, odd: Sequence[int]) -> None:
    """Where the parameters of some ranks differ by rounding, let all go on with rank 0's; every rank calls.

    Gradients are the same bits on all ranks. But what each computes of them by itself, such as the norm by which they
    are clipped, has another last digit on a processor of another kind, or with another number of threads.

    Where a difference comes from cannot be seen in it: settings of a rank that are wrong by so little that they change
    the parameters by no more than rounding does, until they are compared, are put right too, and told in the same
    words. In 16 bits that is most: there a last digit is up to 0.8% of a number (bfloat16) or 0.1% (float16).

    Args:
        worker: of this rank.
        odd: the ranks whose parameters are not those of most.

    Raises:
        MismatchError: on all ranks, if they differ by more.
    """
    comm = worker.comm
    worker.shards.read()
    with torch.no_grad():
        firsts = [comm.broadcast_(replica.x.clone(), 0).wait() for replica in worker.replicas]
        pairs = list(zip(worker.replicas, firsts, strict=True))
        shares = [_distance(replica.x, first) / _allowed(first) for replica, first in pairs]
        # NaN too is more than is allowed; and all ranks decide by the same number. Replicas may be on several devices.
        own = torch.tensor([max(shares)], dtype=torch.float32, device=comm.check_device)
        share = torch.stack(comm.all_gather(own).wait()).amax().item()
        if not share <= 1:
            comm.raise_on_all(
                MismatchError(
                    f"step {worker.step}: the parameters of {comm.names(odd)} differ from those of the "
                    "others by more than rounding, and this strategy keeps them equal; give all ranks the same "
                    "weights, optimizer settings and learning rates"
                )
            )
        for replica, first in pairs:
            replica.x.copy_(first)
    worker.shards.write()
    if comm.rank == 0 and not worker.told_rounding:
        _LOGGER.warning(
            "step %d: the parameters of %s differ from those of the others by rounding, as on processors of different "
            "kinds or with other numbers of threads; all ranks go on with rank 0's, now and whenever this is found; if "
            "their machines are alike, compare their settings",
            *(worker.step, comm.names(odd)),
        )
    worker.told_rounding = True


def _distance(x: Tensor, first: Tensor) -> float:
    """The norm of the difference, over that of the vector; infinite where one of them is not finite."""
    gap, whole = (torch.linalg.vector_norm(each, dtype=torch.float64).item() for each in (x - first, first))
    if gap == 0:
        return 0.0
    return gap / whole if whole and math.isfinite(gap / whole) else math.inf


def _allowed(x: Tensor) -> float:
    return max(_MOST, torch.finfo(x.dtype).eps)
