# SPDX-License-Identifier: Apache-2.0
r"""A small base model, data and a loss for a sweep over adapters.

    thinwire sweep --adapters --model examples.adapters:base --data examples.adapters:data \
        --loss examples.adapters:loss --targets q_proj,v_proj --optimizer adamw --rank 2,4,8

The model has random weights; replace `base` by `AutoModelForCausalLM.from_pretrained(...)` and `data` by your tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 64
Batches = list[tuple[Tensor, Tensor]]


def base() -> nn.Module:
    """Return the model around which adapters train."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))


def data(rank: int, size: int, seed: int) -> tuple[Batches, Batches]:
    """Return batches and held-out batches of tokens that count upwards from a random one, with errors."""
    draw = torch.Generator().manual_seed(seed)
    start = torch.randint(VOCABULARY, (40, 4, 1), generator=draw)
    ids = (start + torch.arange(16)) % VOCABULARY
    noise = torch.rand(ids.shape, generator=draw) < 0.1
    ids = torch.where(noise, torch.randint(VOCABULARY, ids.shape, generator=draw), ids)
    batches = [(each, each) for each in ids]
    return batches[rank:32:size], batches[32:]


def loss(outputs: Any, ids: Tensor) -> Tensor:
    """Return the mean loss of the next token."""
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
