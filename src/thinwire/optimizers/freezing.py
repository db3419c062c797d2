"""What 1-bit Adam, 1-bit LAMB and 0/1 Adam share: a variance that freezes, and a momentum that workers agree on."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import ConfigError
from thinwire.optimizers.base import ClosureOptimizer, cache_batches, restore_dtypes, zero_moments
from thinwire.replica.flat import copy_each_


class FreezingOptimizer(ClosureOptimizer):
    """An adaptive optimizer in two stages: until `freeze()` as it comes, from then on with a variance that stays.

    A strategy may take part once the variance is frozen: it asks `next_momenta_` for the momentum after this worker's
    gradient, averages it over workers, and hands the mean to `set_next_momenta`; the next step uses that instead of the
    gradient. Where no strategy does, the momentum follows the gradient of the parameters, whoever has averaged it.

    Parameters in 16 bits have a copy in fp32 (`master`) that steps are taken on; the state is in fp32 at least.
    State: `momentum`, `variance`, and what the subclass adds, each like its parameter.
    """

    def __init__(self, params: Iterable[nn.Parameter] | Iterable[dict[str, Any]], settings: dict[str, Any]) -> None:
        super().__init__(params, {**settings, "frozen": False})
        self._next_momenta: dict[Tensor, Tensor] = {}
        self._skipping = False

    @property
    def frozen(self) -> bool:
        """Whether the first stage is over."""
        return bool(self.param_groups[0]["frozen"])

    @torch.no_grad()
    def freeze(self) -> None:
        """End the first stage: the variance stays as it is from now on.

        Entries that never had a gradient would be divided by nothing but epsilon. They take the mean variance of their
        tensor's others, and tensors without any that of all.
        """
        if self.frozen:
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    self.begin(parameter)
        for state in self.state.values():
            state.pop("earlier", None)
        variances = [state["variance"] for state in self.state.values()]
        if variances:
            sums = torch.stack([v.sum(dtype=torch.float64).cpu() for v in variances])
            counts = torch.stack([v.count_nonzero().cpu() for v in variances])
            overall = sums.sum() / counts.sum() if counts.any() else torch.ones((), dtype=torch.float64)
            means = torch.where(counts > 0, sums / counts.clamp(min=1), overall).tolist()
            for variance, mean in zip(variances, means, strict=True):
                variance.masked_fill_(variance == 0, mean)
        for group in self.param_groups:
            group["frozen"] = True
        self.on_freeze([(g, [self.state[p] for p in g["params"] if p in self.state]) for g in self.param_groups])

    def begin(self, parameter: Tensor) -> None:
        """Make the state of a parameter, where it has none.

        Raises:
            ConfigError: the variance is frozen already, so that this one would never have any.
        """
        state = self.state[parameter]
        if state:
            return
        if self.frozen:
            raise ConfigError(
                f"a parameter of {parameter.numel()} elements came after the variance was frozen; "
                "hand every parameter to the optimizer at the start"
            )
        state.update(zero_moments(parameter))
        self.on_begin(parameter, state)

    @torch.no_grad()
    def variance_change(self) -> Tensor:
        """By how much the variance has changed since this was last asked, as a share of it; infinite the first time.

        Returns:
            $|v - v'|_1 / |v|_1$ over all parameters, a number in fp64 on the first parameter's device.
        """
        change, whole = [], []
        for state in self.state.values():
            earlier = state.get("earlier")
            moved = (
                state["variance"].sum() * float("inf") if earlier is None else (state["variance"] - earlier).abs().sum()
            )
            change.append(moved.double())
            whole.append(state["variance"].sum(dtype=torch.float64))
            state["earlier"] = state["variance"].clone()
        device = self.param_groups[0]["params"][0].device
        if not whole:
            return torch.tensor(float("inf"), dtype=torch.float64, device=device)
        ratio = torch.stack([c.to(device) for c in change]).sum() / torch.stack([w.to(device) for w in whole]).sum()
        return ratio.nan_to_num(float("inf"))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict()` of an optimizer like this returned; every tensor keeps its dtype."""
        super().load_state_dict(state_dict)
        restore_dtypes(self, state_dict)

    # -- for strategies that average momenta ---------------------------------------------------------------------

    @torch.no_grad()
    def next_momenta_(
        self,
        momenta: Sequence[Tensor],
        gradients: Sequence[Tensor],
        parameters: Sequence[Tensor],
        *,
        share: float,
        rescale: bool,
    ) -> None:
        """Write what this worker would send: its momentum after these gradients, while its own state stays as it is.

        Args:
            momenta: like the parameters and of their state's dtype; overwritten.
            gradients: like the parameters; they may be the momenta themselves.
            parameters: to which these belong.
            share: gradients are multiplied by this first.
            rescale: the result is multiplied by each tensor's `coefficient`.
        """
        place = {parameter: i for i, parameter in enumerate(parameters)}
        for group in self.param_groups:
            for batch in cache_batches([p for p in group["params"] if p in place]):
                chosen, states = [momenta[place[p]] for p in batch], [self.state[p] for p in batch]
                ends = [gradients[place[p]] for p in batch]
                if share != 1.0:
                    ends = torch._foreach_mul(ends, share)  # pyright: ignore
                _lerp_into_(chosen, ends, [each["momentum"] for each in states], group["betas"][0])
                if rescale:
                    torch._foreach_mul_(chosen, [each["coefficient"] for each in states])  # pyright: ignore
                self.on_send(group, chosen, states)

    @torch.no_grad()
    def set_next_momenta(self, momenta: Sequence[Tensor], parameters: Sequence[Tensor], *, rescale: bool) -> None:
        """Let the next step use these momenta, which are equal on all workers, instead of gradients.

        Args:
            momenta: like the parameters; the next step overwrites them.
            parameters: to which these belong.
            rescale: momenta are divided by each tensor's `coefficient`, in place.
        """
        if rescale:
            torch._foreach_div_(list(momenta), [self.state[p]["coefficient"] for p in parameters])  # pyright: ignore
        self._next_momenta.update(zip(parameters, momenta, strict=True))

    def skip(self) -> None:
        """Let the next step change nothing, because what workers agreed on is not finite."""
        self._skipping = True

    # -- the step ------------------------------------------------------------------------------------------------

    def update(self) -> None:
        """Move every parameter that has a gradient or a momentum that was agreed on."""
        agreed, self._next_momenta = self._next_momenta, {}
        skipping, self._skipping = self._skipping, False
        if skipping:
            return
        for group in self.param_groups:
            moved = [p for p in group["params"] if p.numel() and (p.grad is not None or p in agreed)]
            for parameter in moved:
                self.begin(parameter)
            for batch in cache_batches(moved):
                self._move(group, batch, agreed)
            self.on_moved(group)

    def _move(self, group: dict[str, Any], parameters: Sequence[Tensor], agreed: dict[Tensor, Tensor]) -> None:
        states = [self.state[p] for p in parameters]
        exact = [state.get("master", p) for p, state in zip(parameters, states, strict=True)]
        momenta = [state["momentum"] for state in states]
        if not group["frozen"]:
            self.warm_step(group, exact, [_gradient(p, m) for p, m in zip(parameters, momenta, strict=True)], states)
        else:
            weight = 1 - group["betas"][0]
            after = [
                agreed[p] if p in agreed else torch.lerp(m, _gradient(p, m), weight)
                for p, m in zip(parameters, momenta, strict=True)
            ]
            self.frozen_step(group, exact, after, states)
        rounded = [(p, x) for p, x in zip(parameters, exact, strict=True) if p is not x]
        if rounded:
            copy_each_([p for p, _ in rounded], [x for _, x in rounded])

    # -- for subclasses ------------------------------------------------------------------------------------------

    @abstractmethod
    def on_begin(self, parameter: Tensor, state: dict[str, Tensor]) -> None:
        """Add what the subclass keeps for a parameter."""

    @abstractmethod
    def on_freeze(self, groups: Sequence[tuple[dict[str, Any], list[dict[str, Tensor]]]]) -> None:
        """The variance has been frozen: make what the second stage needs, from each group and its tensors' states."""

    def on_send(self, group: dict[str, Any], momenta: list[Tensor], states: Sequence[dict[str, Tensor]]) -> None:
        """Turn the next momenta of some of a group's tensors, in place, into what is sent of them."""

    def on_moved(self, group: dict[str, Any]) -> None:
        """A group has taken its step."""

    @abstractmethod
    def warm_step(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        gradients: list[Tensor],
        states: Sequence[dict[str, Tensor]],
    ) -> None:
        """Move parameters in the first stage, and their state with them."""

    @abstractmethod
    def frozen_step(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        momenta: list[Tensor],
        states: Sequence[dict[str, Tensor]],
    ) -> None:
        """Move parameters in the second stage; the new momenta are used up, the old ones are in the states."""


def _lerp_into_(targets: list[Tensor], starts: Sequence[Tensor], ends: list[Tensor], weight: float) -> None:
    """Every target that far from its start to its end; it may be the start itself."""
    if ends[0].device.type == "cpu":
        # One pass over memory, where copying and moving would be two.
        for target, start, end in zip(targets, starts, ends, strict=True):
            torch.lerp(start.to(end.dtype), end, weight, out=target)
        return
    copy_each_(targets, list(starts))
    torch._foreach_lerp_(targets, ends, weight)  # pyright: ignore


def _gradient(parameter: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if parameter.grad is None else parameter.grad.to(like.dtype)
