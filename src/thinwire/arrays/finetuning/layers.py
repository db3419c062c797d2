# SPDX-License-Identifier: Apache-2.0
"""A layer of the base with the adapters of all members: the base computes all rows at once, adapters their own rows.

Shapes: B members, ranks up to r, n elements (positions of all rows) of each member. A member of a lower rank is padded
with zeros: both factors are zero there, so the gradient of either is zero, and so are weight decay and all moments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.arrays.finetuning.rows import Rows
from thinwire.arrays.fusion.batch import Batch
from thinwire.arrays.fusion.rng import DropoutRates, dropout
from thinwire.arrays.fusion.store import move_


@dataclass(frozen=True)
class Adapter:
    """One member's adapter of one layer.

    Args:
        tensors: the trained tensors, by their names in a state dict of PEFT behind the layer's path.
        rank: of LoRA; 0 for IA3.
        scaling: what LoRA's product is multiplied by.
        rate: the dropout rate of LoRA's input.
        feedforward: of IA3, whether the input is scaled instead of the output.
    """

    tensors: Mapping[str, Tensor]
    rank: int = 0
    scaling: float = 1.0
    rate: float = 0.0
    feedforward: bool = False


# The axis of each tensor of one member along which ranks differ, and which kind of layer has it.
RANK_AXIS = {
    "lora_A.weight": 0,
    "lora_B.weight": 1,
    "lora_embedding_A": 0,
    "lora_embedding_B": 1,
}


class AdapterLayer(nn.Module):
    """The base's layer and the adapters of all members; a member without an adapter here gets the base's output.

    Args:
        path: of the layer in the base.
        base_layer: the base's layer.
        rows: of the array.
        adapters: one per member, or None for a member that leaves this layer alone.
    """

    def __init__(self, path: str, base_layer: nn.Module, rows: Rows, adapters: Sequence[Adapter | None]) -> None:
        super().__init__()
        self.path, self.rows = path, rows
        self.base_layer = base_layer
        self.adapters: list[Adapter | None] = []
        self.stacked: dict[str, nn.Parameter] = {}
        self.rebuild(adapters, [None] * len(adapters))

    # -- members -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def rebuild(
        self, adapters: Sequence[Adapter | None], sources: Sequence[int | None]
    ) -> dict[str, tuple[nn.Parameter | None, nn.Parameter | None]]:
        """Stack the adapters; returns each tensor's parameter before and after.

        Args:
            adapters: one per new slot.
            sources: for each new slot the old slot whose trained values it keeps; None takes those of the adapter.
        """
        before, names = self.stacked, dict[str, Tensor]()
        for each in adapters:
            for name, tensor in {} if each is None else each.tensors.items():
                names.setdefault(name, tensor)
        self.rank = max((each.rank for each in adapters if each is not None), default=0)
        after: dict[str, nn.Parameter] = {}
        for name, like in names.items():
            shape = list(like.shape)
            if name in RANK_AXIS:
                shape[RANK_AXIS[name]] = self.rank
            # Adapters that are stacked already have no values of their own.
            device = before[name].device if name in before else like.device
            values = torch.full((len(adapters), *shape), _unused(name), dtype=like.dtype, device=device)
            for slot, (each, source) in enumerate(zip(adapters, sources, strict=True)):
                if each is None or name not in each.tensors:
                    continue
                own = each.tensors[name] if source is None else self._own(before[name][source], name, each)
                self._own(values[slot], name, each).copy_(own)
            after[name] = nn.Parameter(values)
        self.stacked, self.adapters = after, list(adapters)
        self._settle()
        return {name: (before.get(name), after.get(name)) for name in {**before, **after}}

    @staticmethod
    def _own(values: Tensor, name: str, adapter: Adapter) -> Tensor:
        """View one member's part without padding."""
        return values.narrow(RANK_AXIS[name], 0, adapter.rank) if name in RANK_AXIS else values

    def _settle(self) -> None:
        """Compute what depends on the members only."""
        every = [each or Adapter({}) for each in self.adapters]
        like = next(iter(self.stacked.values()))
        self.rates = [each.rate for each in every]
        # In the adapters' dtype, as PEFT multiplies by Python's number.
        self.scaling = torch.tensor([each.scaling for each in every], dtype=like.dtype, device=like.device)
        self.feedforward = any(each.feedforward for each in every)
        # Where a member has no magnitude or no scale of IA3, the array's is not used.
        lacking = {name: [name not in each.tensors for each in every] for name in self.stacked if name not in RANK_AXIS}
        self.lacking = {
            name: torch.tensor(own, dtype=torch.bool, device=like.device) for name, own in lacking.items() if any(own)
        }

    def tensors_of(self, slot: int) -> dict[str, Tensor]:
        """Return a member's tensors without padding."""
        own = self.adapters[slot]
        if own is None:
            return {}
        return {name: self._own(self.stacked[name].detach()[slot], name, own) for name in own.tensors}

    def set_rates(self, values: Sequence[float]) -> None:
        """Change the dropout rate of every member that has an adapter here."""
        self.adapters = [each and replace(each, rate=rate) for each, rate in zip(self.adapters, values, strict=True)]
        self._settle()

    def to_device(self, device: torch.device) -> None:
        """Move the adapters."""
        for parameter in self.stacked.values():
            move_(parameter, device)
        self._settle()

    # -- running -------------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the base's output with each member's adapter applied to its rows."""
        if not self.rows.count:
            return self.base_layer(x, *args, **kwargs)
        if "ia3_l" in self.stacked:
            return self._scaled(x, *args, **kwargs)
        result = self.base_layer(x, *args, **kwargs)
        if "lora_embedding_A" in self.stacked:
            return self._embedded(x, result)
        return self._added(x, result)

    def _part(self, name: str) -> Tensor:
        """Return a tensor's rows of the members that run."""
        whole, rows = self.stacked[name], self.rows
        return whole if rows.count == rows.size else whole[rows.running]

    def _added(self, x: Tensor, result: Tensor) -> Tensor:
        rows = self.rows
        down, up, scaling = self._part("lora_A.weight"), self._part("lora_B.weight"), self.scaling[rows.running]
        own = rows.split(x.to(down.dtype), self.path)
        dropped = self._dropped(x.to(down.dtype), own)
        inner = torch.bmm(dropped, down.transpose(1, 2))
        base = result.reshape(rows.count, -1, result.shape[-1])
        bias = self._bias()
        if bias is not None or "lora_magnitude_vector.weight" in self.stacked:
            product = torch.bmm(inner, up.transpose(1, 2))
            product = (product if bias is None else product + bias) * scaling.view(-1, 1, 1)
            if "lora_magnitude_vector.weight" in self.stacked:
                product = self._with_magnitude(dropped, base, product, down, up, scaling, is_same=dropped is own)
            found = base + product
        else:
            # Scaled where it has few columns.
            inner = inner * scaling.view(-1, 1, 1)
            if base.dtype == inner.dtype and not torch.is_autocast_enabled(x.device.type):
                found = torch.baddbmm(base, inner, up.transpose(1, 2))
            else:
                found = base + torch.bmm(inner, up.transpose(1, 2))
        return found.view(result.shape).to(result.dtype)

    def _bias(self) -> Tensor | None:
        if "lora_B.bias" not in self.stacked:
            return None
        bias, absent = self._part("lora_B.bias"), self._lacking("lora_B.bias")
        return (bias if absent is None else torch.where(absent.unsqueeze(1), 0.0, bias)).unsqueeze(1)

    def _dropped(self, x: Tensor, own: Tensor) -> Tensor:
        """Apply each member's dropout to its rows; returns [members, elements, features]."""
        rates = self.rates[self.rows.running]
        if not self.training or not any(rates):
            return own
        given = Batch(x.reshape(self.rows.count, -1, *x.shape[1:]).contiguous(), 0)
        rate = rates[0] if len(set(rates)) == 1 else DropoutRates(rates)
        found = dropout(self.rows.context(), F.dropout, given, rate, training=True)
        return found.at(0).reshape(own.shape)

    def _with_magnitude(
        self,
        x: Tensor,
        base: Tensor,
        product: Tensor,
        down: Tensor,
        up: Tensor,
        scaling: Tensor,
        *,
        is_same: bool,
    ) -> Tensor:
        """Return what DoRA adds to the base's output, as PEFT computes it: the norm of the weights is a constant."""
        from peft.utils.integrations import dequantize_module_weight

        layer: Any = self.base_layer
        weight = dequantize_module_weight(layer).to(x.dtype)
        weight = weight if isinstance(layer, nn.Linear) else weight.t()
        with torch.no_grad():
            norm = _row_norms(weight, down, up, scaling)
        scale = self._part("lora_magnitude_vector.weight") / norm
        absent = self._lacking("lora_magnitude_vector.weight")
        if absent is not None:
            scale = torch.where(absent.unsqueeze(1), 1.0, scale)
        scale = scale.unsqueeze(1)
        if not is_same:
            # PEFT scales the base's output of the same dropped input.
            plain = F.linear(x, weight)
        else:
            plain = base if layer.bias is None else base - layer.bias
        return (scale - 1) * plain + scale * product

    def _lacking(self, name: str) -> Tensor | None:
        found = self.lacking.get(name)
        return None if found is None else found[self.rows.running]

    def _embedded(self, index: Tensor, result: Tensor) -> Tensor:
        rows, layer = self.rows, self.base_layer
        tables = self._part("lora_embedding_A").transpose(1, 2)  # [B, tokens, r]
        up, scaling = self._part("lora_embedding_B"), self.scaling[rows.running]
        own = rows.split(index.unsqueeze(-1), self.path).squeeze(-1)
        offset = torch.arange(rows.count, device=index.device).unsqueeze(1) * tables.shape[1]
        inner = F.embedding(own + offset, tables.flatten(0, 1)) * scaling.view(-1, 1, 1)
        product = torch.bmm(inner, up.transpose(1, 2))
        scale = getattr(layer, "embed_scale", None)
        if scale is not None:
            product = product * (scale.to(product.dtype) if isinstance(scale, Tensor) else scale)
        base = result.reshape(rows.count, -1, result.shape[-1])
        return (base + product).view(result.shape).to(result.dtype)

    def _scaled(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rows, scale = self.rows, self._part("ia3_l").flatten(1).unsqueeze(1)
        absent = self._lacking("ia3_l")
        if absent is not None:
            scale = torch.where(absent.view(-1, 1, 1), 1.0, scale)
        if self.feedforward:
            own = rows.split(x.to(scale.dtype), self.path)
            return self.base_layer((own * scale).view(x.shape).to(x.dtype), *args, **kwargs)
        result = self.base_layer(x, *args, **kwargs)
        return (rows.split(result, self.path) * scale).view(result.shape).to(result.dtype)


def _unused(name: str) -> float:
    """Return the values of padding, and of members without this tensor."""
    return 0.0 if name in RANK_AXIS or name.endswith("bias") else 1.0


def _row_norms(weight: Tensor, down: Tensor, up: Tensor, scaling: Tensor) -> Tensor:
    """Return the Euclidean norms of the rows of W + s B A, [B, out], without a matrix of that size per member."""
    # |w|^2 + 2 s (W A^T . B) + s^2 (B A A^T . B), by rows.
    cross = torch.matmul(weight, down.transpose(1, 2))  # [B, out, r]
    gram = torch.bmm(down, down.transpose(1, 2))
    step = scaling.view(-1, 1)
    added = 2 * step * (cross * up).sum(2) + step.square() * (torch.bmm(up, gram) * up).sum(2)
    return (weight.square().sum(1) + added).clamp(min=0).sqrt()
