# SPDX-License-Identifier: Apache-2.0
"""Loss scaling and gradient clipping of an array, for each model by itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.arrays.fusion.optimizers.base import FusedOptimizer
from thinwire.arrays.fusion.optimizers.parameter_batch import slots_of
from thinwire.arrays.fusion.recording import RECORDER, constants
from thinwire.arrays.fusion.store import Selection, column, owner_of, rows_of
from thinwire.errors import ConfigError


class GradScaler:
    """`torch.amp.GradScaler` with a scale per model: a model that overflows skips its step, and no other model does.

        scaler.scale(losses).sum().backward()
        scaler.step(optimizer)
        scaler.update()

    Args:
        models: the number of models.
        init_scale: the first scale of every model.
        growth_factor: multiplies a scale after `growth_interval` steps without overflow.
        backoff_factor: multiplies a scale after an overflow.
        growth_interval: in steps.
        enabled: False makes all methods do nothing.

    Raises:
        ConfigError: a value out of its range.

    Example:
        >>> import torch
        >>> from thinwire.arrays.fusion import SGD, GradScaler, fuse
        >>> array = fuse([torch.nn.Linear(1, 1) for _ in range(2)])
        >>> optimizer, scaler = SGD(array.parameters(), lr=0.1), GradScaler(2, init_scale=8.0)
        >>> outputs = array(torch.ones(1, 1)).flatten() * torch.tensor([1.0, torch.inf])
        >>> scaler.scale(outputs).sum().backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> scaler.scales.tolist()
        [8.0, 4.0]
    """

    def __init__(
        self,
        models: int,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if not (0 < init_scale < inf and growth_factor > 1 and 0 < backoff_factor < 1 and growth_interval >= 1):
            raise ConfigError(
                f"init_scale={init_scale}, growth_factor={growth_factor}, backoff_factor={backoff_factor}, "
                f"growth_interval={growth_interval}: scales are positive, grow by more than 1 and back off by less"
            )
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        self.enabled, self.init_scale = enabled, float(init_scale)
        self.scales = torch.full((models,), self.init_scale, dtype=torch.float32, device="cpu")
        self.growths = torch.zeros(models, dtype=torch.int64, device="cpu")
        self._found: dict[int, Tensor] = {}

    def scale(self, losses: Tensor) -> Tensor:
        """Multiply every model's loss [B] by its scale."""
        if not self.enabled:
            return losses
        self._move(losses.device)
        return losses * self.scales

    def _move(self, device: torch.device) -> None:
        """Keep scales where the gradients are, so that no step waits for a GPU."""
        recorded = RECORDER.get()
        if recorded is not None:
            recorded(self)
        if self.scales.device != device:
            self.scales, self.growths = self.scales.to(device), self.growths.to(device)

    @torch.no_grad()
    def unscale_(self, optimizer: FusedOptimizer) -> Tensor:
        """Divide every model's gradients by its scale; returns which models have a gradient that is not finite, [B].

        Raises:
            ConfigError: it was called already since the last update.
        """
        if not self.enabled:
            return torch.zeros_like(self.growths, dtype=torch.bool)
        if id(optimizer) in self._found:
            raise ConfigError(
                "unscale_() was called twice since the last update(): gradients would be divided twice. Call it once "
                "per step"
            )
        held = _with_gradients(p for group in optimizer.param_groups for p in group["params"])
        if held:
            self._move(held[0].device)
        overflowed = torch.zeros_like(self.growths, dtype=torch.bool)
        # In fp64 and then rounded, as torch's scaler does: the gradients have the same bits.
        inverse = self.scales.double().reciprocal()
        for parameter in held:
            gradient, slots = parameter.grad, slots_of(parameter)
            assert gradient is not None
            own = inverse[slots].to(gradient.device, torch.promote_types(gradient.dtype, torch.float32))
            gradient.mul_(column(own, gradient))
            overflowed[slots] |= ~rows_of(gradient.isfinite()).all(1).to(overflowed.device)
        self._found[id(optimizer)] = overflowed
        return overflowed

    def step(self, optimizer: FusedOptimizer) -> None:
        """Step every active model whose gradients are all finite."""
        if not self.enabled:
            optimizer.step()
            return
        found = self._found.get(id(optimizer))
        found = self.unscale_(optimizer) if found is None else found
        with optimizer.skipping(found):
            optimizer.step()

    def update(self) -> None:
        """Lower the scales of models that overflowed, and raise those of models without an overflow for long enough.

        Raises:
            ConfigError: no gradients were checked since the last update.
        """
        if not self.enabled:
            return
        if not self._found:
            raise ConfigError("update() without step() or unscale_(): no gradients were checked")
        found = torch.stack(list(self._found.values())).any(0)
        growths = torch.where(found, 0, self.growths + 1)
        grown = growths >= self.growth_interval
        larger = self.scales * self.growth_factor
        # As in torch, a scale that would overflow stays as it is.
        larger = torch.where(larger.isfinite(), larger, self.scales)
        # In place: a captured step reads and writes the same tensors again.
        self.scales.copy_(
            torch.where(found, self.scales * self.backoff_factor, torch.where(grown, larger, self.scales))
        )
        self.growths.copy_(torch.where(grown, 0, growths))
        self.forget()

    def forget(self) -> None:
        """Forget which models overflowed since the last update."""
        self._found = {}

    def extract(self, index: int) -> dict[str, Any]:
        """Return one model's state in the form of `torch.amp.GradScaler.state_dict`."""
        if not self.enabled:
            return {}
        return {
            "scale": float(self.scales[index]),
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": int(self.growths[index]),
        }

    def insert(self, index: int, state_dict: dict[str, Any] | None = None) -> None:
        """Load a slot's scale from the state of `extract` or of torch's own scaler; None resets it."""
        state = state_dict or {}
        self.scales[index] = state.get("scale", self.init_scale)
        self.growths[index] = state.get("_growth_tracker", 0)

    def select(self, kept: Selection) -> None:
        """Follow `FusedArray.select`."""
        self.scales, self.growths = kept.rows(self.scales), kept.rows(self.growths)
        self._found = {}

    def state_dict(self) -> dict[str, Tensor]:
        """Return every model's scale, and its steps since the scale last changed."""
        return {"scales": self.scales.clone(), "growths": self.growths.clone()}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Load what `state_dict` returned.

        Raises:
            ConfigError: it has another number of models.
        """
        if state_dict["scales"].shape != self.scales.shape:
            raise ConfigError(
                f"the state has {len(state_dict['scales'])} scales, and there are {len(self.scales)} models"
            )
        self.scales.copy_(state_dict["scales"])
        self.growths.copy_(state_dict["growths"])


@torch.no_grad()
def gradient_norms(parameters: Iterable[nn.Parameter], *, models: int | None = None) -> Tensor:
    """Return the Euclidean norm of every model's gradient, [B].

    Args:
        parameters: of an array.
        models: the number of models; None finds it from the parameters.
    """
    held = _with_gradients(parameters)
    size = models if models is not None else _size(held)
    norms: list[Tensor] = []
    for parameter in held:
        assert parameter.grad is not None
        own = torch.linalg.vector_norm(rows_of(parameter.grad), dim=1)
        owner = owner_of(parameter)
        if owner is not None:
            own = F.pad(own, (owner, size - owner - 1))
        norms.append(own)
    if not norms:
        return torch.zeros(size, dtype=torch.float32, device="cpu")
    return torch.linalg.vector_norm(torch.stack(norms), dim=0)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[nn.Parameter], max_norm: float | Sequence[float] | Tensor, *, models: int | None = None
) -> Tensor:
    """Clip every model's gradient by its own norm, as `torch.nn.utils.clip_grad_norm_`; returns the norms, [B].

    Args:
        parameters: of an array.
        max_norm: a number, or one per model.
        models: the number of models; None finds it from the parameters.

    Raises:
        ConfigError: not one per model, or not positive.
    """
    held = _with_gradients(parameters)
    norms = gradient_norms(held, models=models)
    bounds = _bounds("max_norm", max_norm, len(norms), norms)
    # The constant of torch.nn.utils.clip_grad_norm_.
    factors = (bounds / (norms + 1e-6)).clamp(max=1.0)
    for parameter in held:
        assert parameter.grad is not None
        own = factors[slots_of(parameter)].to(parameter.grad.device)
        parameter.grad.mul_(column(own, parameter.grad))
    return norms


@torch.no_grad()
def clip_grad_value_(parameters: Iterable[nn.Parameter], clip_value: float | Sequence[float] | Tensor) -> None:
    """Clip every entry of every model's gradient, as `torch.nn.utils.clip_grad_value_`.

    Args:
        parameters: of an array.
        clip_value: a number, or one per model.

    Raises:
        ConfigError: not one per model, or not positive.
    """
    held = _with_gradients(parameters)
    size = _size(held)
    for parameter in held:
        assert parameter.grad is not None
        bounds = _bounds("clip_value", clip_value, size, parameter.grad)
        own = column(bounds[slots_of(parameter)], parameter.grad)
        parameter.grad.clamp_(-own, own)


def _with_gradients(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.grad is not None]


def _size(parameters: Sequence[nn.Parameter]) -> int:
    owned = [1 + owner for owner in map(owner_of, parameters) if owner is not None]
    return next((p.shape[0] for p in parameters if owner_of(p) is None), max(owned, default=1))


def _bounds(name: str, value: float | Sequence[float] | Tensor, size: int, like: Tensor) -> Tensor:
    found = torch.as_tensor(value, dtype=torch.float64, device="cpu")
    found = found.expand(size) if found.dim() == 0 else found
    if found.shape != (size,) or not all(0 < bound <= inf for bound in found.tolist()):
        raise ConfigError(f"{name}={value}: a positive number, or one for each of {size} models")
    return constants(tuple(found.tolist()), like)
