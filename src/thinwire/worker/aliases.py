# SPDX-License-Identifier: Apache-2.0
"""Tensors of a model that share memory without being one object, which attach would silently untie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from thinwire.errors import ConfigError
from thinwire.replica.shards import is_sharded
from thinwire.worker.parameters import named_buffers, named_parameters


class _Place(NamedTuple):
    """Where a tensor lies in its storage, in bytes."""

    storage: tuple[torch.device, int]
    start: int
    stop: int
    name: str
    x: Tensor
    trained: bool


def check_aliases(model: nn.Module, trained: Mapping[str, Tensor]) -> None:
    """Refuse a trained parameter that shares memory with another parameter or a buffer.

    Raises:
        ConfigError: naming both, and how to tie them.
    """
    found = find_alias(model, trained)
    if found is None:
        return
    one, other = found
    buffers = named_buffers(model)
    if other in buffers or one in buffers:
        buffer, parameter = (other, one) if other in buffers else (one, other)
        raise ConfigError(
            f"buffer {buffer} lies in the memory of parameter {parameter}, which attach moves to memory of its own: "
            "the buffer would no longer follow it; take the view in forward(), or register a copy, made by .clone()"
        )
    raise ConfigError(
        f"parameters {one} and {other} are two objects in the same memory, and attach moves them to memory of its own, "
        "where they would no longer be tied; share the Parameter object itself, as in decoder.weight = encoder.weight, "
        "and make the optimizer after it"
    )


def find_alias(model: nn.Module, trained: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """The names of two tensors that share an element, at least one of them trained; None where there are none.

    Tensors in one storage that have no element in common, as those of LSTMs on a GPU, are no aliases.
    """
    moved = {id(x) for x in trained.values()}
    # A buffer that is a Parameter, the same object, is one tensor.
    parameters, buffers = named_parameters(model), named_buffers(model)
    tensors = {id(x): (name, x) for name, x in chain(buffers.items(), parameters.items())}
    places = [place for name, x in tensors.values() if (place := _place(name, x, id(x) in moved))]
    # Names in the model's order, parameters first, whatever the addresses, which differ between ranks.
    order = {name: i for i, name in enumerate(chain(parameters, buffers))}
    pairs = [sorted((a.name, b.name), key=order.__getitem__) for a, b in _near(places) if _share(a, b)]
    if not pairs:
        return None
    one, other = min(pairs, key=lambda pair: [order[name] for name in pair])
    return one, other


def _place(name: str, x: Tensor, trained: bool) -> _Place | None:
    if is_sharded(x) or x.layout != torch.strided or x.is_meta or not x.numel():
        return None
    try:
        storage, address = x.untyped_storage().data_ptr(), x.data_ptr()
    except RuntimeError:  # subclasses that are made of other tensors have no memory of their own
        return None
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    stop = address + (last + 1) * x.element_size()
    return _Place((x.device, storage), address, stop, name, x, trained) if storage else None


def _near(places: list[_Place]) -> Iterator[tuple[_Place, _Place]]:
    """Pairs whose first to last bytes overlap, at least one of them trained."""
    reaching: list[_Place] = []
    for place in sorted(places, key=lambda each: (str(each.storage), each.start)):
        reaching = [each for each in reaching if each.storage == place.storage and each.stop > place.start]
        yield from ((each, place) for each in reaching if each.trained or place.trained)
        reaching.append(place)


def _share(a: _Place, b: _Place) -> bool:
    """Whether two tensors have a byte in common: columns of one matrix lie between each other and have none."""
    start, stop = min(a.start, b.start), max(a.stop, b.stop)
    used = torch.zeros(stop - start, dtype=torch.bool, device="cpu")
    _bytes_of(a, used, start).fill_(True)
    return bool(_bytes_of(b, used, start).any())


def _bytes_of(place: _Place, memory: Tensor, start: int) -> Tensor:
    """The bytes of a tensor as a view of `memory`, which begins at address `start`."""
    size = place.x.element_size()
    # An expanded dimension, of stride 0, is the same element again.
    lengths = [n if stride else 1 for n, stride in zip(place.x.shape, place.x.stride(), strict=True)]
    strides = [stride * size for stride in place.x.stride()]
    return memory.as_strided([*lengths, size], [*strides, 1], place.start - start)
