# SPDX-License-Identifier: Apache-2.0
"""Checks before the first step that all ranks were started with the same model, recipe and settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from math import isqrt

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire._version import __version__
from thinwire.core.comm.base import Comm
from thinwire.core.kernels.decisions import decide
from thinwire.core.replica.shards import describe_shard
from thinwire.errors import MismatchError
from thinwire.worker.parameters import find_alias, named_buffers, named_parameters

Facts = list[tuple[str, str]]
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SAMPLE_SIZE = 65_536
_SUMMED = 1 << 18  # elements that a hash adds at a time


def agree(comm: Comm, facts: Facts, device: torch.device, *, how: str = "were started differently") -> None:
    """Check that the facts are equal on all ranks.

    Args:
        comm: the ranks.
        facts: (name, value) pairs in the same order on every rank.
        device: for the tensors that are sent.
        how: what ranks did whose facts differ, for the error.

    Raises:
        MismatchError: on every rank, naming two ranks and the first difference.
    """
    # A large model has hundreds of kilobytes of facts: 32 bytes of hash are enough where they are equal.
    text = json.dumps(facts).encode()
    words = torch.frombuffer(bytearray(hashlib.sha256(text).digest()), dtype=torch.int64).to(device)
    # The least and the greatest of all ranks, so that thousands of them need not look at each other's.
    least = comm.all_reduce_(torch.cat([words, ~words]), op="min").wait()
    if decide(least, lambda: torch.equal(least[:4], ~least[4:]), most=True, least=True):
        return
    texts = gather_texts(comm, text, device)
    other = next(rank for rank, their in enumerate(texts) if their != texts[0])
    difference = first_difference(json.loads(texts[0]), json.loads(texts[other]), "rank 0", f"rank {other}")
    raise MismatchError(f"{both(comm, 0, other)} {how}: {difference}")


def both(comm: Comm, one: int, other: int) -> str:
    """Two ranks, for an error."""
    names = comm.name(one), comm.name(other)
    return f"ranks {one} and {other}" if names == (f"rank {one}", f"rank {other}") else " and ".join(names)


def fingerprint(tensors: Iterable[Tensor]) -> int:
    """Return a number of the tensors' bits, another one also where values have changed places."""
    total = 0
    for x in tensors:
        if not x.is_meta:
            total = 31 * total + int(hash_of(x))
    return total % (1 << 63)


def sum_of_bits(x: Tensor) -> int:
    """The sum of a tensor's bits as integers, of at most 65,536 elements spread evenly over it; 0 on the meta device.

    Vectors that differ almost surely have different sums, and a vector of zeros has 0.
    """
    if x.is_meta:
        return 0
    sample = x.detach().reshape(-1)
    sample = sample[:: -(-sample.numel() // _SAMPLE_SIZE) or 1].contiguous()
    return int(sample.view(_INTEGERS[min(8, sample.element_size())]).sum(dtype=torch.int64))


def hash_of(x: Tensor) -> Tensor:
    """Return a number of a dense tensor's bits, as an integer tensor on its device."""
    if x.is_meta:
        return x.new_empty((), dtype=torch.int64)
    x = torch.view_as_real(x) if x.is_complex() else x
    bits = x.contiguous().view(-1).view(_INTEGERS[x.element_size()])
    # With the vector as a square, every row and column has a random weight: two changes that cancel in one sum are in
    # two rows or in two columns. A weight for each element would need a second vector.
    side = max(1, isqrt(bits.numel()))
    rows = bits.numel() // side
    square, rest = bits[: rows * side].view(rows, side), bits[rows * side :]
    # A few rows at a time: torch converts all that it adds to 64 bits first.
    groups = square.split(max(1, _SUMMED // side))
    columns = sum((group.sum(0, dtype=torch.int64) for group in groups), bits.new_zeros(side, dtype=torch.int64))
    sums = torch.cat([*(group.sum(1, dtype=torch.int64) for group in groups), columns, rest.long()])
    draw = torch.Generator().manual_seed(0)
    weights = torch.randint(-(1 << 62), 1 << 62, sums.shape, generator=draw, device="cpu")
    return weights.to(sums.device).mul_(sums).sum()


def first_difference(mine: Sequence[Sequence[str]], theirs: Sequence[Sequence[str]], me: str, them: str) -> str:
    """Describe the first fact in which two workers differ; `me` and `them` are their names, such as "rank 0"."""
    for (name, value), (other_name, other_value) in zip(mine, theirs, strict=False):
        if name != other_name:
            return f"{me} has {name} where {them} has {other_name}"
        if value != other_value:
            return f"{name} is {value} on {me} and {other_value} on {them}"
    longer, who = (mine, me) if len(mine) > len(theirs) else (theirs, them)
    return f"only {who} has {longer[min(len(mine), len(theirs))][0]}"


def facts_of(
    model: nn.Module, optimizer: Optimizer, trained: Mapping[str, Tensor], settings: Mapping[str, object]
) -> Facts:
    """Return the facts that must be equal on all ranks, ordered by how many differences they explain.

    Args:
        model: its parameters and buffers are compared by name, shape, dtype and whether they are trained.
        optimizer: its class and the hyperparameters of its groups are compared.
        trained: the parameters that the optimizer updates, by name.
        settings: everything else.
    """
    group_of = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    groups = [
        (f"{key} of optimizer group {i}", str(value.tolist() if isinstance(value, Tensor) else value))
        for i, group in enumerate(optimizer.param_groups)
        for key, value in sorted(group.items())
        if key != "params"
    ]
    parameters = [
        (f"parameter {name}", describe_tensor(p) + (f" in group {group_of[id(p)]}" if name in trained else ""))
        for name, p in named_parameters(model).items()
    ]
    return [
        ("the thinwire version", __version__),
        # Without the build, such as +cpu: machines with different accelerators may train together.
        ("the torch version", torch.__version__.split("+")[0]),
        *((name, str(value)) for name, value in settings.items()),
        ("the optimizer", type(optimizer).__name__),
        # Once it is the same on all ranks, all of them refuse it.
        ("the memory that parameters share", " and ".join(find_alias(model, trained) or ()) or "none"),
        *groups,
        *parameters,
        *((f"buffer {name}", describe_tensor(b)) for name, b in named_buffers(model).items()),
    ]


def gather_texts(comm: Comm, text: bytes, device: torch.device) -> list[bytes]:
    """All-gather byte strings of any length, in the order of ranks."""
    length = torch.tensor([len(text)], dtype=torch.int64, device=device)
    lengths = [int(n.item()) for n in comm.all_gather(length).wait()]
    if not any(lengths):
        return [b""] * len(lengths)
    # Ranks' tensors must have the same size in an all-gather.
    padded = torch.frombuffer(bytearray(text.ljust(max(lengths), b"\0")), dtype=torch.uint8)
    rows = comm.all_gather(padded.to(device)).wait()
    return [row.cpu().numpy().tobytes()[:n] for row, n in zip(rows, lengths, strict=True)]


def describe_tensor(x: Tensor) -> str:
    """Describe a tensor: shape, dtype, whether it is frozen, and which part of it this rank holds."""
    shape = "x".join(str(n) for n in x.shape) or "scalar"
    part = f", {place}" if (place := describe_shard(x)) else ""
    return f"{shape} {str(x.dtype).removeprefix('torch.')}{'' if x.requires_grad else ' frozen'}{part}"
