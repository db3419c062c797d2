# SPDX-License-Identifier: Apache-2.0
"""Styles: the ways in which `parallelize_2d` replaces modules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor, nn

from thinwire.errors import ConfigError
from thinwire.tensor2d.attention import MultiheadAttention2D
from thinwire.tensor2d.dropout import Dropout2D
from thinwire.tensor2d.embedding import Algorithm, Embedding2D, PositionTable2D, padded_size
from thinwire.tensor2d.linear import Layout, Linear2D, TiedHead2D
from thinwire.tensor2d.mesh import Mesh2D, check_divides
from thinwire.tensor2d.norms import LayerNorm2D, RMSNorm2D


@dataclass
class Site:
    """One module that a style replaces.

    Attributes:
        name: name of the module in its model.
        module: the serial module.
        mesh: the ranks.
        seed: seed of dropout.
        number: number of the module in its model, for dropout.
        tables: the embeddings replaced so far, by the identity of their serial table.
        attributes: attributes to set on modules that are not replaced, after all modules passed their checks.
    """

    name: str
    module: nn.Module
    mesh: Mesh2D
    seed: int
    number: int
    tables: dict[int, Embedding2D] = field(default_factory=dict[int, Embedding2D])
    attributes: list[tuple[nn.Module, str, Any]] = field(default_factory=list[tuple[nn.Module, str, Any]])

    def get(self, attribute: str) -> Any:
        """Return an attribute of the serial module.

        Raises:
            ConfigError: the module does not have it, so the style does not fit the module.
        """
        if not hasattr(self.module, attribute):
            kind = type(self.module).__name__
            raise ConfigError(
                f"{self.name} is a {kind} without {attribute}: this style of the plan needs another type of module"
            )
        return getattr(self.module, attribute)


class Style(ABC):
    """The way in which one module is replaced."""

    @abstractmethod
    def lay_out(self, site: Site) -> nn.Module | None:
        """Return the replacement of the module; None keeps the module.

        Raises:
            ConfigError: the module cannot be split; the message names it and the divisor.
        """


@dataclass(frozen=True)
class Dense(Style):
    """A linear layer, or GPT-2's `Conv1D`.

    Args:
        layout: "AB", "ABT", or "auto" for the one that sends less.
        sections: number of equal parts of the output that are split separately, such as 3 for queries, keys and values.
    """

    layout: Layout = "auto"
    sections: int = 1

    def lay_out(self, site: Site) -> nn.Module:
        """Return a `Linear2D`."""
        weight = site.get("weight")
        stored = "in,out" if type(site.module).__name__ == "Conv1D" else "out,in"
        outputs = weight.shape[0] if stored == "out,in" else weight.shape[1]
        parts = (outputs // self.sections,) * self.sections if self.sections > 1 else ()
        return Linear2D(
            weight, site.get("bias"), site.mesh, layout=self.layout, sections=parts, stored=stored, name=site.name
        )


@dataclass(frozen=True)
class Head(Style):
    """The linear layer that computes logits: tied if it shares an embedding's table, padded if the mesh needs it."""

    def lay_out(self, site: Site) -> nn.Module:
        """Return a `TiedHead2D` or a `Linear2D`."""
        weight: Tensor = site.get("weight")
        if id(weight) in site.tables:
            return TiedHead2D(site.tables[id(weight)], site.get("bias"), site.mesh)
        padded = padded_size(weight.shape[0], site.mesh)
        return Linear2D(weight, site.get("bias"), site.mesh, layout="AB", padded=padded, name=site.name)


