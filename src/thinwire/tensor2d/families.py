"""Styles of the modules that are known by kind: torch's, and those of common transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from thinwire.errors import ConfigError
from thinwire.tensor2d.mesh import Mesh2D, check_divides
from thinwire.tensor2d.plan import (
    Attend,
    Dense,
    Drop,
    Head,
    KeyHeads,
    Lookup,
    Norm,
    Positions,
    Shares,
    Style,
    Untouched,
)

_HEADS = ("head", "lm_head")
_POSITIONS = ("wpe", "position_embedding", "position_embeddings", "token_type_embeddings", "embed_positions")


def style_of(name: str, module: nn.Module) -> Style:
    """The style of a module by its kind; of one that is not known, `Untouched`."""
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


def styles_within(name: str, module: Any, mesh: Mesh2D) -> Mapping[str, Style]:
    """Styles of a known module and of modules within it, by their names within it; "" is itself.

    Raises:
        ConfigError: a setting of it that cannot be laid out.
    """
    kind = type(module).__name__
    if kind == "GPT2Attention":
        return _gpt2(name, module)
    if all(hasattr(module, each) for each in ("q_proj", "k_proj", "v_proj", "o_proj", "num_key_value_groups")):
        return _llama(name, module, mesh)
    if kind == "Attention" and hasattr(module, "projection") and hasattr(module, "heads"):
        return {"": Shares(("heads",)), "projection": Dense(sections=3)}
    if kind == "Positions" and hasattr(module, "table"):
        return {"": Positions("table", added=True)}
    return {}


def _gpt2(name: str, module: Any) -> Mapping[str, Style]:
    if module.is_cross_attention:
        raise ConfigError(f"{name}: cross attention cannot be laid out on a mesh; use a model without it")
    _refuse_dropout(name, module.attn_dropout.p, "attn_pdrop")
    return {"": Shares(("num_heads", "split_size")), "c_attn": Dense(sections=3)}


def _llama(name: str, module: Any, mesh: Mesh2D) -> Mapping[str, Style]:
    if hasattr(module, "q_norm"):
        raise ConfigError(f"{name}: norms within heads (q_norm, k_norm) cannot be laid out; use a model without them")
    _refuse_dropout(name, module.attention_dropout, "attention_dropout")
    heads, columns = module.q_proj.weight.shape[0] // module.head_dim, mesh.columns
    key_heads = module.k_proj.weight.shape[0] // module.head_dim
    check_divides(heads, columns, f"{name} of {heads} heads", f"the mesh has {columns} columns")
    if key_heads % columns == 0:
        return {"": Shares()}
    own, group = heads // columns, heads // key_heads
    keys = KeyHeads(heads, key_heads)
    return {
        "": Shares(changed=(("num_key_value_groups", own // max(1, own // group)),)),
        "k_proj": keys,
        "v_proj": keys,
    }


def _refuse_dropout(name: str, probability: float, setting: str) -> None:
    if probability:
        raise ConfigError(
            f"{name}: {setting}={probability} would drop the same places on every rank; set {setting}=0 in its config"
        )
