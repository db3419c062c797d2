# SPDX-License-Identifier: Apache-2.0
"""The rows of a batch that belong to each member, and calls of torch that must treat members apart.

A base model runs once on the rows of all members, one member's after another's. Its own layers treat every row by
itself, so only random draws and means over the batch need to know the members.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from thinwire.arrays.fusion.batch import Batch, Each
from thinwire.arrays.fusion.routing import RANDOM, RULES, Context
from thinwire.core.torch_internals import pytree
from thinwire.errors import ConfigError

# Losses of pairs of tensors of one shape, whose mean is over all elements.
_ELEMENTWISE = {F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits}
_BY_CLASS = {F.cross_entropy, F.nll_loss}


@dataclass
class Rows:
    """Which members run now, and how many rows of the batch each of them has.

    Args:
        size: the number of members.
        generators: one per member, or None.
        first: the first member that runs.
        count: how many run.
        each: rows of each member.
        length: positions of each row.
    """

    size: int
    generators: Sequence[torch.Generator] | None = None
    first: int = 0
    count: int = 0
    each: int = 0
    length: int = 1

    @property
    def running(self) -> slice:
        """The members that run."""
        return slice(self.first, self.first + self.count)

    @property
    def total(self) -> int:
        """The number of rows of all members that run."""
        return self.count * self.each

    def context(self) -> Context:
        """Return what the rules for random draws need."""
        return Context(self.count, None if self.generators is None else self.generators[self.running])

    def split(self, x: Tensor, path: str) -> Tensor:
        """View a layer's input [rows, ..., features] as [members, elements, features].

        Raises:
            ConfigError: the first axis is not the rows of the batch.
        """
        # Some layers get all positions of all rows along one axis.
        allowed = {self.total} if x.dim() > 2 else {self.total, self.total * self.length}
        if self.count > 1 and x.shape[0] not in allowed:
            raise ConfigError(
                f"layer {path!r} gets an input of shape {list(x.shape)}: the first axis must be the {self.total} rows "
                "of the batch, so that every row belongs to one member. Leave this layer out of target_modules"
            )
        return x.reshape(self.count, -1, x.shape[-1])

    def as_rows(self, given: Any) -> Any:
        """Return arguments of the members as arguments of one large batch, and note the number of rows.

        Raises:
            ConfigError: not one part per member, or members with different numbers of rows.
        """
        leaves, shape = pytree.tree_flatten(given, is_leaf=lambda leaf: isinstance(leaf, Each))
        lengths = {
            leaf.tensor.shape[1] if isinstance(leaf, Each) else leaf.shape[0]
            for leaf in leaves
            if (isinstance(leaf, Each) and leaf.tensor.dim() > 1) or (isinstance(leaf, Tensor) and leaf.dim() > 0)
        }
        if len(lengths) > 1:
            lengths.discard(1)  # broadcast over the rows
        if len(lengths) > 1:
            raise ConfigError(
                f"the arguments have {' and '.join(map(str, sorted(lengths)))} rows per member. All tensors of a batch "
                "need the same number. Pad them"
            )
        self.each = next(iter(lengths), 1)
        long = (
            leaf.tensor[0] if isinstance(leaf, Each) else leaf for leaf in leaves if isinstance(leaf, Tensor | Each)
        )
        self.length = next((each.shape[1] for each in long if each.dim() > 1), 1)
        return pytree.tree_unflatten([self._as_rows(leaf) for leaf in leaves], shape)

    def _as_rows(self, leaf: Any) -> Any:
        if isinstance(leaf, Each):
            if leaf.tensor.shape[0] != self.size:
                raise ConfigError(
                    f"Each of length {leaf.tensor.shape[0]}: there are {self.size} members. Pass one part per member"
                )
            own = leaf.tensor[self.running]
            return own if own.dim() == 1 else own.flatten(0, 1)
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or self.count == 1 or leaf.shape[0] != self.each:
            return leaf
        return leaf.expand(self.count, *leaf.shape).flatten(0, 1)

    def by_member(self, found: Any) -> Any:
        """Return results of one large batch with the members first: [members, rows, ...]."""

        def split(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == self.total:
                return leaf.unflatten(0, (self.count, self.each))
            return leaf

        return pytree.tree_map(split, found)


class ByMember(TorchFunctionMode):
    """Inside, dropout draws from each member's generator, and a mean over the batch is one mean per member.

    Args:
        rows: of the batch.
        random: whether draws are treated too; otherwise only losses.
    """

    def __init__(self, rows: Rows, *, random: bool) -> None:
        super().__init__()
        self.rows, self.random = rows, random
        self.counts: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute one call by members, if it is a loss or a draw."""
        named = kwargs or {}
        if func in _BY_CLASS or func in _ELEMENTWISE:
            return self._loss(func, *args, **named)
        if self.random and func in RANDOM:
            return self._draw(func, args, named)
        return func(*args, **named)

    def _loss(self, func: Any, input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Any:
        rows = self.rows
        if kwargs.get("reduction", "mean") == "none" or not rows.total or input.shape[0] % rows.count:
            return func(input, target, *args, **kwargs)
        own = [each.unflatten(0, (rows.count, -1)) for each in (input, target)]
        parts = [func(x, y, *args, **kwargs) for x, y in zip(*own, strict=True)]
        if func in _BY_CLASS and target.dtype == torch.int64:
            ignored = kwargs.get("ignore_index", -100)
            self.counts = (own[1] != ignored).flatten(1).sum(1)
        else:
            self.counts = torch.full((rows.count,), own[1][0].numel(), dtype=torch.int64, device=input.device)
        return torch.stack(parts)

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rows = self.rows
        if func is F.scaled_dot_product_attention and not (kwargs.get("dropout_p") or (args[4:5] or (0,))[0]):
            return func(*args, **kwargs)

        def batched(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == rows.total:
                return Batch(leaf.unflatten(0, (rows.count, rows.each)), 0)
            return leaf

        own, named = [batched(leaf) for leaf in args], {name: batched(leaf) for name, leaf in kwargs.items()}
        if not any(isinstance(leaf, Batch) for leaf in (*own, *named.values())):
            return func(*args, **kwargs)
        found = RULES[func](rows.context(), func, *own, **named)
        return pytree.tree_map(
            lambda leaf: leaf.at(0).flatten(0, 1) if isinstance(leaf, Batch) else leaf,
            found,
            is_leaf=lambda leaf: isinstance(leaf, Batch),
        )


def recomputing(rows: Rows, mode: Callable[[], ByMember | None]) -> Callable[[], tuple[Any, Any]]:
    """Return a `context_fn` for `torch.utils.checkpoint`: layers that run again draw the same numbers.

    Args:
        rows: of the batch.
        mode: returns the mode that is active in the forward pass, or None.
    """

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        held = (rows.first, rows.count, rows.each, rows.length)
        states = [each.get_state() for each in (rows.generators or ())[rows.running]]
        active = mode()
        random = active is not None and active.random
        return nullcontext(), again(held, states, random)

    @contextmanager
    def again(held: tuple[int, ...], states: Sequence[Tensor], random: bool) -> Generator[None]:
        # The backward pass may run after the members that ran have changed.
        now = (rows.first, rows.count, rows.each, rows.length)
        rows.first, rows.count, rows.each, rows.length = held
        generators = (rows.generators or ())[rows.running]
        after = [each.get_state() for each in generators]
        for each, state in zip(generators, states, strict=True):
            each.set_state(state)
        try:
            with ByMember(rows, random=True) if random else nullcontext():
                yield
        finally:
            for each, state in zip(generators, after, strict=True):
                each.set_state(state)
            rows.first, rows.count, rows.each, rows.length = now

    return contexts
