"""Two-dimensional tensor parallelism for a serial model: its layers are replaced by layers on a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.errors import ConfigError
from thinwire.tensor2d.embedding import Embedding2D
from thinwire.tensor2d.loss import cross_entropy_2d
from thinwire.tensor2d.mesh import Mesh2D, check_divides
from thinwire.tensor2d.module import SharedGradients
from thinwire.tensor2d.plan import (
    Attend,
    Dense,
    DividedCounts,
    Drop,
    Head,
    KeyHeads,
    Lookup,
    Norm,
    Positions,
    Site,
    Style,
    Untouched,
)

_HEADS = ("head", "lm_head")
_POSITIONS = ("wpe", "position_embedding", "position_embeddings", "token_type_embeddings", "embed_positions")


def parallelize_2d(
    model: nn.Module, mesh: Mesh2D, plan: Mapping[str, Style] | None = None, *, seed: int = 0
) -> nn.Module:
    """Split a model's layers over a 2D mesh, in place: each rank keeps one block of every weight and every activation.

    The model's own `forward` stays as it is. Supported are torch's linear layers, norms, embeddings, dropout and
    `MultiheadAttention` (so `TransformerEncoderLayer` too), thinwire's GPT, and the GPT-2 and Llama families of
    `transformers`. All ranks must call this with equal parameters. Afterwards each rank calls the model with the
    samples of its row of the mesh (`mesh.rows_of`). For b samples and v classes on r rows and c columns of ranks, the
    model returns a block of the logits, [b / r, ..., v / c], from which `cross_entropy_2d` computes the loss. A model
    of `transformers` that is given labels computes this loss itself.

    If any module cannot be split, nothing is changed. Dropout masks do not depend on the mesh.

    Xu et al., An Efficient 2D Method for Training Super-Large Deep Learning Models, 2021, arXiv:2104.05343.

    Args:
        model: the serial model; its parameters may be on the meta device.
        mesh: the mesh of ranks.
        plan: by module name, where * matches any characters, the style: the way in which the module is split. It
            overrides the built-in styles.
        seed: the seed of dropout.

    Raises:
        ConfigError: a module that cannot be split, with its name and the divisor; or a name in the plan that matches no
            module.

    Example:
        Four threads split a network of two layers over a 2x2 mesh and compute the same loss as the whole network:

        >>> import torch
        >>> from torch import nn
        >>> from thinwire.tensor2d import cross_entropy_2d, parallelize_2d, run_mesh_threads
        >>> def network():
        ...     model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        ...     for parameter in model.parameters():
        ...         parameter.data.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
        ...     return model
        >>> x, targets = torch.ones(2, 4), torch.tensor([0, 3])
        >>> def loss(mesh):
        ...     model = parallelize_2d(network(), mesh)
        ...     logits = model(mesh.columns_of(mesh.rows_of(x)))
        ...     return round(cross_entropy_2d(logits, mesh.rows_of(targets), mesh).item(), 4)
        >>> run_mesh_threads(2, 2, loss)
        [8.8295, 8.8295, 8.8295, 8.8295]
        >>> round(nn.functional.cross_entropy(network()(x), targets).item(), 4)
        8.8295
        >>> run_mesh_threads(2, 2, lambda mesh: tuple(parallelize_2d(network(), mesh)[0].weight.shape))
        [(2, 4), (2, 4), (2, 4), (2, 4)]
    """
    styles = _styles(model, mesh, plan or {})
    site = Site("", model, mesh, seed, 0)
    # Styles only make replacements here; the model is changed below, once every module has been found to fit.
    replacements: dict[str, nn.Module] = {}
    # Output heads last: a tied head shares the table of an `Embedding2D`, which must have been made by then.
    for name in sorted(styles, key=lambda name: isinstance(styles[name], Head)):
        module, number = model.get_submodule(name), list(styles).index(name)
        here = Site(name, module, mesh, seed, number, site.tables, site.attributes)
        replacement = styles[name].lay_out(here)
        if replacement is not None:
            replacements[name] = replacement
    if "" in replacements:
        raise ConfigError(
            f"the model is a single {type(model).__name__}, which cannot be replaced in place; wrap it in a Sequential"
        )
    for module, attribute, value in site.attributes:
        setattr(module, attribute, value)
    for name, replacement in replacements.items():
        parent, _, last = name.rpartition(".")
        # New modules are in training mode; the model may be in evaluation.
        setattr(model.get_submodule(parent), last, replacement.train(model.get_submodule(name).training))
    SharedGradients(model, mesh)
    _replace_loss(model, mesh)
    return model


def _styles(model: nn.Module, mesh: Mesh2D, plan: Mapping[str, Style]) -> dict[str, Style]:
    """The style of every module, outermost first; modules inside `MultiheadAttention` have none."""
    names = [name for name, _ in model.named_modules()]
    for pattern in plan:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"plan: no module has the name {pattern!r}; there are {', '.join(names[1:6])}, ...")
    styles: dict[str, Style] = {}
    within: dict[str, Style] = {}
    opaque: list[str] = []
    # A linear layer that has an embedding's weight is an output head, whatever its name.
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in opaque):
            continue
        planned = next((style for pattern, style in plan.items() if fnmatchcase(name, pattern)), None)
        known = _styles_within(name, module, mesh)
        within |= {f"{name}.{inner}".strip("."): style for inner, style in known.items()}
        tied = isinstance(module, nn.Linear) and id(module.weight) in tables
        styles[name] = planned or within.get(name) or (Head() if tied else _style_of(name, module))
        if isinstance(module, nn.MultiheadAttention):
            opaque.append(name)
    return styles


def _style_of(name: str, module: nn.Module) -> Style:
    """The built-in style of a module by its type; `Untouched` for unknown types."""
    last, kind = name.rpartition(".")[2], type(module).__name__
    if isinstance(module, nn.Linear) or kind == "Conv1D":
        return Head() if last in _HEADS else Dense()
    if isinstance(module, nn.LayerNorm | nn.RMSNorm) or kind.endswith("RMSNorm"):
        return Norm()
    if isinstance(module, nn.Embedding):
        return Positions() if last in _POSITIONS else Lookup()
    if isinstance(module, nn.Dropout):
        return Drop()
    return Attend() if isinstance(module, nn.MultiheadAttention) else Untouched()


def _styles_within(name: str, module: Any, mesh: Mesh2D) -> Mapping[str, Style]:
    """Built-in styles of a known composite module and of its submodules, by relative name; "" is the module itself.

    Raises:
        ConfigError: a setting of the module that is not supported.
    """
    # By names of types and attributes, so that `transformers` need not be installed.
    kind = type(module).__name__
    if kind == "GPT2Attention":
        if module.is_cross_attention:
            raise ConfigError(f"{name}: cross attention cannot be split over a mesh; use a model without it")
        _refuse_dropout(name, module.attn_dropout.p, "attn_pdrop")
        return {"": DividedCounts(("num_heads", "split_size")), "c_attn": Dense(sections=3)}
    if all(hasattr(module, each) for each in ("q_proj", "k_proj", "v_proj", "o_proj", "num_key_value_groups")):
        return _llama(name, module, mesh)
    if kind == "Attention" and hasattr(module, "projection") and hasattr(module, "heads"):
        return {"": DividedCounts(("heads",)), "projection": Dense(sections=3)}
    if kind == "Positions" and hasattr(module, "table"):
        return {"": Positions("table", added=True)}
    return {}


def _llama(name: str, module: Any, mesh: Mesh2D) -> Mapping[str, Style]:
    if hasattr(module, "q_norm"):
        raise ConfigError(f"{name}: norms within heads (q_norm, k_norm) cannot be split; use a model without them")
    _refuse_dropout(name, module.attention_dropout, "attention_dropout")
    heads, columns = module.q_proj.weight.shape[0] // module.head_dim, mesh.columns
    key_heads = module.k_proj.weight.shape[0] // module.head_dim
    check_divides(heads, columns, f"{name} of {heads} heads", f"the mesh has {columns} columns")
    if key_heads % columns == 0:
        return {"": DividedCounts()}
    # With gathered key heads a column may have fewer query heads per key head than the whole model.
    own, group = heads // columns, heads // key_heads
    keys = KeyHeads(heads, key_heads)
    return {
        "": DividedCounts(changed=(("num_key_value_groups", own // max(1, own // group)),)),
        "k_proj": keys,
        "v_proj": keys,
    }


def _refuse_dropout(name: str, probability: float, setting: str) -> None:
    if probability:
        raise ConfigError(
            f"{name}: {setting}={probability} would drop the same elements on every rank; set {setting}=0 in its config"
        )


def _replace_loss(model: Any, mesh: Mesh2D) -> None:
    """Make a causal model of `transformers` compute its loss from split logits."""
    if not hasattr(type(model), "loss_function"):
        return
    table = next((layer for layer in model.modules() if isinstance(layer, Embedding2D)), None)

    def loss(
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        **_: Any,
    ) -> Tensor:
        # Position t predicts token t + 1, so the last position has no target.
        following = F.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
        how = "mean" if num_items_in_batch is None else "sum"
        total = cross_entropy_2d(
            logits, following, mesh, vocabulary=vocab_size, ignore_index=ignore_index, reduction=how
        )
        return total if num_items_in_batch is None else total / num_items_in_batch

    if table is not None:
        model.loss_function = loss


@torch.no_grad()
def whole_activation(x: Tensor, mesh: Mesh2D, *, size: int | None = None) -> Tensor:
    """All-gather an activation [b / r, ..., h / c] to [b, ..., h] on every rank, for inspection; it has no gradient.

    Args:
        x: this rank's block.
        mesh: the ranks.
        size: number of features before padding; None if they were not padded.
    """
    row = torch.cat(mesh.along_row.all_gather(x.contiguous()).wait(), dim=-1)
    return torch.cat(mesh.along_column.all_gather(row).wait())[..., :size]
