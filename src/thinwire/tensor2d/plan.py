"""What becomes of each module when a model is laid out on a mesh: one small recipe for each kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from torch import Tensor, nn

from thinwire.errors import ConfigError
from thinwire.tensor2d.attention import MultiheadAttention2D, gathered_heads
from thinwire.tensor2d.dropout import Dropout2D
from thinwire.tensor2d.embedding import Algorithm, Embedding2D, PositionTable2D, padded_size
from thinwire.tensor2d.linear import Layout, Linear2D, TiedHead2D
from thinwire.tensor2d.mesh import Mesh2D, check_divides
from thinwire.tensor2d.norms import LayerNorm2D, RMSNorm2D


@dataclass
class Site:
    """One module that is to be laid out.

    Attributes:
        name: of the module in its model.
        module: the serial one.
        mesh: the ranks.
        seed: of dropout.
        number: of the module in its model, for dropout.
        tables: embeddings so far, by the identity of their serial table.
        attributes: what is to be set on modules that stay, once every module has been found to fit.
    """

    name: str
    module: nn.Module
    mesh: Mesh2D
    seed: int
    number: int
    tables: dict[int, Embedding2D] = field(default_factory=dict[int, Embedding2D])
    attributes: list[tuple[nn.Module, str, Any]] = field(default_factory=list[tuple[nn.Module, str, Any]])

    def get(self, attribute: str) -> Any:
        """An attribute of the serial module.

        Raises:
            ConfigError: it has none of that name, so the plan is for another kind of module.
        """
        if not hasattr(self.module, attribute):
            kind = type(self.module).__name__
            raise ConfigError(f"{self.name} is a {kind} without {attribute}: the plan names another kind of module")
        return getattr(self.module, attribute)


class Style(ABC):
    """How one module is laid out."""

    @abstractmethod
    def lay_out(self, site: Site) -> nn.Module | None:
        """What takes the module's place; None leaves it there.

        Raises:
            ConfigError: it cannot be cut, naming the module and the divisor.
        """


@dataclass(frozen=True)
class Dense(Style):
    """A linear layer, or GPT-2's `Conv1D`.

    Args:
        layout: which of the two storages; "auto" is the one that moves less.
        sections: equal parts of the output that are cut one by one, such as 3 for queries, keys and values.
    """

    layout: Layout = "auto"
    sections: int = 1

    def lay_out(self, site: Site) -> nn.Module:
        """A `Linear2D`."""
        weight, stored = site.get("weight"), _storage_of(site.module)
        outputs = weight.shape[0] if stored == "out,in" else weight.shape[1]
        parts = (outputs // self.sections,) * self.sections if self.sections > 1 else ()
        return Linear2D(
            weight, site.get("bias"), site.mesh, layout=self.layout, sections=parts, stored=stored, name=site.name
        )


@dataclass(frozen=True)
class Head(Style):
    """The linear layer that makes logits: tied to an embedding where it shares its table, and padded where need be."""

    def lay_out(self, site: Site) -> nn.Module:
        """A `TiedHead2D` or a `Linear2D`."""
        weight: Tensor = site.get("weight")
        if id(weight) in site.tables:
            return TiedHead2D(site.tables[id(weight)], site.get("bias"), site.mesh)
        padded = padded_size(weight.shape[0], site.mesh)
        return Linear2D(weight, site.get("bias"), site.mesh, layout="AB", padded=padded, name=site.name)


@dataclass(frozen=True)
class KeyHeads(Style):
    """A layer of keys or values with fewer heads than columns: gathered, so that each column has the heads it needs.

    Args:
        heads: of the queries.
        key_heads: of the keys.
    """

    heads: int
    key_heads: int

    def lay_out(self, site: Site) -> nn.Module:
        """A `Linear2D` that gathers."""
        weight: Tensor = site.get("weight")
        size = weight.shape[0] // self.key_heads
        part = weight, site.get("bias")
        return gathered_heads(part, site.mesh, heads=self.heads, key_heads=self.key_heads, size=size, name=site.name)


@dataclass(frozen=True)
class Norm(Style):
    """A layer norm or an RMS norm over the hidden size."""

    def lay_out(self, site: Site) -> nn.Module:
        """A `LayerNorm2D` or an `RMSNorm2D`."""
        module = site.module
        weight = cast("Tensor | None", getattr(module, "weight", None))
        check_divides(_norm_size(site), site.mesh.columns, site.name, f"the mesh has {site.mesh.columns} columns")
        if isinstance(module, nn.LayerNorm):
            return LayerNorm2D(weight, module.bias, site.mesh, size=_norm_size(site), epsilon=module.eps)
        epsilon = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
        if epsilon is None:  # torch's own default: the dtype's
            epsilon = 1.1920928955078125e-07
        return RMSNorm2D(weight, site.mesh, size=_norm_size(site), epsilon=float(epsilon))


@dataclass(frozen=True)
class Lookup(Style):
    """An embedding of tokens.

    Args:
        algorithm: what travels; "auto" is the smaller of table and tokens.
    """

    algorithm: Algorithm = "auto"

    def lay_out(self, site: Site) -> nn.Module:
        """An `Embedding2D`."""
        weight, padding = site.get("weight"), site.get("padding_idx")
        if site.get("max_norm") is not None or site.get("sparse") or site.get("scale_grad_by_freq"):
            raise ConfigError(f"{site.name}: max_norm, sparse and scale_grad_by_freq cannot be cut; leave them out")
        made = Embedding2D(weight, site.mesh, algorithm=self.algorithm, padding=padding, name=site.name)
        site.tables[id(weight)] = made
        return made


@dataclass(frozen=True)
class Positions(Style):
    """A table that all rows hold alike: of positions, or of kinds of token.

    Args:
        parameter: its name in the module.
        added: whether the module adds its first rows to a stream, instead of looking ids up.
    """

    parameter: str = "weight"
    added: bool = False

    def lay_out(self, site: Site) -> nn.Module:
        """A `PositionTable2D`."""
        return PositionTable2D(site.get(self.parameter), site.mesh, parameter=self.parameter, added=self.added)


@dataclass(frozen=True)
class Drop(Style):
    """Dropout of a stream."""

    def lay_out(self, site: Site) -> nn.Module:
        """A `Dropout2D`."""
        return Dropout2D(site.get("p"), site.mesh, seed=site.seed, layer=site.number)


@dataclass(frozen=True)
class Attend(Style):
    """A `torch.nn.MultiheadAttention` of a stream to itself."""

    def lay_out(self, site: Site) -> nn.Module:
        """A `MultiheadAttention2D`."""
        layer = cast(nn.MultiheadAttention, site.module)
        return MultiheadAttention2D(layer, site.mesh, seed=site.seed, number=site.number, name=site.name)


@dataclass(frozen=True)
class Shares(Style):
    """A module that stays, with counts that are per column from now on.

    Args:
        attributes: names of counts that the columns share, such as heads.
        changed: names of numbers with their new values.
    """

    attributes: tuple[str, ...] = ()
    changed: tuple[tuple[str, int], ...] = ()

    def lay_out(self, site: Site) -> None:
        """Nothing new; the counts are set with everything else."""
        columns = site.mesh.columns
        for name in self.attributes:
            count = site.get(name)
            check_divides(count, columns, f"{site.name} with {name}={count}", f"the mesh has {columns} columns")
            site.attributes.append((site.module, name, count // columns))
        site.attributes.extend((site.module, name, value) for name, value in self.changed)


@dataclass(frozen=True)
class Untouched(Style):
    """A module without parameters, left as it is."""

    def lay_out(self, site: Site) -> None:
        """Nothing.

        Raises:
            ConfigError: it has parameters, of which every rank would train its own.
        """
        if any(True for _ in site.module.parameters(recurse=False)):
            raise ConfigError(
                f"{site.name} is a {type(site.module).__name__} with parameters that nobody knows how to lay out; name "
                "it in the plan, or take it out of the model"
            )


def _storage_of(module: nn.Module) -> Literal["out,in", "in,out"]:
    return "in,out" if type(module).__name__ == "Conv1D" else "out,in"


def _norm_size(site: Site) -> int:
    shape = getattr(site.module, "normalized_shape", None)
    if shape is not None and len(shape) != 1:
        raise ConfigError(f"{site.name}: a norm over {tuple(shape)} cannot be cut; only one over the hidden size can")
    return int(shape[0]) if shape is not None else int(site.get("weight").numel())
