# SPDX-License-Identifier: Apache-2.0
"""The base of 1-bit Adam, 1-bit LAMB and 0/1 Adam: after the variance freezes, momenta are averaged."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from thinwire.core.kernels.adaptive import frozen_adam_step_
from thinwire.core.kernels.decisions import on_host
from thinwire.core.replica.flat import copy_each_
from thinwire.core.torch_internals import foreach
from thinwire.errors import ConfigError
from thinwire.methods.optimizers.base import (
    ClosureOptimizer,
    cache_batches,
    exact_parameters,
    restore_dtypes,
    round_to_parameters,
    zero_moments,
)
from thinwire.methods.optimizers.lamb import check_adaptive, update_moments_

Group = dict[str, Any]
States = Sequence[dict[str, Tensor]]


class FreezingOptimizer(ClosureOptimizer):
    """An adaptive optimizer in two stages: a warm-up until `freeze()`, then steps with a constant variance.

    After the variance is frozen, a strategy can average momenta instead of gradients: `next_momenta_` computes this
    worker's momentum from its gradient, and `set_next_momenta` receives the mean over workers, which the next step uses
    instead of the gradient. Without such a strategy, the parameters' gradients update the momentum.

    16-bit parameters have an fp32 copy (`master`), which the steps update; the state is in fp32 at least.
    State: `momentum`, `variance`, and the subclass's state, each like its parameter.
    """

    def __init__(self, params: Iterable[nn.Parameter] | Iterable[dict[str, Any]], settings: dict[str, Any]) -> None:
        super().__init__(params, {**settings, "frozen": False})
        self._next_momenta: dict[Tensor, Tensor] = {}
        self._skipping = False

    @property
    def frozen(self) -> bool:
        """True after the warm-up."""
        return bool(self.param_groups[0]["frozen"])

    @torch.no_grad()
    def freeze(self) -> None:
        """End the warm-up: the variance stays constant from now on.

        Entries that never had a gradient would be divided by only epsilon. They get the mean variance of their
        tensor's other entries; tensors without any get that of all tensors.
        """
        if self.frozen:
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    self.init_state(parameter)
        # Only the warm-up needs this tensor, which is as large as the parameters.
        for state in self.state.values():
            state.pop("previous_variance", None)
        variances = [state["variance"] for state in self.state.values()]
        if variances:
            # In fp64, because sums of millions of small squares lose digits in fp32.
            sums = torch.stack([on_host(v.sum(dtype=torch.float64)) for v in variances])
            counts = torch.stack([on_host(v.count_nonzero()) for v in variances])
            overall = sums.sum() / counts.sum() if counts.any() else torch.ones((), dtype=torch.float64, device="cpu")
            means = torch.where(counts > 0, sums / counts.clamp(min=1), overall).tolist()
            for variance, mean in zip(variances, means, strict=True):
                variance.masked_fill_(variance == 0, mean)
        for group in self.param_groups:
            group["frozen"] = True
        self.on_freeze([(g, [self.state[p] for p in g["params"] if p in self.state]) for g in self.param_groups])

    def init_state(self, parameter: Tensor) -> None:
        """Create the state of a parameter without state.

        Raises:
            ConfigError: the variance is already frozen, so the parameter would never get one.
        """
        state = self.state[parameter]
        if state:
            return
        if self.frozen:
            raise ConfigError(
                f"a parameter of {parameter.numel()} elements was added after the variance was frozen. "
                "Give every parameter to the optimizer at the start"
            )
        state.update(zero_moments(parameter))
        self.on_init_state(parameter, state)

    @torch.no_grad()
    def variance_change(self) -> Tensor:
        """Return the relative change of the variance since the last call; infinite at the first.

        Returns:
            $|v - v'|_1 / |v|_1$ over all parameters, a number in fp64 on the first parameter's device.
        """
        changes, totals = [], []
        for state in self.state.values():
            variance, previous = state["variance"], state.get("previous_variance")
            change = variance.sum() * float("inf") if previous is None else (variance - previous).abs().sum()
            changes.append(change.double())
            totals.append(variance.sum(dtype=torch.float64))
            state["previous_variance"] = variance.clone()
        device = self.param_groups[0]["params"][0].device
        if not totals:
            return torch.tensor(float("inf"), dtype=torch.float64, device=device)
        ratio = torch.stack([c.to(device) for c in changes]).sum() / torch.stack([t.to(device) for t in totals]).sum()
        return ratio.nan_to_num(float("inf"))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the `state_dict()` of an equal optimizer; every tensor keeps its dtype."""
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
        """Compute this worker's message, its momentum after these gradients, without changing the state.

        Args:
            momenta: like the parameters, in the dtype of their state; overwritten.
            gradients: like the parameters; they may be the momenta themselves.
            parameters: the parameters of the gradients.
            share: a factor for the gradients.
            rescale: whether to multiply the result by each tensor's `coefficient`.
        """
        place = {parameter: i for i, parameter in enumerate(parameters)}
        for group in self.param_groups:
            for batch in cache_batches([p for p in group["params"] if p in place]):
                chosen, states = [momenta[place[p]] for p in batch], [self.state[p] for p in batch]
                new = [gradients[place[p]] for p in batch]
                if share != 1.0:
                    new = foreach.mul(new, share)
                _lerp_into_(chosen, new, [each["momentum"] for each in states], group["betas"][0])
                if rescale:
                    foreach.mul_(chosen, [each["coefficient"] for each in states])
                self.on_send(group, chosen, states)

    @torch.no_grad()
    def set_next_momenta(self, momenta: Sequence[Tensor], parameters: Sequence[Tensor], *, rescale: bool) -> None:
        """Use these momenta, equal on all workers, instead of gradients in the next step.

        Args:
            momenta: like the parameters; the next step overwrites them.
            parameters: the parameters of the momenta.
            rescale: whether to divide momenta by each tensor's `coefficient`, in place.
        """
        if rescale:
            foreach.div_(list(momenta), [self.state[p]["coefficient"] for p in parameters])
        # Accumulated, because parameters of different dtypes arrive in separate calls.
        self._next_momenta.update(zip(parameters, momenta, strict=True))

    def skip_next_step(self) -> None:
        """Make the next step have no effect, because the mean momentum is not finite."""
        self._skipping = True

    # -- the step ------------------------------------------------------------------------------------------------

    def update(self) -> None:
        """Move every parameter that has a gradient or a mean momentum."""
        means, self._next_momenta = self._next_momenta, {}
        # Both are for this step only, even if it fails.
        skipping, self._skipping = self._skipping, False
        if skipping:
            return
        for group in self.param_groups:
            moved = [p for p in group["params"] if p.numel() and (p.grad is not None or p in means)]
            for parameter in moved:
                self.init_state(parameter)
            for batch in cache_batches(moved):
                self._move(group, batch, means)
            self.on_moved(group)

    def _move(self, group: Group, parameters: Sequence[Tensor], means: dict[Tensor, Tensor]) -> None:
        states = [self.state[p] for p in parameters]
        exact = exact_parameters(parameters, states)
        momenta = [state["momentum"] for state in states]
        if not group["frozen"]:
            self.warm_step(group, exact, [_gradient(p, m) for p, m in zip(parameters, momenta, strict=True)], states)
        else:
            weight = 1 - group["betas"][0]
            after = [
                means[p] if p in means else torch.lerp(m, _gradient(p, m), weight)
                for p, m in zip(parameters, momenta, strict=True)
            ]
            self.frozen_step(group, exact, after, states)
        round_to_parameters(exact, parameters)

    # -- for subclasses ------------------------------------------------------------------------------------------

    def on_init_state(self, parameter: Tensor, state: dict[str, Tensor]) -> None:
        """Add the subclass's own state of a parameter; none by default."""

    @abstractmethod
    def on_freeze(self, groups: Sequence[tuple[Group, list[dict[str, Tensor]]]]) -> None:
        """Create the state of the second stage; called after the variance freezes, with each group's states."""

    def on_send(self, group: Group, momenta: list[Tensor], states: States) -> None:
        """Turn the next momenta of a group's tensors into the message, in place; unchanged by default."""

    def on_moved(self, group: Group) -> None:
        """Update the group's state after its step."""

    @abstractmethod
    def warm_step(self, group: Group, parameters: list[Tensor], gradients: list[Tensor], states: States) -> None:
        """Take a step of the warm-up: move the parameters and update their state."""

    @abstractmethod
    def frozen_step(self, group: Group, parameters: list[Tensor], momenta: list[Tensor], states: States) -> None:
        """Take a step of the second stage; states have the old momenta, the new ones may be overwritten."""


