# SPDX-License-Identifier: Apache-2.0
"""One data loader for all models of an array, each with its own random augmentation."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from thinwire.arrays.fusion.batch import Each
from thinwire.core.torch_internals import pytree
from thinwire.errors import ConfigError


class MemberBatches:
    """Read each batch once, and augment it for each model with the model's own random numbers.

    Each model gets what a separate run gets that seeds PyTorch, NumPy and Python's `random` with the model's seed and
    calls `augment` on the batches of a loader of its own. The numbers continue from one epoch to the next. The random
    states of the program are unchanged.

    Args:
        loader: yields the same batches in every separate run; a `DataLoader` has its own `generator`.
        augment: called with a batch as the loader yields it, once for each model; returns the model's batch. Tensors
            that it returns unchanged are shared by all models, others become `Each`. It must not change its input.
        seeds: one for each model.
        device: where the batches are copied; None leaves them.

    Raises:
        ConfigError: a `DataLoader` draws from the stream that is the models', or there are no seeds.

    Example:
        >>> import torch
        >>> from thinwire.arrays import fusion
        >>> loader = [(torch.zeros(2, 3), torch.tensor([0, 1]))]
        >>> noisy = lambda batch: (batch[0] + torch.randn(2, 3), batch[1])
        >>> (images, labels), = fusion.MemberBatches(loader, noisy, seeds=[5, 6, 7])
        >>> tuple(images.tensor.shape), labels.tolist()
        ((3, 2, 3), [0, 1])
    """

    def __init__(
        self,
        loader: Iterable[Any],
        augment: Callable[[Any], Any],
        seeds: Sequence[int],
        *,
        device: torch.device | str | None = None,
    ) -> None:
        if isinstance(loader, DataLoader) and loader.generator is None:
            raise ConfigError(
                "the DataLoader has generator=None: it would draw its order from the random numbers of one model. All "
                "models must see the same batches. Pass generator=torch.Generator().manual_seed(0) to the DataLoader"
            )
        if not len(seeds):
            raise ConfigError("seeds=[] is empty: there must be one seed for each model. Pass range(array.size)")
        self.loader, self.augment, self.device = loader, augment, device
        self._streams = [_Stream(seed) for seed in seeds]

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Yield the loader's batches, with `Each` for what differs between models."""
        for batch in self.loader:
            views: list[Any] = []
            for stream in self._streams:
                with stream.current():
                    views.append(self.augment(batch))
            yield self._merged(views)

    def _merged(self, views: Sequence[Any]) -> Any:
        trees = [pytree.tree_flatten(view) for view in views]
        if any(shape != trees[0][1] for _, shape in trees):
            raise ConfigError(f"augment returned {trees[0][1]} for one model and another structure for another")
        columns = zip(*(leaves for leaves, _ in trees), strict=True)
        return pytree.tree_unflatten([self._leaf(column) for column in columns], trees[0][1])

    def _leaf(self, column: Sequence[Any]) -> Any:
        first = column[0]
        if not isinstance(first, Tensor):
            if any(leaf != first for leaf in column):
                raise ConfigError(
                    f"augment returned {first!r} for one model and another value for another: only tensors may differ. "
                    "Return a tensor"
                )
            return first
        if all(leaf is first for leaf in column):
            return first if self.device is None else first.to(self.device, non_blocking=True)
        stacked = torch.stack(list(column))
        return Each(stacked if self.device is None else stacked.to(self.device, non_blocking=True))

    def state_dict(self) -> dict[str, Any]:
        """Return where each model's random numbers stand, as tensors and JSON values."""
        return {"members": [stream.state() for stream in self._streams]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned; start the loader at the batch where it was saved.

        Raises:
            ConfigError: it has another number of models.
        """
        members = state_dict["members"]
        if len(members) != len(self._streams):
            raise ConfigError(
                f"the state has {len(members)} models: there are {len(self._streams)} seeds. Pass as many"
            )
        for stream, state in zip(self._streams, members, strict=True):
            stream.load(state)


class _Stream:
    """The random states of one model's separate run."""

    def __init__(self, seed: int) -> None:
        self._torch = torch.Generator().manual_seed(seed).get_state()
        self._python = random.Random(seed).getstate()
        # NumPy's seeds have 32 bits, as in the workers of a DataLoader.
        self._numpy: Any = np.random.RandomState(seed % 2**32).get_state()

    @contextmanager
    def current(self) -> Generator[None]:
        """Inside, the program draws from this stream."""
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        try:
            yield
        finally:
            self._torch, self._python, self._numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
            torch.set_rng_state(before[0])
            random.setstate(before[1])
            np.random.set_state(before[2])

    def state(self) -> dict[str, Any]:
        kind, words, *rest = self._numpy
        version, own, gauss = self._python
        return {
            "torch": self._torch.clone(),
            "python": [version, torch.tensor(own, dtype=torch.int64, device="cpu"), gauss],
            "numpy": [kind, torch.tensor(words.tolist(), dtype=torch.int64, device="cpu"), *rest],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        version, own, gauss = state["python"]
        kind, words, *rest = state["numpy"]
        self._torch = state["torch"].clone()
        self._python = (version, tuple(own.tolist()), gauss)
        self._numpy = (kind, np.array(words.tolist(), dtype=np.uint32), *rest)
