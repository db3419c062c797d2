# SPDX-License-Identifier: Apache-2.0
"""The model that all workers agree on, put in place of a worker's own for a while; ranks that are lost or unequal."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from thinwire.core.comm.base import Comm
from thinwire.core.kernels.decisions import decide
from thinwire.core.replica.flat import copy_each_, flatten, lay_out, views
from thinwire.core.replica.shards import local
from thinwire.errors import ConfigError, MismatchError, PeerLostError
from thinwire.worker.annexes import Elastic
from thinwire.worker.compatibility import has_other_result
from thinwire.worker.guards import check_loaded, check_parameters, is_trained, moved_parameters, refuse
from thinwire.worker.handshake import agree, describe_tensor, fingerprint, hash_of, sum_of_bits
from thinwire.worker.parameters import by_kind, named_buffers, named_parameters
from thinwire.worker.state import WorkerState

T = TypeVar("T")

_COMPRESSED_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_COMPRESSED_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)
_SMALLEST_SUMMED = 2  # bytes of an element; torch does not add float8 numbers
_LOGGER = logging.getLogger("thinwire")
# A share of the norm. Rounding differences of five hundred steps are far smaller in fp32. In 16 bits a single digit is
# more: the limit there is the largest share of a number that its last digit can be, so that one digit of each may
# differ.
_MOST = 1e-5


@contextmanager
def evaluating(worker: WorkerState) -> Generator[None]:
    """Put the optimizer's result in place of the parameters that it trains, and restore these at the end, bitwise."""
    optimizer: Any = worker.optimizer
    if hasattr(optimizer, "evaluating"):
        with optimizer.evaluating():
            yield
        return
    swaps = has_other_result(optimizer)
    held = [p for parameters, _ in worker.layouts for p in parameters] if swaps else []
    own = [p.detach().clone() for p in held]
    if swaps:
        optimizer.eval()
    try:
        yield
    finally:
        if swaps:
            optimizer.train()
        with torch.no_grad():
            for p, x in zip(held, own, strict=True):
                p.copy_(x)


@contextmanager
def lends(
    worker: WorkerState, together: Callable[[Callable[[], None]], None], *, averaged: bool = False
) -> Generator[None]:
    """Swap in the consensus of all workers for this worker's tensors, and restore them at the end.

    Args:
        worker: of this rank; every rank must enter.
        together: runs what needs all ranks, as the worker does.
        averaged: whether the parameters are the consensus already, so that only buffers are sent.
    """
    worker.shards.read()
    own = [replica.x.clone() for replica in worker.replicas]
    others = {name: buffer.clone() for name, buffer in named_buffers(worker.model).items()}
    worker.lent += 1
    try:
        together(lambda: _agree(worker, others, averaged=averaged))
        worker.shards.write()
        torch.clear_autocast_cache()  # has the parameters of before, if the loop is inside `torch.autocast`
        yield
    finally:
        worker.lent -= 1
        with torch.no_grad():
            for replica, x in zip(worker.replicas, own, strict=True):
                replica.x.copy_(x)
            for p, view in [] if worker.lent else moved_parameters(worker):
                p.data = view
            worker.shards.write()
            torch.clear_autocast_cache()
            for name, x in _untrained(worker).items():
                # A cache may have grown, or come new, in a forward pass.
                if name in others and x.shape == others[name].shape and is_writable(x):
                    x.copy_(others[name])


def _agree(worker: WorkerState, others: dict[str, Tensor], *, averaged: bool) -> None:
    with torch.no_grad():
        if worker.common is not None:
            for replica, x in zip(worker.replicas, worker.common(), strict=True):
                replica.x.copy_(x)
        elif not averaged:
            for replica in worker.replicas:
                replica.x.copy_(worker.strategy.average(replica))
        average_others(worker, others)


def check_call(worker: WorkerState, call: str, *, loads: bool = False) -> None:
    """Refuse a call inside `consensus()`, after parameters have moved since `attach`, or after weights were loaded.

    Args:
        worker: of this rank.
        call: its name.
        loads: whether the call replaces the weights and the strategy's state.

    Raises:
        ConfigError: on all ranks.
    """
    refuse_while_lent(worker, call)
    check_parameters(worker)
    if loads and torch.is_inference_mode_enabled():
        raise ConfigError(
            f"{call} inside torch.inference_mode(): the loaded state could not be trained. Call it outside"
        )
    if not loads:
        check_loaded(worker)


def refuse_while_lent(worker: WorkerState, call: str) -> None:
    """Refuse calls that would save, change or train the parameters inside `consensus()`.

    Raises:
        ConfigError: on all ranks, inside `consensus()`.
    """
    if worker.lent:
        refuse(
            worker,
            f"{call} within consensus(), where the model temporarily has the parameters that all workers agree on. "
            "Leave the `with` block first",
        )