def _lerp_into_(targets: list[Tensor], starts: Sequence[Tensor], ends: list[Tensor], weight: float) -> None:
    """Write the interpolation from every start to its end; a target may be its start."""
    if ends[0].device.type == "cpu":
        # One pass over memory; a copy followed by an interpolation would be two.
        for target, start, end in zip(targets, starts, ends, strict=True):
            torch.lerp(start.to(end.dtype), end, weight, out=target)
        return
    copy_each_(targets, list(starts))
    foreach.lerp_(targets, ends, weight)


def _gradient(parameter: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if parameter.grad is None else parameter.grad.to(like.dtype)


# -- Adam without bias correction --------------------------------------------------------------------------------------


class FreezingAdam(FreezingOptimizer):
    """Adam without bias correction in two stages; a subclass defines the second.

    Args:
        params: the parameters.
        lr: the learning rate.
        betas: decays of the moments, each in [0, 1); a larger value averages over more steps.
        eps: shortens the steps of entries with small gradients.
        weight_decay: a pull toward zero.

    Attributes:
        group_defaults: initial values of the subclass's own keys of each parameter group.

    Raises:
        ConfigError: a value is out of its range.
    """

    group_defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        check_adaptive(lr, betas, eps, weight_decay)
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**settings, **self.group_defaults})

    def on_freeze(self, groups: Sequence[tuple[Group, list[dict[str, Tensor]]]]) -> None:
        """Set all coefficients to 1: momenta are sent unchanged."""
        for _, states in groups:
            for state in states:
                state["coefficient"] = torch.ones((), dtype=state["momentum"].dtype, device=state["momentum"].device)

    def warm_step(self, group: Group, parameters: list[Tensor], gradients: list[Tensor], states: States) -> None:
        """Take a step of Adam without bias correction."""
        momenta, variances = ([state[name] for state in states] for name in ("momentum", "variance"))
        update_moments_(group, momenta, variances, gradients)
        adam_step_(group, parameters, momenta, variances)


def adam_step_(
    group: Group,
    parameters: list[Tensor],
    momenta: list[Tensor],
    variances: list[Tensor],
    before: list[Tensor] | None = None,
) -> None:
    """Step along Adam's direction; copy the new momenta into `before`, the state's momenta, if given."""
    settings = {"eps": group["eps"], "decay": group["weight_decay"], "rate": float(group["lr"])}
    frozen_adam_step_(parameters, before or momenta, momenta, variances, **settings)
