"""A serial model, laid out on a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.errors import ConfigError
from thinwire.tensor2d.embedding import Embedding2D
from thinwire.tensor2d.families import style_of, styles_within
from thinwire.tensor2d.loss import cross_entropy_2d
from thinwire.tensor2d.mesh import Mesh2D
from thinwire.tensor2d.module import Module2D, SharedGradients
from thinwire.tensor2d.plan import Head, Site, Style


def parallelize_2d(
    model: nn.Module, mesh: Mesh2D, plan: Mapping[str, Style] | None = None, *, seed: int = 0
) -> nn.Module:
    """Replace a model's layers by their blocks on this rank; the model's own `forward` stays what it is.

    Known are torch's linear layers, norms, embeddings, dropout and `MultiheadAttention` (so `TransformerEncoderLayer`
    too), thinwire's own GPT, and the GPT-2 and Llama families of `transformers`. Every rank gives the same parameters;
    from then on each gives its row's samples (`mesh.rows_of`), and the model returns [b / r, ..., v / c] logits for
    `cross_entropy_2d`. A model of `transformers` that is given labels computes that loss itself.

    Nothing is changed unless everything can be. Dropout is keyed by places in the whole batch.

    Xu et al., An Efficient 2D Method for Training Super-Large Deep Learning Models, 2021, arXiv:2104.05343.

    Args:
        model: the serial model; its parameters may be on the meta device.
        mesh: the ranks.
        plan: styles by names of modules, in which * stands for anything; they come before what is known.
        seed: of dropout.

    Raises:
        ConfigError: a module that cannot be laid out, with its name and the divisor; or a name in the plan that no
            module has.
    """
    styles = _styles(model, mesh, plan or {})
    site = Site("", model, mesh, seed, 0)
    made: dict[str, nn.Module] = {}
    # Heads come last: a tied one needs to know its table's new home.
    for name in sorted(styles, key=lambda name: isinstance(styles[name], Head)):
        module, number = model.get_submodule(name), list(styles).index(name)
        here = Site(name, module, mesh, seed, number, site.tables, site.attributes)
        replacement = styles[name].lay_out(here)
        if replacement is not None:
            made[name] = replacement
    if "" in made:
        raise ConfigError(f"the model is itself a {type(model).__name__}; wrap it in a Sequential")
    for module, attribute, value in site.attributes:
        setattr(module, attribute, value)
    for name, replacement in made.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, replacement.train(model.get_submodule(name).training))
    SharedGradients(model, mesh)
    _give_loss(model, mesh)
    return model


def _styles(model: nn.Module, mesh: Mesh2D, plan: Mapping[str, Style]) -> dict[str, Style]:
    """The style of every module, outermost first; what lies within a replaced one has none."""
    names = [name for name, _ in model.named_modules()]
    for pattern in plan:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"the plan's {pattern!r} is the name of no module; there are {', '.join(names[1:6])}, ..."
            )
    styles: dict[str, Style] = {}
    within: dict[str, Style] = {}
    opaque: list[str] = []
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in opaque):
            continue
        planned = next((style for pattern, style in plan.items() if fnmatchcase(name, pattern)), None)
        known = styles_within(name, module, mesh)
        within |= {f"{name}.{inner}".strip("."): style for inner, style in known.items()}
        tied = isinstance(module, nn.Linear) and id(module.weight) in tables
        styles[name] = planned or within.get(name) or (Head() if tied else style_of(name, module))
        if isinstance(module, nn.MultiheadAttention):
            opaque.append(name)
    return styles


def _give_loss(model: Any, mesh: Mesh2D) -> None:
    """Have a causal model of `transformers` compute its loss over the whole vocabulary."""
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
    """The whole of what every rank holds [b / r, ..., h / c] of, on every rank, for looking at: [b, ..., h].

    Args:
        x: this rank's block.
        mesh: the ranks.
        size: features that count, where they were padded; None is all.
    """
    row = torch.cat(mesh.along_row.all_gather(x.contiguous()).wait(), dim=-1)
    return torch.cat(mesh.along_column.all_gather(row).wait())[..., :size]


def is_laid_out(model: nn.Module) -> bool:
    """Whether a model has layers on a mesh."""
    return any(isinstance(module, Module2D) for module in model.modules())
