# SPDX-License-Identifier: Apache-2.0
"""Compare the structure of models, and find their tensors and dropout rates."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from thinwire.errors import ConfigError

# Their rates may differ between models: the dropout rules take one per model.
_DROPOUTS = (nn.modules.dropout._DropoutNd, nn.MultiheadAttention)  # pyright: ignore[reportPrivateUsage]
_INTERNAL = set(vars(nn.Module())) | {"_flat_weights", "_flat_weight_refs", "_flat_weights_names"}
_SIMPLE = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type)


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Where a module holds a tensor.

    Args:
        holder: the module's dictionary of parameters or buffers.
        key: the tensor's key there.
        name: the full name under which the tensor is first found; tied tensors have the same name.
        trained: whether it is a parameter.
    """

    holder: dict[str, Tensor | None]
    key: str
    name: str
    trained: bool


def tensor_dicts(module: nn.Module) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """Return a module's dictionaries of parameters and of buffers."""
    attributes = vars(module)
    return attributes["_parameters"], attributes["_buffers"]


def tensor_refs(model: nn.Module, skip: Sequence[str] = ()) -> list[TensorRef]:
    """Find all tensors, also tied ones, in the order of `named_parameters`; without some submodules."""
    found: list[TensorRef] = []
    first: dict[int, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if within(path, skip):
            continue
        for holder, trained in zip(tensor_dicts(module), (True, False), strict=True):
            for key, tensor in holder.items():
                if tensor is not None:
                    name = first.setdefault(id(tensor), f"{path}.{key}".lstrip("."))
                    found.append(TensorRef(holder, key, name, trained))
    # A module that is used twice is found twice.
    return list({(id(ref.holder), ref.key): ref for ref in found}.values())


def tensors(model: nn.Module, skip: Sequence[str] = ()) -> dict[str, Tensor]:
    """Return each tensor once, by its full name."""
    found: dict[str, Tensor] = {}
    for ref in tensor_refs(model, skip):
        tensor = ref.holder[ref.key]
        assert tensor is not None
        found.setdefault(ref.name, tensor)
    return found


def within(path: str, roots: Sequence[str]) -> bool:
    """Whether a module is one of the roots or inside one; the empty path is the whole model."""
    return any(not root or path == root or path.startswith(f"{root}.") for root in roots)


def difference(one: nn.Module, other: nn.Module, skip: Sequence[str] = ()) -> str | None:
    """Describe the first difference in structure between two models; None if there is none.

    Args:
        one: a model.
        other: another.
        skip: paths of submodules that are not compared.
    """
    ones, others = (dict(model.named_modules(remove_duplicate=False)) for model in (one, other))
    ones, others = ({p: m for p, m in every.items() if not within(p, skip)} for every in (ones, others))
    for path in [*ones, *(path for path in others if path not in ones)]:
        a, b = ones.get(path), others.get(path)
        label = repr(path) if path else "the model itself"
        if a is None or b is None:
            found = a if b is None else b
            return f"layer {label} ({type(found).__name__}) is in one of them only"
        unlike = _difference_of_modules(a, b)
        if unlike is not None:
            return f"layer {label} ({type(a).__name__}): {unlike}"
    ties = [[(ref.key, ref.name) for ref in tensor_refs(model, skip)] for model in (one, other)]
    return None if ties[0] == ties[1] else "they tie their weights differently"


def _difference_of_modules(a: nn.Module, b: nn.Module) -> str | None:
    if _class_of(a) is not _class_of(b):
        return f"the other's is {type(b).__name__}"
    if is_parametrized(a) != is_parametrized(b):
        return "it is parametrised in one of them only"
    for word, mine, theirs in zip(("parameter", "buffer"), tensor_dicts(a), tensor_dicts(b), strict=True):
        for name in sorted({*mine, *theirs}):
            found = [_description(holder.get(name)) for holder in (mine, theirs)]
            if found[0] != found[1]:
                return f"{word} {name} is {found[0]} in one and {found[1]} in the other"
    mine, theirs = _settings(a), _settings(b)
    for name in sorted({*mine, *theirs}):
        if not _equal(mine.get(name), theirs.get(name)):
            if isinstance(mine.get(name), Tensor) and isinstance(theirs.get(name), Tensor):
                return (
                    f"{name} is an attribute with other values, and neither a parameter nor a buffer; register it as "
                    "one (weight and spectral norm: those of torch.nn.utils.parametrizations)"
                )
            return f"{name} is {_short(mine.get(name))} in one and {_short(theirs.get(name))} in the other"
    return None


def _class_of(module: nn.Module) -> type[nn.Module]:
    """The module's class; torch makes a class of its own for each module that it parametrises."""
    kind = type(module)
    return kind.__bases__[0] if is_parametrized(module) else kind


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _description(tensor: Tensor | None) -> str:
    if tensor is None:
        return "absent"
    frozen = "" if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else ", frozen"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}{frozen}"