# -- calls that all ranks make -----------------------------------------------------------------------------------------


def check_in_step(worker: WorkerState, call: str, *, compares: bool = False) -> bool:
    """Check that all ranks make this call at the same step.

    Returns:
        Whether parameters were compared, and are equal on all ranks; the same on all ranks.
    """
    comm, traits = worker.comm, worker.strategy.traits
    number = fingerprint(r.x for r in worker.replicas) if compares or traits.equal_replicas else 0
    in_step = comm.in_step
    # Workers that go at their own pace may call this only where all are at one step.
    comm.in_step = in_step or (traits.meets_every > 1 and call != "detach()")
    try:
        with worker.account.apart():
            odd = comm.check_in_step(call, fingerprint=number).wait()
    finally:
        comm.in_step = in_step
    if odd and traits.equal_replicas:
        settle(worker, odd)
    return compares and not odd


def wait_in_step(worker: WorkerState, call: str, *, compares: bool = False) -> bool:
    """Check that all ranks make this call at the same step, and wait for all messages in flight.

    Returns:
        Whether parameters were compared, and are equal on all ranks.
    """
    # A message of two stages sends its second one while it is waited for, which must not meet another rank's next
    # call. Workers at their own pace reach the same step only by waiting.
    if worker.strategy.traits.timing_dependent:
        worker.wait_pending()
    equal = False
    if not lost_ranks(worker):  # the others have come to the same step by waiting
        equal = check_in_step(worker, call, compares=compares)
    worker.wait_pending()
    return equal


# -- lost ranks --------------------------------------------------------------------------------------------------------


def lost_ranks(worker: WorkerState) -> list[int]:
    """Return the lost ranks that the strategy continues without."""
    return sorted({rank for replica in worker.replicas for rank in worker.strategy.lost(replica)})


def check_all_there(worker: WorkerState, call: str) -> None:
    """Refuse a call that needs all ranks, where some are lost.

    Raises:
        PeerLostError: with the ranks and the possible actions.
    """
    if lost := lost_ranks(worker):
        comm, be = worker.comm, "is" if len(lost) == 1 else "are"
        raise PeerLostError(
            f"{comm.name(comm.rank)}, step {worker.step}, {call}: {comm.names(lost)} {be} lost, and this needs all "
            "ranks. All others hold the same parameters after detach() and at consensus(): write "
            "model.state_dict() on one of them, and restart from it"
        )


# -- tensors that are not trained --------------------------------------------------------------------------------------


def broadcast_others(worker: WorkerState) -> None:
    """Replace buffers and frozen parameters that differ between ranks by rank 0's.

    Raises:
        ConfigError: on all ranks, if a tensor that cannot be received in place, such as a sparse one, differs between
            ranks.
    """
    flat = {id(p) for parameters, _ in worker.layouts for p in parameters}
    others = {name: local(p.data) for name, p in named_parameters(worker.model).items() if id(p) not in flat}
    others |= named_buffers(worker.model)
    others = different(worker, others, at_start=True)
    _refuse_fixed(others)
    for group in by_kind(others.values()).values():
        _broadcast_(worker.comm, group)


def _untrained(worker: WorkerState) -> dict[str, Tensor]:
    """Return the buffers, and the parameters that no attached optimizer trains, by name."""
    parameters = named_parameters(worker.model).items()
    return named_buffers(worker.model) | {name: local(p.data) for name, p in parameters if not is_trained(p)}


def average_others(worker: WorkerState, own: dict[str, Tensor]) -> None:
    """Make all buffers and frozen parameters equal on all ranks.

    A tensor with the same bits on all ranks, such as a mask, is left unchanged. Of the others, tensors of floating
    dtype become their mean over ranks, computed in fp32 at least, and the rest (integers, complex numbers, float8)
    become rank 0's.

    Args:
        worker: of this rank.
        own: copies by name; those of changed parameters, such as a teacher's, are added.

    Raises:
        MismatchError: on all ranks, if a buffer has another shape on another rank, as caches may that grow.
        ConfigError: on all ranks, if a sparse buffer differs between ranks.
    """
    named = _untrained(worker)
    if not named or worker.comm.size == 1 or lost_ranks(worker):
        return
    # Vectors of different sizes would end a process inside Gloo without an error.
    facts = [(f"buffer {name}", describe_tensor(x)) for name, x in named.items()]
    agree(worker.comm, facts, worker.replicas[0].x.device, how="have different buffers")
    # Frozen parameters may be a large model: they are equal from the start on, and a change shows in a sample.
    named = different(worker, named, sampled=named.keys() - named_buffers(worker.model).keys())
    _refuse_fixed(named)
    own.update({name: x.clone() for name, x in named.items() if name not in own})
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


