# SPDX-License-Identifier: Apache-2.0
"""Nested values split into JSON and tensors, and restored exactly."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire._version import __version__
from thinwire.errors import CheckpointError

Json = Any
FORMAT = 2
"""The format of the states that this version writes. Files without a number have format 1."""
HEADER = "/header"
_HEADER_BYTES = 4096
_RESERVED_KEYS = ("$tensor", "$tuple", "$items", "$sparse")
# Allowed factories of a defaultdict: only these functions have names that can be read back safely.
_FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (bool, dict, float, int, list, set, str, tuple)
}


def pack(value: Any) -> tuple[Json, dict[str, Tensor]]:
    """Split nested dicts, lists and tuples into a JSON tree and its tensors by path.

    A `Counter`, `OrderedDict` or `defaultdict` comes back as one.

    Raises:
        CheckpointError: naming the path of something that is neither a tensor nor JSON, or of a dict of another class.
    """
    tensors: dict[str, Tensor] = {}
    return _pack(value, "", tensors), tensors


def _pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Json:
    if isinstance(value, Tensor) and value.layout == torch.sparse_coo:
        value = value.detach().coalesce()
        return {
            "$sparse": list(value.shape),
            "indices": _pack(value.indices(), f"{path}/indices", tensors),
            "values": _pack(value.values(), f"{path}/values", tensors),
        }
    if isinstance(value, Tensor) and value.layout != torch.strided:
        raise CheckpointError(
            f"{path or 'the value'} has layout {value.layout}: only dense and COO tensors are saved. Convert it with "
            "to_sparse_coo()"
        )
    if isinstance(value, Tensor):
        # The paths of {"a": {"b": x}} and {"a/b": x} are equal.
        name = path if path not in tensors else f"{path} {len(tensors)}"
        # A copy, since safetensors refuses tensors that share memory.
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"$tensor": name}
    if isinstance(value, tuple):
        return {"$tuple": [_pack(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]}
    if isinstance(value, list):
        return [_pack(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]
    if isinstance(value, Mapping):
        kind = _kind_of(value, path)
        if not kind and all(isinstance(k, str) and k not in _RESERVED_KEYS for k in value):
            return {k: _pack(v, f"{path}/{k}", tensors) for k, v in value.items()}
        # JSON has only strings for keys, and an optimizer's state has integers.
        items = [[_pack(k, path, tensors), _pack(v, f"{path}/{k}", tensors)] for k, v in value.items()]
        # Beside a reserved key, so that no dict with a key "kind" is taken for it; versions without it read a dict.
        return {"$items": items, **kind}
    # Python's JSON also writes and reads NaN and infinity.
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(f"{path or 'the value'} is a {type(value).__name__}: only tensors and JSON values are saved")


def _kind_of(value: Mapping[Any, Any], path: str) -> dict[str, str | None]:
    """Return the additional data of a mapping that is more than a dict; empty for a dict."""
    if type(value) is dict:
        return {}
    if type(value) is Counter or type(value) is OrderedDict:
        return {"kind": type(value).__name__}
    if type(value) is defaultdict:
        factory = value.default_factory
        names = [name for name, known in _FACTORIES.items() if known is factory]
        if factory is None or names:
            return {"kind": "defaultdict", "factory": names[0] if names else None}
        raise CheckpointError(
            f"{path or 'the value'} is a defaultdict of {factory!r}: only those of {', '.join(_FACTORIES)} are saved. "
            "Save dict(...) of it"
        )
    raise CheckpointError(
        f"{path or 'the value'} is a {type(value).__name__}, and would come back as a plain dict. Save dict(...) of it"
    )


def unpack(tree: Json, tensors: Mapping[str, Tensor]) -> Any:
    """Restore the value that `pack` split.

    Raises:
        CheckpointError: a dict is of a kind that `pack` does not write.
    """
    if isinstance(tree, list):
        return [unpack(v, tensors) for v in tree]
    if not isinstance(tree, dict):
        return tree
    if "$tensor" in tree:
        return tensors[tree["$tensor"]]
    if "$sparse" in tree:
        indices, values = (unpack(tree[part], tensors) for part in ("indices", "values"))
        # Indices from a damaged or forged file could lie outside the tensor.
        return torch.sparse_coo_tensor(
            indices, values, tree["$sparse"], dtype=values.dtype, check_invariants=True, is_coalesced=True, device="cpu"
        )
    if "$tuple" in tree:
        return tuple(unpack(v, tensors) for v in tree["$tuple"])
    if "$items" in tree:
        items = {unpack(k, tensors): unpack(v, tensors) for k, v in tree["$items"]}
        return _of_kind(items, tree.get("kind"), tree.get("factory"))
    return {k: unpack(v, tensors) for k, v in tree.items()}


def to_tensors(value: Any) -> dict[str, Tensor]:
    """Return the tensors of a nested value by path, with the JSON tree as a tensor of bytes under "/header".

    Raises:
        CheckpointError: as `pack`.
    """
    tree, tensors = pack(value)
    text = json.dumps({"format": FORMAT, "thinwire": __version__, "tree": tree}).encode()
    # `torch.distributed.checkpoint` loads in place: padded, the header of an equal value mostly has the same size.
    padded = text.ljust(-(-len(text) // _HEADER_BYTES) * _HEADER_BYTES)
    return {HEADER: torch.frombuffer(bytearray(padded), dtype=torch.uint8), **tensors}


def from_tensors(what: str, tensors: Mapping[str, Tensor]) -> Any:
    """Restore the value that `to_tensors` returned; `what` names it in errors.

    Raises:
        CheckpointError: a later version of thinwire has written it. A damaged value raises any error.
    """
    header = json.loads(tensors[HEADER].cpu().numpy().tobytes())
    check_format(what, header)
    return unpack(header["tree"], tensors)


def to_bytes(value: Any) -> Tensor:
    """Return a nested value as bytes, a vector of uint8 on the CPU.

    Raises:
        CheckpointError: as `pack`.
    """
    from safetensors.torch import save  # here, so that `import thinwire` needs torch alone

    return torch.frombuffer(bytearray(save(to_tensors(value))), dtype=torch.uint8)


def from_bytes(data: Tensor) -> Any:
    """Restore the value that `to_bytes` returned the bytes of."""
    from safetensors.torch import load

    with torch.device("cpu"):  # safetensors makes empty tensors on the default device
        return from_tensors("the state", load(data.numpy().tobytes()))


def check_format(what: str, header: Mapping[str, Any]) -> None:
    """Refuse a state that a later version of thinwire has written in a format of its own.

    Args:
        what: the state, for the error.
        header: with the `format`, and the version of `thinwire` that wrote it.

    Raises:
        CheckpointError: with both versions.
    """
    if header.get("format", 1) > FORMAT:
        raise CheckpointError(
            f"{what}: has checkpoint format {header['format']!r}, written by thinwire {header.get('thinwire')!r}. "
            f"This version of thinwire ({__version__}) reads formats up to {FORMAT}. Update thinwire"
        )


def _of_kind(items: dict[Any, Any], kind: object, factory: object) -> dict[Any, Any]:
    if kind is None:  # also in files of versions that wrote every mapping as a dict
        return items
    if kind == "Counter":
        return Counter(items)
    if kind == "OrderedDict":
        return OrderedDict(items)
    if kind == "defaultdict" and (factory is None or factory in _FACTORIES):
        return defaultdict(None if factory is None else _FACTORIES[str(factory)], items)
    raise CheckpointError(f"a dict is of kind {kind!r} over {factory!r}, which this version of thinwire does not know")
