# SPDX-License-Identifier: Apache-2.0
"""The common base of arrays of models and arrays of adapters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor, nn

from thinwire.arrays.fusion.store import Selection
from thinwire.core.modes import evaluation_mode
from thinwire.errors import ConfigError


class ModelArray(ABC):
    """Members whose parameters are stacked along the first axis."""

    changes = 0  # counts what may replace tensors or change the forward, for captured steps
    attached: nn.Module | None = None
    """The module through which calls pass while `thinwire.attach` trains the array on several workers."""

    @property
    @abstractmethod
    def size(self) -> int:
        """B, the number of members."""

    @property
    @abstractmethod
    def generators(self) -> Sequence[torch.Generator] | None:
        """One random generator per member, if seeds were given."""

    @abstractmethod
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter once, [B, ...], with its name."""

    @abstractmethod
    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Every buffer once, with its name."""

    @abstractmethod
    def dropout_rates(self) -> dict[str, tuple[float, ...]]:
        """Each member's rate in every dropout layer, by the rate's full name."""

    @abstractmethod
    def _set_rates(self, name: str, values: Sequence[float]) -> None:
        """`set_dropout_rates`, of values that are checked."""

    @abstractmethod
    def select(self, indices: Sequence[int]) -> Selection:
        """Keep the members in these slots, in this order."""

    @abstractmethod
    def _roots(self) -> list[nn.Module]:
        """The modules whose mode is the members', the one that runs first."""

    def __len__(self) -> int:
        return self.size

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Refuse a copy: its tensors would no longer be known as one model's or shared."""
        raise ConfigError(
            "copy.deepcopy(array): an array cannot be copied. Fuse its models again: fuse([array.extract(i) for i in "
            "range(array.size)])"
        )

    def set_dropout_rates(self, name: str, values: Sequence[float]) -> None:
        """Change each member's rate in one layer.

        Args:
            name: as in `dropout_rates`.
            values: one per member.

        Raises:
            ConfigError: no such rate, not one per member, or a value outside [0, 1].
        """
        known = self.dropout_rates()
        if name not in known:
            raise ConfigError(f"no dropout rate is named {name!r}. There are {sorted(known)}")
        if len(values) != self.size or not all(0 <= value <= 1 for value in values):
            raise ConfigError(f"{name}={list(values)}: must be one probability in [0, 1] for each of {self.size}")
        self._set_rates(name, values)

    def refuse_attached(self, call: str, instead: str) -> None:
        """Refuse a call that would leave the other workers of an attached array behind.

        Raises:
            ConfigError: the array is attached.
        """
        if self.attached is not None:
            raise ConfigError(f"{call} of an attached array: the other workers would not follow. {instead}")

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return every parameter once, in the order of a model's `parameters()`."""
        return (parameter for _, parameter in self.named_parameters())

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        for parameter in self.parameters():
            parameter.grad = None

    @property
    def training(self) -> bool:
        """Return True if the members are in training mode."""
        return self._roots()[0].training

    def train(self, mode: bool = True) -> Self:
        """Put all members into training mode."""
        self.changes += 1
        for module in self._roots():
            module.train(mode)
        return self

    def eval(self) -> Self:
        """Put all members into evaluation mode."""
        return self.train(False)

    def modes(self) -> list[bool]:
        """Return whether each layer is in training mode."""
        return [module.training for root in self._roots() for module in root.modules()]

    @contextmanager
    def evaluating(self) -> Generator[None]:
        """Within it, all members are in evaluation mode; afterwards every layer is in its own mode again."""
        self.changes += 1
        try:
            with evaluation_mode(*self._roots()):
                yield
        finally:
            self.changes += 1
