# SPDX-License-Identifier: Apache-2.0
"""Two-dimensional tensor parallelism for a serial model: its layers are replaced by layers on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from thinwire.core.torch_internals import has_forward_hooks
from thinwire.errors import ConfigError
from thinwire.tensor2d.check import Batch, Check
from thinwire.tensor2d.known import is_known, is_linear, is_norm
from thinwire.tensor2d.linear import TiedHead2D
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
from thinwire.tensor2d.pretrained import labels_guards, split_losses, whole_savers

_HEADS = ("head", "lm_head")
_POSITIONS = ("wpe", "position_embedding", "position_embeddings", "token_type_embeddings", "embed_positions")


Plan = Mapping[str | type[nn.Module], Style]


def parallelize_2d(
    model: nn.Module, mesh: Mesh2D, plan: Plan | None = None, *, seed: int = 0, check: Batch | None = None
) -> nn.Module:
    """Split a model's layers over a 2D mesh, in place: each rank keeps a block of every weight.

    The model's own `forward` is unchanged, and each rank has a block of every activation. Supported are torch's linear
    layers, norms, embeddings, dropout, activations and `MultiheadAttention` (so `TransformerEncoderLayer` too),
    thinwire's GPT, and GPT-2, Llama, Mistral and Qwen2 of `transformers`. A module with another forward only sees its
    rank's samples and features. It is refused unless the plan has an entry for its name or class: `Untouched()` states
    that its forward treats every sample, and every feature or head, separately; `DividedCounts` gives it its share of
    the heads. A forward that cuts features into parts (`chunk`) or normalizes over them needs layers that do this
    (`Dense(sections=...)`, `nn.RMSNorm`). `check` detects mistakes.

    All ranks must call this with equal parameters. Afterwards each rank calls the model with the
    samples of its row of the mesh (`mesh.rows_of`). For b samples and v classes on r rows and c columns of ranks, the
    model returns a block of the logits, [b / r, ..., v / c], from which `cross_entropy_2d` computes the loss. A model
    of `transformers` that is given labels computes its loss itself, and its `save_pretrained` saves the whole model.

    If any module cannot be split, or the check fails, nothing is changed. Dropout masks do not depend on the mesh.

    Xu et al., An Efficient 2D Method for Training Super-Large Deep Learning Models, 2021, arXiv:2104.05343.

    Args:
        model: the serial model; its parameters may be on the meta device.
        mesh: the mesh of ranks.
        plan: styles by module name, where * matches any characters, or by class. A style is the way in which a module
            is split. The plan overrides the built-in styles; the first matching entry is used.
        seed: the seed of dropout.
        check: a batch of all samples, the same on all ranks: the model's argument, a tuple of them, or a dict by name.
            Before and after splitting, the model computes outputs and gradients in evaluation mode, and they are
            compared, to the square root of their dtype's precision. Gradients are those of the loss if the model
            returns one (pass labels), and otherwise of a weighted sum of its first output. Tensors with as many rows as
            the first one are split over the rows of the mesh, and floating-point ones of these, but not `labels`, over
            the columns too.

    Raises:
        ConfigError: a module cannot be split, with its name and the divisor; a forward is unknown; a loss needs whole
            logits; a name in the plan matches no module; or outputs or gradients differ, with both values, on all
            ranks.

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

        A model with a custom forward needs an entry in the plan, and is checked:

        >>> class Doubled(nn.Sequential):
        ...     def forward(self, x):
        ...         return 2 * super().forward(x)
        >>> def doubled(mesh):
        ...     model = Doubled(*network())
        ...     return parallelize_2d(model, mesh, {Doubled: Untouched()}, check=x)
        >>> from thinwire.tensor2d.plan import Untouched
        >>> _ = run_mesh_threads(2, 2, doubled)
    """
    styles = _styles(model, mesh, plan or {})
    replacements, attributes = _lay_out(model, mesh, styles, seed)
    checking = None if check is None else Check(model, mesh, check, kept=styles.keys() - replacements.keys())
    undo = _apply(model, mesh, replacements, attributes)
    if checking is not None:
        try:
            checking.compare(model)
        except BaseException:
            undo()
            raise
    return model


def _lay_out(
    model: nn.Module, mesh: Mesh2D, styles: Mapping[str, Style], seed: int
) -> tuple[dict[str, nn.Module], list[tuple[nn.Module, str, Any]]]:
    """Return the replacements by module name, and the attributes to set, without changing the model.

    Raises:
        ConfigError: a module cannot be split.
    """
    site = Site("", model, mesh, seed, 0)
    owners: dict[int, str] = {}
    replacements: dict[str, nn.Module] = {}
    # Output heads last: a tied head shares the table of an `Embedding2D`, which must exist by then.
    for name in sorted(styles, key=lambda name: isinstance(styles[name], Head)):
        module, number = model.get_submodule(name), list(styles).index(name)
        here = Site(name, module, mesh, seed, number, site.tables, site.attributes)
        replacement = styles[name].lay_out(here)
        if replacement is None:
            continue
        replacements[name] = replacement
        if has_forward_hooks(module):
            raise ConfigError(f"{name} has a forward hook, which its replacement would not run. Remove the hook")
        for parameter in () if isinstance(replacement, TiedHead2D) else module.parameters(recurse=False):
            other = owners.setdefault(id(parameter), name)
            if other != name:
                raise ConfigError(
                    f"{other} and {name} share a parameter, which would become two: only an output head can share the "
                    "table of an embedding. Use one module in both places, or give each its own parameter"
                )
    if "" in replacements:
        raise ConfigError(
            f"the model is a single {type(model).__name__}, which cannot be replaced in place. Wrap it in a Sequential"
        )
    changes = [(module, "loss_function", loss) for module, loss in split_losses(model, mesh)]
    changes += [(module, "save_pretrained", save) for module, save in whole_savers(model, mesh)]
    return replacements, [*site.attributes, *changes]


def _apply(
    model: nn.Module,
    mesh: Mesh2D,
    replacements: Mapping[str, nn.Module],
    attributes: list[tuple[nn.Module, str, Any]],
) -> Callable[[], None]:
    """Change the model; the returned function restores it."""
    undoing: list[Callable[[], None]] = []

    def change(module: nn.Module, attribute: str, value: Any) -> None:
        earlier, held = getattr(module, attribute), set(vars(module))
        setattr(module, attribute, value)
        # An attribute that hides one of the class, such as a method, is deleted on restoring.
        added = vars(module).keys() - held

        def undo_one() -> None:
            for name in added:
                delattr(module, name)
            if not added:
                setattr(module, attribute, earlier)

        undoing.append(undo_one)

    for module, attribute, value in attributes:
        change(module, attribute, value)
    # One module may have several names.
    made = {id(model.get_submodule(name)): replacement for name, replacement in replacements.items()}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if id(module) in made:
            parent, _, last = name.rpartition(".")
            # New modules are in training mode; the model may be in evaluation.
            change(model.get_submodule(parent), last, made[id(module)].train(module.training))
    shared, guards = SharedGradients(model, mesh), labels_guards(model, mesh)

    def undo() -> None:
        shared.remove()
        for guard in guards:
            guard.remove()
        for undo_one in reversed(undoing):
            undo_one()

    return undo


def _styles(model: nn.Module, mesh: Mesh2D, plan: Plan) -> dict[str, Style]:
    """Return the style of every module, outermost first; modules inside `MultiheadAttention` have none.

    Raises:
        ConfigError: a name in the plan matches no module, or the forward of a module is unknown.
    """
    names = [name for name, _ in model.named_modules()]
    for pattern in plan:
        if not any(_fits(pattern, name, module) for name, module in model.named_modules()):
            what = f"the name {pattern!r}" if isinstance(pattern, str) else f"the class {pattern.__name__}"
            raise ConfigError(f"plan: no module has {what}. Modules are {', '.join(names[1:6])}, ...")
    styles: dict[str, Style] = {}
    within: dict[str, Style] = {}
    opaque: list[str] = []
    unknown: dict[str, nn.Module] = {}
    # A linear layer with an embedding's weight is an output head, whatever its name.
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in opaque):
            continue
        planned = next((style for pattern, style in plan.items() if _fits(pattern, name, module)), None)
        known = _styles_within(name, module, mesh)
        within |= {f"{name}.{inner}".strip("."): style for inner, style in known.items()}
        tied = is_linear(module) and id(module.weight) in tables
        # The built-in settings of a kept module, such as its number of heads, also apply if the plan keeps it.
        builtin = within.get(name) if planned is None or isinstance(planned, Untouched) else None
        styles[name] = builtin or planned or (Head() if tied else _style_of(name, module))
        if planned is None and not is_known(module) and not any(True for _ in module.parameters(recurse=False)):
            unknown[name] = module
        if isinstance(styles[name], Attend):
            opaque.append(name)
    _refuse_unknown(unknown)
    return styles


def _fits(pattern: str | type[nn.Module], name: str, module: nn.Module) -> bool:
    return fnmatchcase(name, pattern) if isinstance(pattern, str) else type(module) is pattern


def _refuse_unknown(modules: Mapping[str, nn.Module]) -> None:
    """Check that the forward of all modules without parameters is known; report all unknown ones together."""
    if not modules:
        return
    first: dict[str, str] = {}
    for name, module in modules.items():
        first.setdefault(type(module).__name__, name or "the model")
    found = ", ".join(f"{kind} ({name})" for kind, name in first.items())
    entries = ", ".join(f"{kind}: Untouched()" for kind in first)
    raise ConfigError(
        f"the forward of {found} is unknown, and would see only a part of the samples and features. If each "
        f"treats every sample, and every feature or head, separately, pass plan={{{entries}}}, or DividedCounts for "
        "one "
        "that counts heads (thinwire.tensor2d.plan), and check=batch, which compares with the serial model. If not, "
        "build it from layers that can be split"
    )


def _style_of(name: str, module: nn.Module) -> Style:
    """Return the built-in style of a module by its type; `Untouched` for unknown types."""
    last = name.rpartition(".")[2]
    if not is_known(module):
        return Untouched()
    if is_linear(module):
        return Head() if last in _HEADS else Dense()
    if is_norm(module):
        return Norm()
    if isinstance(module, nn.Embedding):
        return Positions() if last in _POSITIONS else Lookup()
    if isinstance(module, nn.Dropout):
        return Drop()
    return Attend() if isinstance(module, nn.MultiheadAttention) else Untouched()


def _styles_within(name: str, module: Any, mesh: Mesh2D) -> Mapping[str, Style]:
    """Return the styles of a known composite module and its submodules; the name "" is the module itself.

    Raises:
        ConfigError: a setting of the module is not supported.
    """
    # By names of types and attributes, so that `transformers` need not be installed.
    kind = type(module).__name__
    if kind == "GPT2Attention":
        if module.is_cross_attention:
            raise ConfigError(f"{name}: cross attention cannot be split over a mesh. Use a model without it")
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
        raise ConfigError(f"{name}: norms within heads (q_norm, k_norm) cannot be split. Use a model without them")
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
            f"{name}: {setting}={probability} would drop the same elements on every rank. Set {setting}=0 in its config"
        )