def _settings(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that a module's forward may depend on, besides its tensors."""
    skip = _INTERNAL - {"training"}
    if isinstance(module, _DROPOUTS):
        skip = skip | {"p", "dropout"}
    return {name: value for name, value in vars(module).items() if name not in skip}


def _equal(a: Any, b: Any) -> bool:
    """Whether two attributes are equal; objects of unknown types are taken to be."""
    if type(a) is not type(b):
        return isinstance(a, int | float) and isinstance(b, int | float) and a == b
    if isinstance(a, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, _SIMPLE):
        return bool(a == b)
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, partial):
        return _equal(a.func, b.func) and _equal(a.args, b.args) and _equal(a.keywords, b.keywords)
    if isinstance(a, types.FunctionType):
        if a.__code__ is not b.__code__:
            return False
        # Two lambdas of one constructor have the same code, and may close over different values.
        cells = [[cell.cell_contents for cell in function.__closure__ or ()] for function in (a, b)]
        return _equal(a.__defaults__, b.__defaults__) and _equal(*cells)
    return True


def check_same_structure(models: Sequence[nn.Module], loop: Sequence[str]) -> None:
    """Refuse models that differ outside the layers that are looped over.

    Raises:
        ConfigError: it names the models, the layer, the difference and the fix.
    """
    for index, model in enumerate(models[1:], 1):
        found = difference(models[0], model, loop)
        if found is not None:
            raise ConfigError(
                f"models 0 and {index} differ in structure: {found}; only weights, buffers and dropout rates may. Fuse "
                'models of one structure, or loop over the layers that differ: fuse(..., loop=["that.layer"])'
            )


def dropout_rates(models: Sequence[nn.Module]) -> Iterator[tuple[str, str, list[float]]]:
    """Find all dropout rates: the layer's path, the attribute, and each model's value."""
    for path, module in models[0].named_modules():
        if isinstance(module, _DROPOUTS):
            name = "dropout" if isinstance(module, nn.MultiheadAttention) else "p"
            yield path, name, [float(getattr(model.get_submodule(path), name)) for model in models]


def build(
    factory: Callable[..., nn.Module], hyperparameters: Sequence[Mapping[str, Any]], seeds: Sequence[int] | None
) -> tuple[list[nn.Module], list[Tensor] | None]:
    """Make every model; with seeds, each as after `torch.manual_seed`, and return torch's generator state after it."""
    if seeds is None:
        return [factory(**values) for values in hyperparameters], None
    models: list[nn.Module] = []
    states: list[Tensor] = []
    for seed, values in zip(seeds, hyperparameters, strict=True):
        # The models must be those of separate runs, and torch's own generator must not change.
        with torch.random.fork_rng():
            torch.set_rng_state(torch.Generator().manual_seed(seed).get_state())
            models.append(factory(**values))
            states.append(torch.get_rng_state())
    return models, states
