# SPDX-License-Identifier: Apache-2.0
"""Values that Python reads from tensors, with defaults for meta tensors; and two fast operators for both."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from thinwire.core.kernels.decisions import read_host
from thinwire.core.torch_internals import flatten, foreach

Flag = bool | Tensor
"""A condition: a bool, or a tensor of one element on a GPU, which the host need not wait for."""
_SMALL = 16_384


def all_finite(x: Tensor) -> bool:
    """Return True if no element is NaN or infinite, or `x` is a meta tensor."""
    # A sum with such an element is not finite. The elements are read again only if the sum overflows.
    if x.is_meta:
        return True
    return isfinite(x.sum(dtype=torch.promote_types(x.dtype, torch.float32)).item()) or bool(x.isfinite().all())


def all_finite_each(tensors: Sequence[Tensor]) -> bool:
    """Return True if no element of any tensor is NaN or infinite; all must be on one device."""
    if not tensors or tensors[0].is_meta:
        return True
    read = tensors
    if len(tensors) > 1 and tensors[0].device.type == "cpu":
        # One call per small tensor takes longer than a copy of all of them.
        read = [x for x in tensors if x.numel() > _SMALL]
        small = [x for x in tensors if x.numel() <= _SMALL] if read else list(tensors)
        if small:
            read.append(flatten(small))
    # torch's function for several groups takes longer than the norm of one.
    norm = torch.linalg.vector_norm(read[0]) if len(read) == 1 else get_total_norm(read)
    finite = isfinite(norm.item()) if norm.device.type == "cpu" else read_flags([norm.isfinite()])[0]
    return finite or all(all_finite(x) for x in tensors)


def is_finite(x: Tensor) -> Flag:
    """Return `all_finite(x)` as a flag, which for a tensor of a GPU is computed there."""
    if x.device.type in ("cpu", "meta"):
        return all_finite(x)
    if not x.numel():
        return True
    # The largest absolute value is one pass over memory, cannot overflow, and keeps a NaN.
    return torch.linalg.vector_norm(x.detach(), torch.inf).isfinite()


def finite_flags(tensors: Sequence[Tensor]) -> Tensor:
    """Return whether each of several tensors of one GPU is finite, as a tensor there."""
    inputs = [x.detach() if x.numel() else x.new_zeros(1) for x in tensors]  # no elements have no largest one
    return torch.stack(list(foreach.norm(inputs, torch.inf))).isfinite()


def both(a: Flag, b: Flag) -> Flag:
    """Return whether two flags hold, without reading them."""
    if isinstance(a, bool):
        return a and b
    return b and a if isinstance(b, bool) else a & b


def read_flags(flags: Sequence[Flag]) -> list[bool]:
    """Read flags together: the host waits once for each device."""
    found: list[Flag] = list(flags)
    for device in {flag.device for flag in flags if isinstance(flag, Tensor)}:
        places = [i for i, flag in enumerate(flags) if isinstance(flag, Tensor) and flag.device == device]
        values = read_host(torch.stack([flag for flag in flags if isinstance(flag, Tensor) and flag.device == device]))
        for place, value in zip(places, values.tolist(), strict=True):
            found[place] = value
    return [bool(flag) for flag in found]


# Torch's own versions support meta tensors too, but would take longer than the rest of a dry run.


def take(x: Tensor, indices: Tensor) -> Tensor:
    """Return the elements of a vector at these indices."""
    return torch.empty(indices.numel(), dtype=x.dtype, device=x.device) if x.is_meta else x[indices]


def join(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate one or more vectors of one dtype."""
    if parts[0].is_meta:
        return torch.empty(sum(part.numel() for part in parts), dtype=parts[0].dtype, device=parts[0].device)
    return torch.cat(list(parts))
