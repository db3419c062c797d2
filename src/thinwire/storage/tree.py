# SPDX-License-Identifier: Apache-2.0
"""Nested values split into JSON and tensors, and restored exactly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from thinwire.errors import CheckpointError

Json = Any
_RESERVED_KEYS = ("$tensor", "$tuple", "$items")


def pack(value: Any) -> tuple[Json, dict[str, Tensor]]:
    """Split nested dicts, lists and tuples into a JSON tree and its tensors by path.

    Raises:
        CheckpointError: naming the path of something that is neither a tensor nor JSON.
    """
    tensors: dict[str, Tensor] = {}
    return _pack(value, "", tensors), tensors


def _pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Json:
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
        if all(isinstance(k, str) and k not in _RESERVED_KEYS for k in value):
            return {k: _pack(v, f"{path}/{k}", tensors) for k, v in value.items()}
        # JSON has only strings for keys, and an optimizer's state has integers.
        return {"$items": [[_pack(k, path, tensors), _pack(v, f"{path}/{k}", tensors)] for k, v in value.items()]}
    # Python's JSON also writes and reads NaN and infinity.
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(f"{path or 'the value'} is a {type(value).__name__}: only tensors and JSON values are saved")


def unpack(tree: Json, tensors: Mapping[str, Tensor]) -> Any:
    """Restore the value that `pack` split."""
    if isinstance(tree, list):
        return [unpack(v, tensors) for v in tree]
    if not isinstance(tree, dict):
        return tree
    if "$tensor" in tree:
        return tensors[tree["$tensor"]]
    if "$tuple" in tree:
        return tuple(unpack(v, tensors) for v in tree["$tuple"])
    if "$items" in tree:
        return {unpack(k, tensors): unpack(v, tensors) for k, v in tree["$items"]}
    return {k: unpack(v, tensors) for k, v in tree.items()}
