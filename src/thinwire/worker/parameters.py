# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a model are trained, under which names and learning rates, and which of them share memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from thinwire.core.replica.flat import Segment
from thinwire.core.replica.shards import is_sharded
from thinwire.errors import ConfigError
from thinwire.tensor2d.mesh import Mesh3D
from thinwire.tensor2d.module import placed

_COMPILED = "_orig_mod."


def trained(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """Return the parameters that the optimizer updates, by name, in the model's order; without those of no elements.

    Raises:
        ConfigError: the optimizer holds parameters of another model, none of this one, or ones that are not dense and
            real.
    """
    for name, p in model.named_parameters():
        if is_lazy(p):
            raise ConfigError(
                f"{name} is not initialized: it belongs to a lazy module. attach needs the shapes of all parameters. "
                "Run one forward pass with a batch before you make the optimizer and call attach"
            )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    # There is nothing to send of a parameter without elements, and a dtype that only such have needs no vector.
    named = {name: p for name, p in named_parameters(model).items() if id(p) in held and p.requires_grad and p.numel()}
    foreign = len(held - {id(p) for p in model.parameters()})
    if foreign:
        raise ConfigError(f"the optimizer holds {foreign} parameters that are not the model's. Attach their model")
    if not named:
        raise ConfigError("the optimizer holds no trainable parameter of this model. Pass model.parameters() to it")
    for name, parameter in named.items():
        if parameter.layout != torch.strided:
            raise ConfigError(
                f"{name} has layout {parameter.layout}: only dense parameters can be trained. Use a dense one"
            )
        if parameter.is_complex():
            raise ConfigError(
                f"{name} is of {parameter.dtype}: only real parameters can be trained. Let {name} be "
                "torch.view_as_real(...) of its values, and take torch.view_as_complex of it in forward()"
            )
    return named


def own_name(name: str) -> str:
    """A tensor's name in the model itself, without what `torch.compile` puts in front of the names in its wrapper."""
    return name.replace(_COMPILED, "")


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by the model's own names, each once."""
    return {own_name(name): p for name, p in model.named_parameters()}


def named_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers by the model's own names, each once."""
    return {own_name(name): buffer for name, buffer in model.named_buffers()}


def by_kind(tensors: Iterable[Tensor]) -> dict[tuple[torch.dtype, torch.device], list[Tensor]]:
    """Group tensors by (dtype, device), each group in the order given."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for x in tensors:
        kinds.setdefault((x.dtype, x.device), []).append(x)
    return kinds


def vectors_of(
    model: nn.Module, named: Mapping[str, nn.Parameter], mesh: Mesh3D | None
) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters of each flat vector: one vector per (dtype, device).

    On a mesh with several rows, parameters that are replicated over the rows get vectors of their own.

    Args:
        model: already on the mesh, if there is one.
        named: its trained parameters.
        mesh: the ranks of all copies of the model; None if the model is not split.
    """
    # A codec's scale depends on the entries that are compressed together. Next to sharded entries, which differ from
    # row to row, replicated parameters would be rounded differently in each row, and their copies would drift apart.
    replicated: set[int] = set()
    if mesh is not None and mesh.block.rows > 1:
        replicated = {id(parameter) for parameter, placement in placed(model).values() if placement.replicated}
    for wanted in (False, True):
        chosen = [parameter for parameter in named.values() if (id(parameter) in replicated) == wanted]
        yield from cast("Iterable[list[nn.Parameter]]", by_kind(chosen).values())


def learning_rate(
    optimizer: Optimizer, parameters: list[nn.Parameter], segments: tuple[Segment, ...], x: Tensor
) -> Callable[[], float | Tensor]:
    """A function that reads the current learning rate: a number, or a vector like `x` where groups differ in it.

    For the optimizer of an array it is a matrix [parameters, models].
    """
    group_of = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    indices = [group_of[id(p)] for p in parameters]

    # Read again at every call: schedulers replace the number in the group.
    def read() -> float | Tensor:
        rates = [optimizer.param_groups[i]["lr"] for i in indices]
        if isinstance(rates[0], Tensor) and rates[0].ndim:
            return torch.stack(rates)
        return spread_rates([float(rate) for rate in rates], segments, x)

    return read


def spread_rates(rates: Sequence[float], segments: tuple[Segment, ...], x: Tensor) -> float | Tensor:
    """Return the learning rate of parameters: a number if all have the same, else a vector of dtype and device of `x`.

    Args:
        rates: of each parameter.
        segments: where each of them lies in the vector.
        x: a vector of parameters.
    """
    if len(set(rates)) == 1:
        return rates[0]
    sizes = torch.tensor([segment.size for segment in segments], dtype=torch.int64, device=x.device)
    return torch.tensor(rates, dtype=x.dtype, device=x.device).repeat_interleave(sizes, output_size=segments[-1].stop)


# -- tensors in the same memory ----------------------------------------------------------------------------------------


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
            "the buffer would no longer follow it. Take the view in forward(), or register a copy, made by .clone()"
        )
    raise ConfigError(
        f"parameters {one} and {other} are two objects in the same memory, and attach moves them to memory of its own, "
        "where they would no longer be tied. Share the Parameter object itself, as in decoder.weight = encoder.weight, "
        "and make the optimizer after it"
    )


def find_alias(model: nn.Module, trained: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """Return the names of two tensors that share an element, at least one of them trained; None where there are none.

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
    """Return True if two tensors have a byte in common: columns of one matrix lie between each other and have none."""
    start, stop = min(a.start, b.start), max(a.stop, b.stop)
    used = torch.zeros(stop - start, dtype=torch.bool, device="cpu")
    _bytes_of(a, used, start).fill_(True)
    return bool(_bytes_of(b, used, start).any())


def _bytes_of(place: _Place, memory: Tensor, start: int) -> Tensor:
    """Return the bytes of a tensor as a view of `memory`, which begins at address `start`."""
    size = place.x.element_size()
    # An expanded dimension, of stride 0, is the same element again.
    lengths = [n if stride else 1 for n, stride in zip(place.x.shape, place.x.stride(), strict=True)]
    strides = [stride * size for stride in place.x.stride()]
    return memory.as_strided([*lengths, size], [*strides, 1], place.start - start)