@dataclass(frozen=True)
class KeyHeads(Style):
    """A layer of keys or values whose heads the columns do not divide: each column gathers the heads it needs.

    Args:
        heads: number of query heads.
        key_heads: number of key heads.
    """

    heads: int
    key_heads: int

    def lay_out(self, site: Site) -> nn.Module:
        """Return a `Linear2D` that gathers its output."""
        weight: Tensor = site.get("weight")
        own, group = self.heads // site.mesh.columns, self.heads // self.key_heads
        if group % own and own % group:
            raise ConfigError(
                f"{site.name}: {own} query heads per column and {group} per key head: one must divide the other. Use "
                "fewer columns"
            )
        first, size = site.mesh.column * own // group, weight.shape[0] // self.key_heads
        kept = first, first + max(1, own // group)
        return Linear2D(weight, site.get("bias"), site.mesh, head_size=size, heads_kept=kept, name=site.name)


@dataclass(frozen=True)
class Norm(Style):
    """A layer norm or an RMS norm over the hidden size."""

    def lay_out(self, site: Site) -> nn.Module:
        """Return a `LayerNorm2D` or an `RMSNorm2D`."""
        module = site.module
        weight = cast("Tensor | None", getattr(module, "weight", None))
        shape = getattr(module, "normalized_shape", None)
        if shape is not None and len(shape) != 1:
            raise ConfigError(
                f"{site.name}: a norm over {tuple(shape)} cannot be split: it must be over the hidden size"
            )
        size = int(shape[0]) if shape is not None else int(site.get("weight").numel())
        check_divides(size, site.mesh.columns, site.name, f"the mesh has {site.mesh.columns} columns")
        if isinstance(module, nn.LayerNorm):
            return LayerNorm2D(weight, module.bias, site.mesh, size=size, epsilon=module.eps)
        # `transformers` calls it `variance_epsilon`. None depends on the input, as in `torch.nn.RMSNorm`.
        epsilon = cast("float | None", getattr(module, "variance_epsilon", getattr(module, "eps", None)))
        return RMSNorm2D(weight, site.mesh, size=size, epsilon=epsilon)


@dataclass(frozen=True)
class Lookup(Style):
    """An embedding of tokens.

    Args:
        algorithm: sends the table or the tokens; "auto" sends the smaller one.
    """

    algorithm: Algorithm = "auto"

    def lay_out(self, site: Site) -> nn.Module:
        """Return an `Embedding2D`."""
        weight, padding = site.get("weight"), site.get("padding_idx")
        if site.get("max_norm") is not None or site.get("sparse") or site.get("scale_grad_by_freq"):
            raise ConfigError(f"{site.name}: max_norm, sparse and scale_grad_by_freq cannot be split. Remove them")
        made = Embedding2D(weight, site.mesh, algorithm=self.algorithm, padding=padding, name=site.name)
        site.tables[id(weight)] = made
        return made


@dataclass(frozen=True)
class Positions(Style):
    """A table of positions or token types, which is replicated over the rows.

    Args:
        parameter: name of the table in the module.
        added: whether the module adds the table's first rows to a stream, instead of looking up ids.
    """

    parameter: str = "weight"
    added: bool = False

    def lay_out(self, site: Site) -> nn.Module:
        """Return a `PositionTable2D`."""
        return PositionTable2D(site.get(self.parameter), site.mesh, parameter=self.parameter, added=self.added)


@dataclass(frozen=True)
class Drop(Style):
    """A dropout layer."""

    def lay_out(self, site: Site) -> nn.Module:
        """Return a `Dropout2D`."""
        return Dropout2D(site.get("p"), site.mesh, seed=site.seed, layer=site.number)


@dataclass(frozen=True)
class Attend(Style):
    """A `torch.nn.MultiheadAttention` for self-attention."""

    def lay_out(self, site: Site) -> nn.Module:
        """Return a `MultiheadAttention2D`."""
        layer = cast(nn.MultiheadAttention, site.module)
        return MultiheadAttention2D(layer, site.mesh, seed=site.seed, number=site.number, name=site.name)


@dataclass(frozen=True)
class DividedCounts(Style):
    """A kept module with attributes divided by the number of columns, such as its number of heads.

    Args:
        attributes: names of the attributes to divide.
        changed: names of other attributes with their new values.
    """

    attributes: tuple[str, ...] = ()
    changed: tuple[tuple[str, int], ...] = ()

    def lay_out(self, site: Site) -> None:
        """Return None; the attributes are set together with the replacements."""
        columns = site.mesh.columns
        for name in self.attributes:
            count = site.get(name)
            check_divides(count, columns, f"{site.name} with {name}={count}", f"the mesh has {columns} columns")
            site.attributes.append((site.module, name, count // columns))
        site.attributes.extend((site.module, name, value) for name, value in self.changed)


@dataclass(frozen=True)
class Untouched(Style):
    """A module without parameters of its own, kept unchanged.

    Its forward only sees this rank's samples and features, so it must treat every sample separately, and every feature
    or head separately.
    """

    def lay_out(self, site: Site) -> None:
        """Return None.

        Raises:
            ConfigError: the module has parameters, which every rank would train differently.
        """
        if any(True for _ in site.module.parameters(recurse=False)):
            raise ConfigError(
                f"{site.name} is a {type(site.module).__name__} with parameters, and no style for it is known. Add a "
                "style of thinwire.tensor2d.plan to the plan, or remove the module from the model"
            )