def different(
    worker: WorkerState, named: Mapping[str, Tensor], *, at_start: bool = False, sampled: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return the tensors whose bits are not equal on all ranks; 16 bytes are sent for each tensor, all in one message.

    Args:
        worker: of this rank.
        named: the tensors.
        at_start: whether these are the initial ones, which are equal in a dry run, since all ranks make one model.
        sampled: the names of those of which at most 65,536 elements are compared; equal in a dry run.
    """
    if not named or worker.comm.size == 1:
        return {}
    device = worker.replicas[0].x.device
    hashes = torch.stack([_hash_of(name, x, samples=name in sampled).to(device) for name, x in named.items()])
    n = len(named)
    least = worker.comm.all_reduce_(torch.cat([hashes, ~hashes]), op="min").wait()
    most = [at_start or name in sampled for name in named]
    equal = decide(least, lambda: (least[:n] == ~least[n:]).tolist(), most=most, least=[True] * n)
    return {name: x for (name, x), same in zip(named.items(), equal, strict=True) if not same}


def _refuse_fixed(named: Mapping[str, Tensor]) -> None:
    """Refuse the first of the tensors, which differ between ranks, that cannot be received in place; on all ranks."""
    for name, x in named.items():
        if is_writable(x):
            continue
        kind = "shares memory between its elements" if x.layout == torch.strided else f"has layout {x.layout}"
        raise ConfigError(
            f"{name} {kind} and differs between ranks. Such a buffer or frozen parameter is neither averaged nor sent. "
            "Make it equal on all ranks, or keep it outside the model"
        )


def is_writable(x: Tensor) -> bool:
    """Return True if values can be copied into a tensor: it is dense, and each element has memory of its own."""
    if x.layout != torch.strided:
        return False
    return all(stride != 0 or n == 1 for n, stride in zip(x.shape, x.stride(), strict=True)) or not x.numel()


def _hash_of(name: str, x: Tensor, *, samples: bool) -> Tensor:
    if samples and x.layout == torch.strided:
        return torch.tensor(sum_of_bits(x), dtype=torch.int64, device="cpu")
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for piece in _pieces(name, x.detach()):
        total = total.mul(31).add(hash_of(piece))
    return total


def _pieces(name: str, x: Tensor) -> Sequence[Tensor]:
    """Return the dense tensors that a tensor consists of."""
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


# -- parameters that differ by rounding --------------------------------------------------------------------------------


def settle(worker: WorkerState, odd: Sequence[int]) -> None:
    """If parameters of some ranks differ by rounding, copy rank 0's to all; a collective call.

    Gradients have the same bits on all ranks. But values that each rank computes from them, such as the norm for
    clipping, may differ in the last digit on other processors or with other numbers of threads.

    The cause of a difference is unknown. Settings of a rank that change the parameters by no more than rounding between
    two comparisons are corrected too, with the same warning. In 16 bits that is much: a last digit is up to 0.8 % of a
    number (bfloat16) or 0.1 % (float16).

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
                    "others by more than rounding, and this strategy keeps them equal. Give all ranks the same "
                    "weights, optimizer settings and learning rates"
                )
            )
        for replica, first in pairs:
            replica.x.copy_(first)
    worker.shards.write()
    if comm.rank == 0 and not worker.told_rounding:
        _LOGGER.warning(
            "step %d: the parameters of %s differ from those of the others by rounding, as on processors of different "
            "kinds or with other numbers of threads; all ranks continue with rank 0's, now and whenever this is "
            "found; if their machines are alike, compare their settings",
            *(worker.step, comm.names(odd)),
        )
    worker.told_rounding = True


def _distance(x: Tensor, first: Tensor) -> float:
    """Return the norm of the difference, over that of the vector; infinite where one of them is not finite."""
    gap, whole = (torch.linalg.vector_norm(each, dtype=torch.float64).item() for each in (x - first, first))
    if gap == 0:
        return 0.0
    return gap / whole if whole and math.isfinite(gap / whole) else math.inf


def _allowed(x: Tensor) -> float:
    return max(_MOST, torch.finfo(x.dtype).eps)


def together(worker: WorkerState, views: Elastic | None, call: Callable[[], T]) -> T:
    """Run what all ranks do together; elastic workers run it again if one of them is lost in it.

    A failed backward pass is ended before, in a round of its own: other workers may have been in one meanwhile.
    """
    worker.end_failed_pass()
    return call() if views is None else views.together(call)
