# SPDX-License-Identifier: Apache-2.0
"""One loader gives each model the batches of a separate run."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from thinwire.arrays.fusion import Each, MemberBatches, fuse
from thinwire.errors import ConfigError

SEEDS = [3, 2**40 + 1, 11]


class Images(Dataset[Any]):
    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.reads += 1
        return torch.full((1, 4, 4), float(index)), index % 3


def augment(batch: Any) -> Any:
    """Flip, move and scale by the numbers of PyTorch, Python and NumPy."""
    images, labels = batch
    images = images.flip(-1) if random.random() < 0.5 else images
    return {"images": images + torch.randn(images.shape) * float(np.random.rand()), "labels": labels}


def loader(images: Images) -> DataLoader[Any]:
    return DataLoader(images, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(0))


def separate(seed: int, epochs: int) -> Iterator[dict[str, Tensor]]:
    """The batches of one model's own run, which leaves the states of the test as they were."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        batches = loader(Images())
        yield from [augment(batch) for _ in range(epochs) for batch in batches]
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])


def test_each_model_gets_the_batches_of_a_run_of_its_own_and_each_example_is_read_once() -> None:
    images = Images()
    batches = MemberBatches(loader(images), augment, SEEDS)
    before = torch.get_rng_state(), random.getstate()
    found = [batch for _ in range(2) for batch in batches]
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert images.reads == 20 and len(batches) == 3
    for slot, seed in enumerate(SEEDS):
        for mine, wanted in zip(found, separate(seed, 2), strict=True):
            assert torch.equal(mine["images"].tensor[slot], wanted["images"])
            assert torch.equal(mine["labels"], wanted["labels"])
    array = fuse([torch.nn.Flatten() for _ in SEEDS])
    assert isinstance(found[0]["images"], Each) and array(found[0]["images"]).shape == (3, 4, 16)


def test_batches_continue_from_a_saved_state() -> None:
    first, second = (MemberBatches(loader(Images()), augment, SEEDS) for _ in range(2))
    list(first)
    state = first.state_dict()
    json.dumps(state, default=Tensor.tolist)
    second.load_state_dict(state)
    list(second.loader)  # the loader's own order is not in the state
    for mine, wanted in zip(second, first, strict=True):
        assert torch.equal(mine["images"].tensor, wanted["images"].tensor)
    with pytest.raises(ConfigError, match="the state has 3 models: there are 1 seeds"):
        MemberBatches([], augment, [1]).load_state_dict(state)


def test_what_would_mix_models_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"generator=None.*torch\.Generator\(\)\.manual_seed\(0\)"):
        MemberBatches(DataLoader(Images()), augment, SEEDS)
    with pytest.raises(ConfigError, match=r"seeds=\[\] is empty"):
        MemberBatches([], augment, [])
    with pytest.raises(ConfigError, match="only tensors may differ"):
        list(MemberBatches([0], lambda _: random.random(), SEEDS))
    with pytest.raises(ConfigError, match="another structure"):
        list(MemberBatches([0], lambda _: [torch.ones(1)] * (1 + int(random.random() * 1000)), SEEDS))
