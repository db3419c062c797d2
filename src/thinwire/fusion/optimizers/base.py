"""An optimizer of an array: every hyperparameter is a vector, and every slot has an age of its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.errors import ConfigError
from thinwire.fusion.optimizers.parameter_batch import Group, ParameterBatch, as_they_were, count_models, slots_of
from thinwire.fusion.store import Selection, owner_of

Numbers = float | Sequence[float] | Tensor


class FusedOptimizer(Optimizer):
    """What all optimizers of an array share.

    A hyperparameter is a number for all models or a sequence with one per model, and is kept in
    `param_groups[...]["lr"]` as a float64 vector [models] that may be edited in place between steps. A slot that is not
    `active` is left as it is, bitwise, and no model's numbers ever meet another's.

    Args:
        params: an array's parameters, or groups of them.
        defaults: hyperparameters by name, checked against `ranges`.
        shared: settings that are the same for all models.
        models: the number of models; None finds it from the parameters.

    Raises:
        ConfigError: a value out of its range, or a sequence that is not one per model.
    """

    ranges: ClassVar[dict[str, tuple[float, float]]]
    kept: ClassVar[tuple[str, ...]]
    genuine: ClassVar[type[Optimizer] | None] = None

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[Group],
        defaults: dict[str, Any],
        shared: dict[str, Any],
        *,
        models: int | None = None,
    ) -> None:
        given = list(params)
        self.models = count_models(given) if models is None else models
        self.active = torch.ones(self.models, dtype=torch.bool)
        super().__init__(given, {**defaults, **shared})  # pyright: ignore[reportArgumentType]

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters with hyperparameters of their own, each a number or one per model.

        Raises:
            ConfigError: a value out of its range, or a sequence that is not one per model.
        """
        split = param_group.pop("betas", None) or self.defaults.get("betas")
        if split is not None:
            if len(split) != 2:
                raise ConfigError(f"betas={split!r}: a pair, each a number or one per model")
            param_group.update(beta1=split[0], beta2=split[1])
        for name, bounds in self.ranges.items():
            value = param_group.get(name, self.defaults.get(name))
            param_group[name] = self._vector(name, value, bounds)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.pop("betas", None)
        for parameter in group["params"]:
            if owner_of(parameter) is None and parameter.shape[:1] != (self.models,):
                raise ConfigError(
                    f"a parameter of shape {list(parameter.shape)}: the first axis must be the {self.models} models"
                )

    def _vector(self, name: str, value: Any, bounds: tuple[float, float]) -> Tensor:
        found = torch.as_tensor(value, dtype=torch.float64).detach().cpu()
        if found.dim() == 0:
            found = found.expand(self.models)
        if found.shape != (self.models,):
            raise ConfigError(f"{name} of shape {list(found.shape)}: a number, or one for each of {self.models} models")
        low, high = bounds
        wrong = (~((found >= low) & (found < high))).nonzero().flatten().tolist()
        if wrong:
            raise ConfigError(f"{name}={float(found[wrong[0]])} of model {wrong[0]}: must be in [{low}, {high})")
        return found.clone()

    # -- stepping ------------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of every active slot, of the parameters that have a gradient.

        Args:
            closure: computes the losses and their gradients anew, where a loop works so.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for step, owner, parameters in self._alike(group):
                self._advance(group, step, owner, parameters)
        return loss

    def _alike(self, group: Group) -> Iterator[tuple[Tensor, int | None, list[nn.Parameter]]]:
        """Parameters with gradients, by their age and by whom they belong to."""
        ready = [p for p in group["params"] if p.grad is not None and p.numel()]
        fresh: dict[int | None, Tensor] = {}
        found: dict[tuple[int, int | None], tuple[Tensor, int | None, list[nn.Parameter]]] = {}
        for parameter in ready:
            state, owner = self.state[parameter], owner_of(parameter)
            if not state:
                self._begin(parameter, group, fresh.setdefault(owner, torch.zeros(parameter.shape[0])))
            step = state["step"]
            found.setdefault((id(step), owner), (step, owner, []))[2].append(parameter)
        yield from found.values()

    def _begin(self, parameter: nn.Parameter, group: Group, step: Tensor) -> None:
        slots = slots_of(parameter)
        self.state[parameter]["step"] = step
        for name in self.names(group):
            self.state[parameter][name] = self.initial(name, parameter.detach(), group, slots)

    def _advance(self, group: Group, step: Tensor, owner: int | None, parameters: list[nn.Parameter]) -> None:
        slots = slots_of(parameters[0])
        active = self.active[slots]
        if not bool(active.any()):
            return
        step += active
        handful = ParameterBatch(
            [parameter.detach() for parameter in parameters],
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            {name: [self.state[parameter][name] for parameter in parameters] for name in self.names(group)},
            {name: group[name][slots] for name in self.ranges},
            step.double(),
            group,
        )
        if self.by_rows(handful):
            self.move_rows(handful, active)
            torch.autograd.graph.increment_version(handful.parameters)
            return
        with as_they_were([handful.parameters, *handful.states.values()], active):
            self.move(handful)

    def names(self, group: Group) -> tuple[str, ...]:
        """What is kept for every parameter of a group."""
        return self.kept

    def initial(self, name: str, parameter: Tensor, group: Group, slots: slice) -> Tensor:
        """What a state of these slots is before their first step, of the shape of their part of a parameter."""
        return torch.zeros_like(parameter)

    def by_rows(self, handful: ParameterBatch) -> bool:
        """Whether there is a kernel for these tensors, `move_rows`; elsewhere it is `move`."""
        return False

    @abstractmethod
    def move(self, handful: ParameterBatch) -> None:
        """Change parameters and states of all models by one step."""

    def move_rows(self, handful: ParameterBatch, active: Tensor) -> None:
        """Change those of the models that are active, bool [models] on the host, by one pass over memory."""

    def options(self, values: dict[str, float], group: Group) -> dict[str, Any]:
        """One model's hyperparameters as torch's own optimizer takes them."""
        found: dict[str, Any] = {name: value for name, value in values.items() if not name.startswith("beta")}
        if "beta1" in values:
            found["betas"] = (values["beta1"], values["beta2"])
        return found

    # -- the array's life ----------------------------------------------------------------------------------------------

    def hyperparameters(self, index: int, group: int = 0) -> dict[str, float]:
        """One model's hyperparameters."""
        return {name: float(self.param_groups[group][name][index]) for name in self.ranges}

    @torch.no_grad()
    def extract(self, index: int) -> dict[str, Any]:
        """One model's state as the `state_dict` of torch's own optimizer over that model's parameters."""
        state: dict[int, dict[str, Any]] = {}
        groups: list[Group] = []
        count = 0
        for place, group in enumerate(self.param_groups):
            own = [p for p in group["params"] if owner_of(p) in (None, index)]
            for number, parameter in enumerate(own, count):
                row = 0 if owner_of(parameter) is not None else index
                if self.state.get(parameter) and float(self.state[parameter]["step"][row]) > 0:
                    state[number] = {name: value[row].clone() for name, value in self.state[parameter].items()}
            options = self.options(self.hyperparameters(index, place), group)
            groups.append({**self._settings(options), "params": list(range(count, count + len(own)))})
            count += len(own)
        return {"state": state, "param_groups": groups}

    def _settings(self, options: dict[str, Any]) -> dict[str, Any]:
        if self.genuine is None:
            return options
        made = self.genuine([nn.Parameter(torch.zeros(()))], **options)
        return {name: value for name, value in made.param_groups[0].items() if name != "params"}

    @torch.no_grad()
    def insert(self, index: int, state_dict: dict[str, Any]) -> None:
        """Take over a slot's state from the `state_dict` of torch's own optimizer, or from `extract`; others stay.

        Raises:
            ConfigError: as many groups or parameters are not there.
        """
        self.reset(index)
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ConfigError(f"the state has {len(groups)} groups of parameters, not {len(self.param_groups)}")
        for group, given in zip(self.param_groups, groups, strict=True):
            own = [p for p in group["params"] if owner_of(p) in (None, index)]
            if len(own) != len(given["params"]):
                raise ConfigError(f"the state has {len(given['params'])} parameters in a group of {len(own)}")
            values = dict(given)
            if "betas" in values:
                values["beta1"], values["beta2"] = values["betas"]
            for name in self.ranges:
                if name in values:
                    group[name][index] = float(values[name])
            for parameter, number in zip(own, given["params"], strict=True):
                self._fill(parameter, index, state_dict["state"].get(number, {}), group)
        self._share_ages()

    def _fill(self, parameter: nn.Parameter, index: int, given: dict[str, Any], group: Group) -> None:
        if not given:
            return
        if not self.state[parameter]:
            self._begin(parameter, group, torch.zeros(parameter.shape[0]))
        state = self.state[parameter]
        # A parameter that was never stepped may have another age than the rest.
        state["step"] = state["step"].clone()
        row = 0 if owner_of(parameter) is not None else index
        for name, value in given.items():
            if name in state and value is not None:
                state[name][row].copy_(torch.as_tensor(value))
        if "step" not in given:
            # torch's SGD keeps no age; all that it asks is whether there was a step.
            state["step"][row] = 1

    @torch.no_grad()
    def reset(self, index: int, **hyperparameters: float) -> None:
        """Make a slot's state as before its first step, and active; others stay as they are, bitwise.

        Args:
            index: the slot.
            hyperparameters: new values for it, in all groups.

        Raises:
            ConfigError: no such slot or hyperparameter, or a value out of its range.
        """
        if not 0 <= index < self.models:
            raise ConfigError(f"slot {index}: there are {self.models}, counted from 0")
        for name, value in hyperparameters.items():
            if name not in self.ranges:
                raise ConfigError(f"{name}={value}: {type(self).__name__} has {', '.join(self.ranges)} for each model")
            checked = self._vector(name, value, self.ranges[name])
            for group in self.param_groups:
                group[name][index] = checked[index]
        for group in self.param_groups:
            for parameter in group["params"]:
                self._clear(parameter, index, group)
        self.active[index] = True

    def _clear(self, parameter: nn.Parameter, index: int, group: Group) -> None:
        owner, state = owner_of(parameter), self.state.get(parameter)
        if not state or owner not in (None, index):
            return
        row = 0 if owner is not None else index
        state["step"][row] = 0
        for name in self.names(group):
            first = self.initial(name, parameter.detach()[row : row + 1], group, slice(index, index + 1))
            state[name][row].copy_(first[0])

    @torch.no_grad()
    def select(self, kept: Selection) -> None:
        """Follow `FusedArray.select`: its parameters, every state, hyperparameter and age; bitwise."""
        before = self.state
        self.state = type(before)(dict)
        ages: dict[int, Tensor] = {}
        for group in self.param_groups:
            group["params"] = [new for old in group["params"] for new in self._moved(old, kept, before, ages)]
            for name in self.ranges:
                group[name] = kept.rows(group[name])
        self.active, self.models = kept.rows(self.active), len(kept.indices)

    def _moved(
        self, old: nn.Parameter, kept: Selection, before: Any, ages: dict[int, Tensor]
    ) -> tuple[nn.Parameter, ...]:
        news = kept.moved.get(old, (old,))
        state = before.get(old) or {}
        for new in news:
            for name, value in state.items():
                rows = kept.rows(value) if owner_of(old) is None else value.clone()
                self.state[new][name] = ages.setdefault(id(value), rows) if name == "step" else rows
        return news

    def state_dict(self) -> dict[str, Any]:
        """As torch's, and which slots are active."""
        return {**super().state_dict(), "active": self.active}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        super().load_state_dict(state_dict)
        self.active = state_dict["active"].clone()
        self._share_ages()

    def _share_ages(self) -> None:
        """Parameters of a group and of the same age keep it in the same tensor, so that they are moved together."""
        for group in self.param_groups:
            known: dict[tuple[Any, ...], Tensor] = {}
            for parameter in group["params"]:
                if state := self.state.get(parameter):
                    key = (owner_of(parameter), tuple(state["step"].tolist()))
                    state["step"] = known.setdefault(key, state["step"])
