"""What 1-bit LAMB and 1-bit Adam have in common: a variance that freezes, and a momentum that others agree on."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.errors import ConfigError
from laconic.flat import Segment, copy_each_
from laconic.moments import Moments

_HANDFUL = 1 << 20


class FreezingOptimizer(Optimizer):
    """An adaptive optimizer in two stages: until `freeze()` as it comes, from then on with a variance that stays.

    A strategy may take part once the variance is frozen: it makes `momentum` out of this worker's gradient, agrees on
    it with the others, and hands it back by `hear`; the next step uses that instead of the gradient. Where nobody does,
    the momentum follows this worker's gradient, whoever has averaged it.

    Parameters in 16 bits have a copy in fp32 (`master`) that steps are taken on; the state is in fp32 at least.
    State: `momentum`, `variance`, and what the kind adds, each like its parameter.
    """

    def __init__(self, params: Iterable[nn.Parameter] | Iterable[dict[str, Any]], settings: dict[str, Any]) -> None:
        super().__init__(params, {**settings, "frozen": False})
        self._heard: dict[Tensor, Tensor] = {}
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
        _fill_gaps_([state["variance"] for state in self.state.values()])
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
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        for name in ("momentum", "variance"):
            state[name] = torch.zeros_like(parameter, dtype=dtype)
        if parameter.dtype != dtype:
            state["master"] = parameter.detach().to(dtype)
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
        keep_dtypes(self, state_dict)

    # -- what a strategy asks for --------------------------------------------------------------------------------

    @torch.no_grad()
    def say_(
        self,
        momenta: Sequence[Tensor],
        gradients: Sequence[Tensor],
        parameters: Sequence[Tensor],
        *,
        share: float,
        rescale: bool,
    ) -> None:
        """Write down what this worker's momentum would be.

        Args:
            momenta: like the parameters and of their state's dtype; the next momentum afterwards.
            gradients: like the parameters; they may be the momenta themselves.
            parameters: whose they are.
            share: gradients are multiplied by this first.
            rescale: the result is multiplied by each tensor's `coefficient`.
        """
        place = {parameter: i for i, parameter in enumerate(parameters)}
        for group, places in self._by_group(parameters):
            for handful in handfuls([parameters[i] for i in places]):
                chosen, states = [momenta[place[p]] for p in handful], [self.state[p] for p in handful]
                told = [gradients[place[p]] for p in handful]
                if share != 1.0:
                    told = torch._foreach_mul(told, share)  # pyright: ignore
                _lerp_into_(chosen, told, [each["momentum"] for each in states], group["betas"][0])
                if rescale:
                    torch._foreach_mul_(chosen, [each["coefficient"] for each in states])  # pyright: ignore

    @torch.no_grad()
    def hear(self, momenta: Sequence[Tensor], parameters: Sequence[Tensor], *, rescale: bool) -> None:
        """Take what was agreed on for the momentum of the next step.

        Args:
            momenta: like the parameters; the next step uses them up.
            parameters: whose they are.
            rescale: what was agreed on is divided by each tensor's `coefficient`, in place.
        """
        if rescale:
            torch._foreach_div_(list(momenta), [self.state[p]["coefficient"] for p in parameters])  # pyright: ignore
        self._heard.update(zip(parameters, momenta, strict=True))

    def skip(self) -> None:
        """Let the next step change nothing."""
        self._skipping = True

    # -- the step ------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of every parameter that has a gradient or a momentum that was agreed on.

        Args:
            closure: computes the loss and its gradients anew, where a loop works so.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        heard, self._heard = self._heard, {}
        skipping, self._skipping = self._skipping, False
        if skipping:
            return loss
        for group in self.param_groups:
            moved = [p for p in group["params"] if p.numel() and (p.grad is not None or p in heard)]
            for parameter in moved:
                self.begin(parameter)
            for handful in handfuls(moved):
                self._move(group, handful, heard)
        return loss

    def _move(self, group: dict[str, Any], parameters: Sequence[Tensor], heard: dict[Tensor, Tensor]) -> None:
        states = [self.state[p] for p in parameters]
        exact = [state.get("master", p) for p, state in zip(parameters, states, strict=True)]
        momenta = [state["momentum"] for state in states]
        if not group["frozen"]:
            self.warm_step(group, exact, [_gradient(p, m) for p, m in zip(parameters, momenta, strict=True)], states)
        else:
            weight = 1 - group["betas"][0]
            after = [
                heard[p] if p in heard else torch.lerp(m, _gradient(p, m), weight)
                for p, m in zip(parameters, momenta, strict=True)
            ]
            self.frozen_step(group, exact, after, states)
        rounded = [(p, x) for p, x in zip(parameters, exact, strict=True) if p is not x]
        if rounded:
            copy_each_([p for p, _ in rounded], [x for _, x in rounded])

    def _by_group(self, parameters: Sequence[Tensor]) -> Iterator[tuple[dict[str, Any], list[int]]]:
        place = {parameter: i for i, parameter in enumerate(parameters)}
        for group in self.param_groups:
            places = [place[p] for p in group["params"] if p in place]
            if places:
                yield group, places

    # -- what a kind says ----------------------------------------------------------------------------------------

    @abstractmethod
    def on_begin(self, parameter: Tensor, state: dict[str, Tensor]) -> None:
        """Add what this kind remembers of a parameter."""

    @abstractmethod
    def on_freeze(self, groups: Sequence[tuple[dict[str, Any], list[dict[str, Tensor]]]]) -> None:
        """The variance has been frozen: make what the second stage needs, from each group and its tensors' states."""

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


