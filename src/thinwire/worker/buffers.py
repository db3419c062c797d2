# SPDX-License-Identifier: Apache-2.0
"""Tensors of the model that are not trained: sent from rank 0 at the start, and made equal inside `consensus()`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from thinwire.comm.base import Comm
from thinwire.errors import ConfigError
from thinwire.kernels.decisions import decide
from thinwire.replica.flat import copy_each_, flatten, lay_out, views
from thinwire.replica.shards import local
from thinwire.worker.handshake import agree, describe_tensor, hash_of
from thinwire.worker.parameters import by_kind, named_buffers, named_parameters
from thinwire.worker.state import WorkerState

_COMPRESSED_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_COMPRESSED_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)
_SMALLEST_SUMMED = 2  # bytes of an element; torch does not add float8 numbers


def broadcast_others(worker: WorkerState) -> None:
    """Replace buffers and frozen parameters by rank 0's.

    Raises:
        ConfigError: on all ranks, if a tensor that cannot be received in place, such as a sparse one, differs between
            ranks.
    """
    flat = {id(p) for parameters, _ in worker.layouts for p in parameters}
    others = {name: local(p.data) for name, p in named_parameters(worker.model).items() if id(p) not in flat}
    others |= named_buffers(worker.model)
    fixed = {name: x for name, x in others.items() if not is_writable(x)}
    _refuse_different(worker, fixed)
    for group in by_kind(x for name, x in others.items() if name not in fixed).values():
        _broadcast_(worker.comm, group)


def average_buffers(worker: WorkerState) -> None:
    """Make all buffers equal on all ranks.

    A buffer with the same bits on all ranks, such as a mask, is left unchanged. Of the others, buffers of floating
    dtype become their mean over ranks, computed in fp32 at least, and the rest (integers, complex numbers, float8)
    become rank 0's.

    Raises:
        MismatchError: on all ranks, if a buffer has another shape on another rank, as caches may that grow.
        ConfigError: on all ranks, if a sparse buffer differs between ranks.
    """
    named = named_buffers(worker.model)
    if not named or worker.comm.size == 1:
        return
    # Vectors of different sizes would end a process inside Gloo without an error.
    facts = [(f"buffer {name}", describe_tensor(buffer)) for name, buffer in named.items()]
    agree(worker.comm, facts, worker.replicas[0].x.device, how="have different buffers")
    named = _different(worker, named)
    _refuse_different(worker, {name: x for name, x in named.items() if not is_writable(x)}, compared=True)
    for group in by_kind(named.values()).values():
        if group[0].is_floating_point() and group[0].element_size() >= _SMALLEST_SUMMED:
            _average_(worker.comm, group)
        else:
            _broadcast_(worker.comm, group)


def _average_(comm: Comm, group: list[Tensor]) -> None:
    vector = flatten(group, layout := lay_out([("", x) for x in group]))
    # Divided first, so that the sum of large numbers whose mean is finite does not overflow.
    exact = vector.to(torch.promote_types(vector.dtype, torch.float32)).div_(comm.size)
    comm.all_reduce_(exact).wait()
    copy_each_(group, views(exact, layout))


def _broadcast_(comm: Comm, group: list[Tensor]) -> None:
    vector = flatten(group, layout := lay_out([("", x) for x in group]))
    # As bytes, because backends do not know every dtype.
    comm.broadcast_(vector.view(torch.uint8), 0).wait()
    copy_each_(group, views(vector, layout))


def _different(worker: WorkerState, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose bits are not equal on all ranks; 16 bytes are sent for each tensor, all in one message."""
    device = worker.replicas[0].x.device
    hashes = torch.stack([_hash_of(name, x).to(device) for name, x in named.items()])
    n = len(named)
    least = worker.comm.all_reduce_(torch.cat([hashes, ~hashes]), op="min").wait()
    equal = decide(least, lambda: (least[:n] == ~least[n:]).tolist(), most=[False] * n, least=[True] * n)
    return {name: x for (name, x), same in zip(named.items(), equal, strict=True) if not same}


def _refuse_different(worker: WorkerState, named: Mapping[str, Tensor], *, compared: bool = False) -> None:
    """Refuse tensors that differ between ranks.

    Args:
        worker: of this rank.
        named: tensors that cannot be received in place.
        compared: whether they are known to differ.

    Raises:
        ConfigError: naming the first of them, on all ranks.
    """
    for name, x in (named if compared or not named else _different(worker, named)).items():
        kind = "shares memory between its elements" if x.layout == torch.strided else f"has layout {x.layout}"
        raise ConfigError(
            f"{name} {kind} and differs between ranks. Such a buffer or frozen parameter is neither averaged nor sent. "
            "Make it equal on all ranks, or keep it outside the model"
        )


def is_writable(x: Tensor) -> bool:
    """Whether values can be copied into a tensor: it is dense, and each element has memory of its own."""
    if x.layout != torch.strided:
        return False
    return all(stride != 0 or n == 1 for n, stride in zip(x.shape, x.stride(), strict=True)) or not x.numel()


def _hash_of(name: str, x: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for piece in _pieces(name, x.detach()):
        total = total.mul(31).add(hash_of(piece))
    return total


def _pieces(name: str, x: Tensor) -> Sequence[Tensor]:
    """The dense tensors that a tensor consists of."""
    if x.layout == torch.strided:
        return [x]
    if x.layout == torch.sparse_coo:
        x = x.coalesce()
        return [x.indices(), x.values()]
    if x.layout in _COMPRESSED_ROWS:
        return [x.crow_indices(), x.col_indices(), x.values()]
    if x.layout in _COMPRESSED_COLUMNS:
        return [x.ccol_indices(), x.row_indices(), x.values()]
    raise ConfigError(
        f"{name} has layout {x.layout}. Buffers must be dense or sparse, so that ranks can compare them. Keep it "
        "outside the model"
    )
