# SPDX-License-Identifier: Apache-2.0
"""Compare the structure of models, and find their tensors and dropout rates."""

from __future__ import annotations

import types
import weakref
from collections import ChainMap
from collections.abc import Callable, Generator, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from thinwire.core.torch_internals import (
    DROPOUTS,
    RNN_CACHES,
    compiled_module,
    has_gradient_hooks,
    hooks_of,
    tensor_dicts,
)
from thinwire.errors import ConfigError

# Their rates may differ between models: the dropout rules take one per model.
_DROPOUTS = (*DROPOUTS, nn.MultiheadAttention)
_INTERNAL = set(vars(nn.Module())) | set(RNN_CACHES)
# What they refer to differs between all models.
_WEAK = (weakref.ref, weakref.ProxyType, weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
# By both ids, to keep the objects alive.
Pairs = MutableMapping[tuple[int, int], tuple[Any, Any]]
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
    """Return True if a module is one of the roots or inside one; the empty path is the whole model."""
    return any(not root or path == root or path.startswith(f"{root}.") for root in roots)


def difference(
    one: nn.Module, other: nn.Module, skip: Sequence[str] = (), *, whole: tuple[nn.Module, nn.Module] | None = None
) -> str | None:
    """Describe the first difference in structure between two models; None if there is none.

    Args:
        one: a model.
        other: another.
        skip: paths of submodules that are not compared.
        whole: the models of which they are parts; None if they are models.
    """
    ones, others = (dict(model.named_modules(remove_duplicate=False)) for model in (one, other))
    known = _alike(*(whole or (one, other)))
    ones, others = ({p: m for p, m in every.items() if not within(p, skip)} for every in (ones, others))
    for path in [*ones, *(path for path in others if path not in ones)]:
        a, b = ones.get(path), others.get(path)
        label = repr(path) if path else "the model itself"
        if a is None or b is None:
            found = a if b is None else b
            return f"layer {label} ({type(found).__name__}) is in one of them only"
        unlike = _difference_of_modules(a, b, known)
        if unlike is not None:
            return f"layer {label} ({type(a).__name__}): {unlike}"
    ties = [[(ref.key, ref.name) for ref in tensor_refs(model, skip)] for model in (one, other)]
    return None if ties[0] == ties[1] else "they tie their weights differently"


def _alike(one: nn.Module, other: nn.Module) -> Pairs:
    """Return the modules that two models have at the same place: attributes may refer to them."""
    others = dict(other.named_modules(remove_duplicate=False))
    pairs = [(a, others[path]) for path, a in one.named_modules(remove_duplicate=False) if path in others]
    return {(id(a), id(b)): (a, b) for a, b in pairs}


def _difference_of_modules(a: nn.Module, b: nn.Module, known: Pairs) -> str | None:
    if _class_of(a) is not _class_of(b):
        return f"the other's is {type(b).__name__}"
    if is_parametrized(a) != is_parametrized(b):
        return "it is parametrised in one of them only"
    for word, mine, theirs in zip(("parameter", "buffer"), tensor_dicts(a), tensor_dicts(b), strict=True):
        for name in sorted({*mine, *theirs}):
            found = [_description(holder.get(name)) for holder in (mine, theirs)]
            if found[0] != found[1]:
                return f"{word} {name} is {found[0]} in one and {found[1]} in the other"
    if not _equal(hooks_of(a), hooks_of(b), ChainMap({}, known)):
        return "its hooks are others in the other"
    mine, theirs = _settings(a), _settings(b)
    for name in sorted({*mine, *theirs}):
        if not _equal(mine.get(name), theirs.get(name), ChainMap({}, known)):
            name, one, other = _unlike(name, mine.get(name), theirs.get(name), known)
            if isinstance(one, Tensor) and isinstance(other, Tensor):
                return (
                    f"{name} is an attribute with other values, and neither a parameter nor a buffer; register it as "
                    "one (weight and spectral norm: those of torch.nn.utils.parametrizations)"
                )
            return f"{name} is {_short(one)} in one and {_short(other)} in the other"
    return None


def _class_of(module: nn.Module) -> type[nn.Module]:
    """Return the module's class; torch makes a class of its own for each module that it parametrises."""
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


def _unlike(name: str, a: Any, b: Any, known: Pairs) -> tuple[str, Any, Any]:
    """Return the innermost attribute in which two unequal attributes differ, by its full name, and both values."""
    if type(a) is type(b) and hasattr(a, "__dict__") and not isinstance(a, Tensor | Enum):
        known = ChainMap({(id(a), id(b)): (a, b)}, known)
        mine, theirs = vars(a), vars(b)
        for key in {**mine, **theirs}:
            if not _equal(mine.get(key), theirs.get(key), ChainMap({}, known)):
                return _unlike(f"{name}.{key}", mine.get(key), theirs.get(key), known)
    return name, a, b


def _equal(a: Any, b: Any, known: Pairs) -> bool:
    """Return True if two attributes are equal; objects are if their own attributes are, or by `==` if they have none.

    Args:
        a: an attribute.
        b: of another model.
        known: pairs that are compared elsewhere, or were compared; objects may refer to each other in circles.
    """
    if a is b or (id(a), id(b)) in known or isinstance(a, _WEAK):
        return True
    if type(a) is not type(b):
        return isinstance(a, int | float) and isinstance(b, int | float) and a == b
    if isinstance(a, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, _SIMPLE):
        return bool(a == b)
    known[id(a), id(b)] = a, b  # the objects too, so that no other gets their ids
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(_equal(a[key], b[key], known) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_equal(*pair, known) for pair in zip(a, b, strict=True))
    if isinstance(a, partial):
        return all(_equal(getattr(a, name), getattr(b, name), known) for name in ("func", "args", "keywords"))
    if isinstance(a, types.FunctionType):
        if a.__code__ is not b.__code__:
            return False
        # Two lambdas of one constructor have the same code, and may close over different values.
        cells = [[cell.cell_contents for cell in function.__closure__ or ()] for function in (a, b)]
        return _equal(a.__defaults__, b.__defaults__, known) and _equal(cells[0], cells[1], known)
    if isinstance(a, types.MethodType):
        # Each model's method is bound to its own module, which is compared by itself.
        return a.__func__ is b.__func__ and (isinstance(a.__self__, nn.Module) or _equal(a.__self__, b.__self__, known))
    if isinstance(a, Enum) or not hasattr(a, "__dict__"):
        return _equal_values(a, b)
    return _equal(vars(a), vars(b), known)


def _equal_values(a: Any, b: Any) -> bool:
    """Whether values are equal by `==`, also that of arrays; what can only be told apart by identity is taken to be."""
    if isinstance(a, Enum) or getattr(a, "shape", None) != getattr(b, "shape", None):
        return False
    if type(a).__eq__ is object.__eq__:
        return True
    try:
        found = a == b
        return bool(found.all() if hasattr(found, "all") else found)
    except Exception:  # of the value's own comparison
        return True


def check_same_structure(models: Sequence[nn.Module], loop: Sequence[str]) -> None:
    """Refuse models that differ outside the layers that are looped over.

    Raises:
        ConfigError: it names the models, the layer, the difference and the fix.
    """
    for index, model in enumerate(models):
        for path, module in model.named_modules():
            if compiled_module(module) is not None:
                raise ConfigError(
                    f"layer {path!r} of model {index} is compiled: its code would not be that of all models. Fuse the "
                    "models before torch.compile"
                )
            if any(hooks_of(module)[2:]):
                raise ConfigError(
                    f"layer {path!r} of model {index} has a backward hook, which no array runs. Use hooks of the "
                    "array's parameters after fuse"
                )
        for name, tensor in tensors(model).items():
            if has_gradient_hooks(tensor):
                raise ConfigError(
                    f"{name} of model {index} has a hook of its gradient, and the array's parameter is another tensor. "
                    "Register it with the array's, [models, ...], after fuse: array.named_parameters() has the names"
                )
    for index, model in enumerate(models[1:], 1):
        found = difference(models[0], model, loop) or _difference_of_hooks(models[0], model, loop)
        if found is not None:
            raise ConfigError(
                f"models 0 and {index} differ in structure: {found}. Only weights, buffers and dropout rates may. Fuse "
                'models of one structure, or loop over the layers that differ: fuse(..., loop=["that.layer"])'
            )


def _difference_of_hooks(one: nn.Module, other: nn.Module, paths: Sequence[str]) -> str | None:
    """Describe other hooks of layers that may differ: the first model's run around those of all models."""
    known = _alike(one, other)
    for path in paths:
        mine, theirs = (hooks_of(model.get_submodule(path)) for model in (one, other))
        if not _equal(mine, theirs, ChainMap({}, known)):
            return f"layer {path!r} has other hooks in the other, and the first model's run for all"
    return None


def dropout_rates(models: Sequence[nn.Module]) -> Iterator[tuple[str, str, list[float]]]:
    """Find all dropout rates: the layer's path, the attribute, and each model's value."""
    for path, module in models[0].named_modules():
        if isinstance(module, _DROPOUTS):
            name = "dropout" if isinstance(module, nn.MultiheadAttention) else "p"
            yield path, name, [float(getattr(model.get_submodule(path), name)) for model in models]


@contextmanager
def drawing_after(seed: int) -> Generator[None]:
    """Within it, torch draws as a separate run after `torch.manual_seed`; its own generator does not change."""
    with torch.random.fork_rng():
        torch.set_rng_state(torch.Generator().manual_seed(seed).get_state())
        yield


def build(
    factory: Callable[..., nn.Module], hyperparameters: Sequence[Mapping[str, Any]], seeds: Sequence[int] | None
) -> tuple[list[nn.Module], list[Tensor] | None]:
    """Make every model; with seeds, each as after `torch.manual_seed`, and return torch's generator state after it."""
    if seeds is None:
        return [factory(**values) for values in hyperparameters], None
    models: list[nn.Module] = []
    states: list[Tensor] = []
    for seed, values in zip(seeds, hyperparameters, strict=True):
        with drawing_after(seed):
            models.append(factory(**values))
            states.append(torch.get_rng_state())
    return models, states