def handfuls(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters in their order, so many at a time that all passes over them but the first find them in the cache.

    Accelerators, whose cost is in the calls, get all at once.
    """
    handful: list[Tensor] = []
    size = 0
    for parameter in parameters:
        if handful and parameter.device.type == "cpu" and size + parameter.numel() > _HANDFUL:
            yield handful
            handful, size = [], 0
        handful.append(parameter)
        size += parameter.numel()
    if handful:
        yield handful


def keep_dtypes(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Undo what torch does on loading: it casts all state of a parameter to the parameter's own dtype."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    for parameter, number in zip(parameters, numbers, strict=True):
        for name, value in state_dict["state"].get(number, {}).items():
            if isinstance(value, Tensor):
                optimizer.state[parameter][name] = value.to(parameter.device, copy=True)


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


def _fill_gaps_(variances: Sequence[Tensor]) -> None:
    """Give entries that are zero the mean of those that are not: of their tensor, else of all."""
    if not variances:
        return
    sums = torch.stack([v.sum(dtype=torch.float64).cpu() for v in variances])
    counts = torch.stack([v.count_nonzero().cpu() for v in variances])
    overall = sums.sum() / counts.sum() if counts.any() else torch.ones((), dtype=torch.float64)
    means = torch.where(counts > 0, sums / counts.clamp(min=1), overall).tolist()
    for variance, mean in zip(variances, means, strict=True):
        variance.masked_fill_(variance == 0, mean)


# -- a strategy's side -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Speaker:
    """A replica's parameters in the words of its optimizer.

    Attributes:
        optimizer: the worker's own.
        parameters: of the replica.
        segments: where each lies in the replica's vector.
    """

    optimizer: FreezingOptimizer
    parameters: Sequence[Tensor]
    segments: Sequence[Segment]

    @property
    def leads(self) -> bool:
        """Whether the optimizer's first parameter is one of these: of several replicas one has a say for all."""
        first = next(p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad)
        return any(parameter is first for parameter in self.parameters)

    @property
    def memory_steps(self) -> int:
        r"""Over how many steps the variance is a mean, $1/(1-\beta_2)$."""
        return max(1, round(1 / (1 - max(group["betas"][1] for group in self.optimizer.param_groups))))

    def within(self, part: slice, vector: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The parameters that lie in a part of the replica's vectors, and those segments of one such vector."""
        chosen = [
            (parameter, segment.of(vector))
            for parameter, segment in zip(self.parameters, self.segments, strict=True)
            if part.start <= segment.start and segment.stop <= part.stop
        ]
        return [p for p, _ in chosen], [view for _, view in chosen]

    def say_(self, part: slice, words: Tensor, gradient: Tensor, *, share: float, rescale: bool = False) -> None:
        """Write what this worker's momentum would be after a gradient into a part of such a vector, or in its place."""
        parameters, momenta = self.within(part, words)
        gradients = momenta if words is gradient else self.within(part, gradient)[1]
        self.optimizer.say_(momenta, gradients, parameters, share=share, rescale=rescale)


def speaker(moments: Moments) -> Speaker | None:
    """The optimizer behind a replica's moments with its parameters; None where there is none, as in a dry run."""
    optimizer = moments.optimizer
    if not isinstance(optimizer, FreezingOptimizer):
        return None
    return Speaker(optimizer, moments.parameters, moments.segments)
