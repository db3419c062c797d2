# SPDX-License-Identifier: Apache-2.0
"""Small random models of transformers, and runs of single adapters with PEFT and torch alone."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

VOCABULARY = 60
QUIET = [
    pytest.mark.filterwarnings(f"ignore::{kind}:{library}")
    for library in ("peft", "transformers")
    for kind in ("UserWarning", "FutureWarning")
]
_SMALL = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LLAMA = {
    **_SMALL,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_GPT2 = {**_SMALL, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
_BERT = {**_SMALL, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_T = transformers
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any], list[str]]] = {
    "gpt2": (_T.GPT2LMHeadModel, _T.GPT2Config, _GPT2, ["c_attn", "c_fc"]),
    "llama": (_T.LlamaForCausalLM, _T.LlamaConfig, _LLAMA, ["q_proj", "v_proj", "down_proj"]),
    "qwen2": (_T.Qwen2ForCausalLM, _T.Qwen2Config, _LLAMA, ["q_proj", "k_proj", "up_proj"]),
    "gemma": (_T.GemmaForCausalLM, _T.GemmaConfig, {**_LLAMA, "head_dim": 8}, ["q_proj", "o_proj", "gate_proj"]),
    "bert": (_T.BertForMaskedLM, _T.BertConfig, {**_BERT, "max_position_embeddings": 32}, ["query", "value", "dense"]),
}


def model_of(family: str, dtype: torch.dtype = torch.float64, **options: Any) -> nn.Module:
    """Make a small model with random weights that have some size, so that attention is not uniform."""
    kind, config, values, _ = FAMILIES[family]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: nn.Module = kind(config(**{**values, **options})).to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()


def targets_of(family: str) -> list[str]:
    return FAMILIES[family][3]


def tokens(seed: int, *shape: int) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def next_token(logits: Tensor, ids: Tensor) -> Tensor:
    """The loss of a causal model in the dtype of its logits; models of transformers compute theirs in fp32."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@dataclasses.dataclass
class Run:
    """One adapter, trained by itself.

    Args:
        base: which is copied.
        config: of PEFT.
        seed: set before the adapter is made.
        lr: of AdamW.
        decay: of AdamW.
    """

    base: nn.Module
    config: Any
    seed: int | None
    lr: float = 1e-3
    decay: float = 0.0

    def __post_init__(self) -> None:
        if self.seed is not None:
            torch.manual_seed(self.seed)
        self.model = peft.get_peft_model(copy.deepcopy(self.base), copy.deepcopy(self.config)).train()
        self.generator = torch.get_rng_state()
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=self.lr, weight_decay=self.decay)

    def step(self, loss: Callable[[Any], Tensor]) -> Tensor:
        """Take one step of a loss of the model, with this run's own random numbers."""
        torch.set_rng_state(self.generator)
        self.optimizer.zero_grad()
        found = loss(self.model)
        found.backward()
        self.optimizer.step()
        self.generator = torch.get_rng_state()
        return found.detach()

    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = peft.get_peft_model_state_dict(self.model, save_embedding_layers=False)
        return found


def largest_difference(array: Any, runs: Sequence[Run]) -> float:
    """The largest difference between trained tensors of the array's members and of the runs."""
    worst = 0.0
    for slot, run in enumerate(runs):
        mine = peft.get_peft_model_state_dict(array.extract(slot), save_embedding_layers=False)
        theirs = run.tensors()
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert mine[name].shape == tensor.shape and mine[name].dtype == tensor.dtype, name
            worst = max(worst, float((mine[name] - tensor).abs().max()))
    return worst
