# SPDX-License-Identifier: Apache-2.0
"""Nested values split into JSON and tensors, and restored."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, UserDict, defaultdict
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.rules import for_each
from thinwire import CheckpointError
from thinwire.core.storage.tree import pack, unpack

TENSORS = st.builds(
    lambda n, dtype: torch.arange(n).to(dtype),
    st.integers(0, 3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8]),
)
TEXTS = st.text(max_size=4) | st.sampled_from(["$tensor", "$tuple", "$items", "$sparse", "a", "a/b", "b"])
KEYS = TEXTS | st.integers(-2, 2)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4) | TENSORS
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter)
        | st.dictionaries(KEYS, inner, max_size=3).map(lambda items: defaultdict(list, items))
    ),
    max_leaves=12,
)


def same(x: Any, y: Any) -> bool:
    """Equal in type and value at every level."""
    if isinstance(x, Tensor):
        return isinstance(y, Tensor) and x.dtype == y.dtype and torch.equal(x, y)
    if type(x) is not type(y):
        return False
    if isinstance(x, dict):
        return list(x) == list(y) and all(same(x[k], y[k]) for k in x)
    if isinstance(x, list | tuple):
        return len(x) == len(y) and all(same(a, b) for a, b in zip(x, y, strict=True))
    return bool(x == y)


@given(VALUES)
def test_a_packed_value_is_restored_through_json(value: Any) -> None:
    tree, tensors = pack(value)
    assert same(unpack(json.loads(json.dumps(tree)), tensors), value)


@for_each([math.nan, math.inf, -math.inf, -0.0, 0.1 + 0.2, 5e-324, 2**80])
def test_numbers_are_restored_to_the_last_bit(value: float) -> None:
    tree, tensors = pack({"x": value})
    back = unpack(json.loads(json.dumps(tree)), tensors)["x"]
    assert repr(back) == repr(value)


def test_tensors_are_copied_and_named_by_their_path() -> None:
    x = torch.ones(2, 3).t()
    tree, tensors = pack({"state": {0: [x]}})
    assert list(tensors) == ["/state/0/0"]
    assert tensors["/state/0/0"].is_contiguous()
    x.fill_(5)
    assert bool((unpack(tree, tensors)["state"][0][0] == 1).all())


def test_tensors_with_equal_paths_get_different_names() -> None:
    value = {"a": {"b": torch.tensor(1), 1: torch.tensor(2), "1": torch.tensor(3)}, "a/b": torch.tensor(4)}
    tree, tensors = pack(value)
    assert same(unpack(tree, tensors), value)


@for_each([object(), {1, 2}, b"bytes", 1j, print])
def test_what_is_neither_tensor_nor_json_is_refused_by_its_path(value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"/extra/1/here is a {type(value).__name__}: only tensors and JSON"):
        pack({"extra": [0, {"here": value}]})


@for_each([None, bool, dict, float, int, list, set, str, tuple])
def test_a_defaultdict_goes_on_with_what_its_missing_keys_begin_with(factory: Any) -> None:
    tree, tensors = pack(defaultdict(factory, a=1))
    back = unpack(json.loads(json.dumps(tree)), tensors)
    assert type(back) is defaultdict
    assert back == {"a": 1}
    assert back.default_factory is factory


class OwnCounter(Counter[int]):
    """A class of the user's own."""


@for_each([MappingProxyType({"a": 1}), UserDict({"a": 1}), OwnCounter([1])])
def test_a_mapping_of_another_class_is_refused_with_what_to_save_instead(value: Any) -> None:
    wanted = rf"/extra is a {type(value).__name__}, and would come back as a plain dict. Save dict\(...\) of it"
    with pytest.raises(CheckpointError, match=wanted):
        pack({"extra": value})
    with pytest.raises(CheckpointError, match=r"/extra is a defaultdict of .*OwnCounter.*: only those of bool, dict"):
        pack({"extra": defaultdict(OwnCounter)})


def test_what_earlier_versions_wrote_is_read_as_they_wrote_it() -> None:
    assert unpack({"$items": [[3, 1], [5, 1]]}, {}) == {3: 1, 5: 1}
    assert unpack({"kind": "Counter", "factory": "int"}, {}) == {"kind": "Counter", "factory": "int"}


@for_each([{"kind": "eval"}, {"kind": "defaultdict", "factory": "exec"}, {"kind": []}])
def test_a_kind_that_is_not_known_is_refused(kind: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="which this version of thinwire does not know"):
        unpack({"$items": [], **kind}, {})


def test_a_sparse_tensor_is_restored() -> None:
    x = torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse()
    tree, tensors = pack({"x": x})
    back = unpack(json.loads(json.dumps(tree)), tensors)["x"]
    assert back.layout == torch.sparse_coo
    assert torch.equal(back.to_dense(), x.to_dense())


def test_indices_outside_a_sparse_tensor_are_refused() -> None:
    tree, tensors = pack({"x": torch.eye(3).to_sparse()})
    tree["x"]["$sparse"] = [2, 2]
    with pytest.raises(RuntimeError, match="inconsistent with indices"):
        unpack(tree, tensors)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_another_sparse_layout_is_refused_by_its_path() -> None:
    with pytest.raises(CheckpointError, match=r"/x has layout torch.sparse_csr: .* to_sparse_coo"):
        pack({"x": torch.eye(3).to_sparse_csr()})
