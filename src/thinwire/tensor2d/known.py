# SPDX-License-Identifier: Apache-2.0
"""Modules with a known forward, which a layer on the mesh can replace, or which can be kept unchanged.

A kept module only sees this rank's samples and features. Its forward must therefore treat every sample separately, and
every feature or head separately. A class does not show this, so these are lists.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

_ELEMENTWISE = (
    "CELU ELU GELU Hardshrink Hardsigmoid Hardswish Hardtanh Identity LeakyReLU LogSigmoid Mish ReLU ReLU6 SELU "
    "SiLU Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink Threshold"
)
_REPLACED = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.Dropout, nn.MultiheadAttention)
_ACTIVATIONS = (F.relu, F.gelu, F.silu, F.elu, F.mish, torch.relu, torch.sigmoid, torch.tanh)

_LLAMA = ("Attention", "DecoderLayer", "ForCausalLM", "MLP", "Model", "RMSNorm", "RotaryEmbedding")
_BY_NAME = {
    "thinwire.lab.tasks.models.base": {"Attention", "Block", "FeedForward", "Positions"},
    "thinwire.lab.tasks.models.gpt": {"GPT"},
    "transformers.pytorch_utils": {"Conv1D"},
    "transformers.models.gpt2.modeling_gpt2": {"GPT2Attention", "GPT2Block", "GPT2LMHeadModel", "GPT2MLP", "GPT2Model"},
    "transformers.models.llama.modeling_llama": {f"Llama{part}" for part in _LLAMA},
    "transformers.models.mistral.modeling_mistral": {f"Mistral{part}" for part in _LLAMA},
    "transformers.models.qwen2.modeling_qwen2": {f"Qwen2{part}" for part in _LLAMA},
}
"""Known classes by name, so that no package need be installed: module of the class, names of classes."""


def is_known(module: nn.Module) -> bool:
    """Return True if a module's forward, without its children, is known to be correct on a part of the features."""
    kind = type(module)
    if "forward" in vars(module):
        return False  # another forward was assigned
    if issubclass(kind, nn.TransformerEncoderLayer):
        activation: Any = module.activation
        return kind is nn.TransformerEncoderLayer and (isinstance(activation, nn.Module) or activation in _ACTIVATIONS)
    named = kind.__module__ == "transformers.activations" or kind.__name__ in _BY_NAME.get(kind.__module__, ())
    # The class that has the forward: a subclass may only have added to the constructor. `ModuleList` has none.
    owner = next(each for each in kind.__mro__ if "forward" in vars(each))
    return named or owner in (
        *(getattr(nn, each) for each in _ELEMENTWISE.split()),
        *_REPLACED,
        nn.Module,
        nn.Sequential,
        nn.TransformerEncoder,
    )


def is_linear(module: nn.Module) -> bool:
    """Return True if a module is torch's linear layer or GPT-2's `Conv1D`, with the original forward."""
    return is_known(module) and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")


def is_norm(module: nn.Module) -> bool:
    """Return True for a layer norm or RMS norm with the original forward; some models scale by 1 + weight."""
    kind = type(module).__name__
    return is_known(module) and (isinstance(module, nn.LayerNorm | nn.RMSNorm) or kind.endswith("RMSNorm"))
