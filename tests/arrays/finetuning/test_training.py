# SPDX-License-Identifier: Apache-2.0
"""Adapters that train as one array are those of separate runs with PEFT."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft", reason="needs peft")
pytest.importorskip("transformers", reason="needs transformers")

import peft
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.arrays.finetuning.separate import (
    QUIET,
    VOCABULARY,
    Run,
    largest_difference,
    model_of,
    next_token,
    targets_of,
    tokens,
)
from thinwire import ConfigError
from thinwire.arrays import adapters
from thinwire.arrays.fusion import AdamW, Each, Schedules, clip_grad_norm_

pytestmark = QUIET
RATES, DECAYS = [1e-3, 3e-3, 1e-2, 2e-3], [0.0, 0.1, 0.01, 0.3]


def compare(
    base: nn.Module, configs: list[Any], *, steps: int = 4, seeds: bool = True, labels: bool = False, **options: Any
) -> tuple[Any, float, float]:
    """Train an array and separate runs; returns the array, and the largest differences of losses and of adapters."""
    size = len(configs)
    rates, decays = (RATES * 2)[:size], (DECAYS * 2)[:size]
    array = adapters(base, configs, seeds=range(size) if seeds else None)
    optimizer = AdamW(array.parameters(), lr=rates, weight_decay=decays)
    runs = [Run(base, *each) for each in zip(configs, range(size), rates, decays, strict=True)]
    worst = 0.0
    for step in range(steps):
        ids = tokens(step, size, 2, 9)

        def compute(ids: Tensor = ids) -> Tensor:
            if labels:
                return array(input_ids=Each(ids), labels=Each(ids)).loss
            return array.losses(next_token, array(input_ids=Each(ids)).logits, Each(ids))

        array.zero_grad()
        losses = array.backward(compute, **options)
        optimizer.step()
        for slot, run in enumerate(runs):

            def alone(model: Any, own: Tensor = ids[slot]) -> Tensor:
                return model(input_ids=own, labels=own).loss if labels else next_token(model(input_ids=own).logits, own)

            worst = max(worst, float((run.step(alone) - losses[slot]).abs()))
    return array, worst, largest_difference(array, runs)


def ranks(family: str, size: int = 4, **options: Any) -> list[Any]:
    """Members of different ranks, alphas, targets and dropout rates."""
    every = targets_of(family)
    return [
        peft.LoraConfig(
            r=[2, 8, 3, 16][slot % 4],
            lora_alpha=[4, 8, 16, 5][slot % 4],
            target_modules=every if slot != 2 else every[:1],
            lora_dropout=[0.0, 0.1, 0.3, 0.0][slot % 4],
            use_rslora=slot == 1,
            **options,
        )
        for slot in range(size)
    ]


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "gemma", "bert"])
def test_every_family_equals_separate_runs(family: str) -> None:
    _, losses, tensors = compare(model_of(family), ranks(family))
    assert losses < 1e-10 and tensors < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "gemma", "bert"])
def test_twenty_steps_of_eight_members_equal_separate_runs(family: str) -> None:
    _, losses, tensors = compare(model_of(family), ranks(family, 8), steps=20)
    assert losses < 1e-10 and tensors < 1e-10


def with_other_rounding(base: nn.Module, seed: int) -> nn.Module:
    """Copy a model, with every parameter one unit in the last place up or down."""
    other, generator = copy.deepcopy(base), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            side = torch.where(torch.rand(parameter.shape, generator=generator) < 0.5, torch.inf, -torch.inf)
            parameter.copy_(torch.nextafter(parameter, side))
    return other


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "gemma", "bert"])
def test_in_fp32_an_array_differs_from_separate_runs_less_than_two_runs_with_other_rounding_do(family: str) -> None:
    base, configs = model_of(family, torch.float32), ranks(family, 8)
    _, _, found = compare(base, configs, steps=20)
    settings = list(zip(configs, range(8), RATES * 2, DECAYS * 2, strict=True))
    pairs = [[Run(with_other_rounding(base, seed), *each) for seed in (1, 2)] for each in settings]
    for step in range(20):
        ids = tokens(step, 8, 2, 9)
        for own, pair in zip(ids, pairs, strict=True):
            for run in pair:
                run.step(lambda model, own=own: next_token(model(input_ids=own).logits, own))
    both = [tuple(run.tensors() for run in pair) for pair in pairs]
    assert found <= max(float((one[name] - other[name]).abs().max()) for one, other in both for name in one)


def quantized(base: nn.Module, bits: int) -> nn.Module:
    """Return a copy whose linear layers, but the last, are those of bitsandbytes."""
    library = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes").nn
    made = copy.deepcopy(base)
    for name, layer in list(made.named_modules()):
        if not isinstance(layer, nn.Linear) or name == "lm_head":
            continue
        sizes = layer.in_features, layer.out_features, layer.bias is not None
        new: Any
        if bits == 4:
            new = library.Linear4bit(*sizes, compute_dtype=torch.float32, quant_type="nf4")
            new.weight = library.Params4bit(layer.weight.data.clone(), False, quant_type="nf4", module=new)
        else:
            new = library.Linear8bitLt(*sizes, has_fp16_weights=False)
            new.weight = library.Int8Params(layer.weight.data.clone(), requires_grad=False, has_fp16_weights=False)
        parent, _, last = name.rpartition(".")
        setattr(made.get_submodule(parent), last, new.to("cpu"))
    return made


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.slow
def test_a_base_in_four_bits_equals_separate_runs(dora: bool, tmp_path: Path) -> None:
    base = quantized(model_of("llama", torch.float32, hidden_size=64, intermediate_size=128), 4)
    with torch.no_grad():
        base.eval()(input_ids=tokens(0, 2, 9))  # bitsandbytes repacks the weights on some processors
    array, losses, tensors = compare(base, ranks("llama", 3, use_dora=dora), steps=3)
    assert losses < 1e-5 and tensors < 1e-4
    with array.only(1) as model:
        held = {p.data_ptr() for p in model.parameters() if not p.is_floating_point()}
    assert held and held == {p.data_ptr() for p in base.parameters() if not p.is_floating_point()}
    folder = array.save_pretrained(tmp_path / "member", 1)
    array.eval()
    loaded, ids = peft.PeftModel.from_pretrained(base, folder).eval(), tokens(0, 2, 9)
    torch.testing.assert_close(loaded(input_ids=ids).logits, array(input_ids=ids).logits[1], rtol=0, atol=1e-4)


def test_a_base_in_eight_bits_is_refused() -> None:
    base = quantized(model_of("llama", torch.float32), 8)
    with pytest.raises(ConfigError, match=r"q_proj.*Linear8bitLt.*4 bits"):
        adapters(base, ranks("llama"))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_dropout_of_the_base_is_each_member_s_own(attention: str) -> None:
    base = model_of("gpt2", attn_implementation=attention)
    assert base.config.attn_pdrop == 0.1
    _, losses, tensors = compare(base, ranks("gpt2"), steps=2)
    assert losses < 1e-10 and tensors < 1e-10


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
@pytest.mark.slow
def test_dora_equals_separate_runs(family: str) -> None:
    configs = ranks(family, 3, use_dora=True)
    _, losses, tensors = compare(model_of(family), [*configs, ranks(family)[3]], steps=3)
    assert losses < 1e-10 and tensors < 1e-10


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_ia3_equals_separate_runs(family: str) -> None:
    every = {"gpt2": (["c_attn", "c_fc"], ["c_fc"]), "llama": (["k_proj", "v_proj", "down_proj"], ["down_proj"])}
    targets, inner = every[family]
    configs = [peft.IA3Config(target_modules=targets, feedforward_modules=inner) for _ in range(3)]
    configs[1] = peft.IA3Config(target_modules=targets[:1], feedforward_modules=[])
    _, losses, tensors = compare(model_of(family), configs)
    assert losses < 1e-10 and tensors < 1e-10


def test_embeddings_and_biases_of_adapters_equal_separate_runs() -> None:
    configs = [
        peft.LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"], init_lora_weights="gaussian"),
        peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_bias=True),
        peft.LoraConfig(r=3, target_modules=["q_proj"], rank_pattern={"layers.1.*": 5}, alpha_pattern={"q_proj": 7}),
    ]
    _, losses, tensors = compare(model_of("llama", attention_bias=True), configs)
    assert losses < 1e-10 and tensors < 1e-10
    _, losses, tensors = compare(model_of("gemma"), [*configs[:1], *configs[2:]])
    assert losses < 1e-10 and tensors < 1e-10


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
@pytest.mark.slow
def test_the_model_s_own_loss_is_one_per_member(family: str) -> None:
    _, losses, tensors = compare(model_of(family, torch.float32), ranks(family), labels=True)
    assert losses < 2e-5 and tensors < 2e-4


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_few_members_at_a_time_train_alike(at_once: int) -> None:
    _, losses, tensors = compare(model_of("gpt2"), ranks("gpt2"), steps=2, at_once=at_once)
    assert losses < 1e-10 and tensors < 1e-10


def test_recomputed_layers_draw_the_same_dropout() -> None:
    base: Any = model_of("gpt2")
    base.activation_checkpointing_enable()
    _, losses, tensors = compare(base, ranks("gpt2"), steps=2, at_once=3)
    assert losses < 1e-10 and tensors < 1e-10


def test_a_base_in_bf16_has_adapters_in_fp32() -> None:
    base = model_of("llama", torch.bfloat16)
    array, losses, _ = compare(base, ranks("llama"), steps=2, labels=True)
    assert {parameter.dtype for parameter in array.parameters()} == {torch.float32}
    assert losses < 0.05


def test_padded_rows_and_ignored_labels_are_each_member_s_own() -> None:
    base, configs = model_of("llama"), ranks("llama")
    array = adapters(base, configs, seeds=range(4))
    runs = [Run(base, config, seed) for seed, config in enumerate(configs)]
    optimizer = AdamW(array.parameters(), lr=1e-3, weight_decay=0.0)
    ids = tokens(0, 4, 2, 9)
    mask = (torch.arange(9) < torch.tensor([[9, 4], [5, 5], [7, 2], [8, 9]]).unsqueeze(-1)).long()
    labels = torch.where(mask > 0, ids, -100)

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())

    for _ in range(3):
        array.zero_grad()
        out = array(input_ids=Each(ids), attention_mask=Each(mask))
        losses = array.losses(loss, out.logits, Each(labels))
        losses.sum().backward()
        optimizer.step()
        for slot, run in enumerate(runs):
            own = run.step(
                lambda model, b=slot: loss(model(input_ids=ids[b], attention_mask=mask[b]).logits, labels[b])
            )
            torch.testing.assert_close(losses[slot].detach(), own, rtol=0, atol=1e-10)
    assert largest_difference(array, runs) < 1e-10


def test_packed_rows_equal_rows_by_themselves() -> None:
    base = model_of("llama")
    array = adapters(base, ranks("llama"), seeds=range(4)).eval()
    ids = tokens(0, 4, 2, 6)
    packed = ids.reshape(4, 1, 12)
    same = torch.arange(12).div(6, rounding_mode="floor")
    mask = (same.unsqueeze(1) == same) & torch.ones(12, 12, dtype=torch.bool).tril()
    positions = torch.arange(6).repeat(2).unsqueeze(0)
    alone = array(input_ids=Each(ids)).logits
    together = array(input_ids=Each(packed), attention_mask=mask[None, None], position_ids=positions).logits
    torch.testing.assert_close(together.reshape(alone.shape), alone, rtol=0, atol=1e-10)


def test_a_shared_batch_is_every_member_s() -> None:
    array = adapters(model_of("llama"), ranks("llama"), seeds=range(4)).eval()
    ids = tokens(0, 2, 9)
    shared, own = array(input_ids=ids), array(input_ids=Each(ids.expand(4, 2, 9)))
    assert shared.logits.shape == (4, 2, 9, VOCABULARY)
    assert torch.equal(shared.logits, own.logits)


def test_schedules_weights_and_clipping_are_each_member_s() -> None:
    base, configs = model_of("llama"), ranks("llama")
    array = adapters(base, configs, seeds=range(4))
    optimizer = AdamW(array.parameters(), lr=RATES, weight_decay=0.0)
    factories = [
        lambda one: torch.optim.lr_scheduler.ExponentialLR(one, 0.5),
        lambda one: torch.optim.lr_scheduler.CosineAnnealingLR(one, 10),
    ] * 2
    schedules = Schedules(optimizer, factories)
    weights, bounds = torch.tensor([1.0, 0.5, 2.0, 3.0], dtype=torch.float64), [0.1, 1.0, 0.2, 0.5]
    runs = [Run(base, *each) for each in zip(configs, range(4), RATES, [0.0] * 4, strict=True)]
    own = [factory(run.optimizer) for factory, run in zip(factories, runs, strict=True)]
    for step in range(4):
        ids = tokens(step, 4, 2, 9)
        array.zero_grad()

        def compute(ids: Tensor = ids) -> Tensor:
            return array.losses(next_token, array(input_ids=Each(ids)).logits, Each(ids)) * weights[array.running]

        array.backward(compute, at_once=2)
        clip_grad_norm_(array.parameters(), bounds)
        optimizer.step()
        schedules.step()
        for slot, run in enumerate(runs):
            torch.set_rng_state(run.generator)
            run.optimizer.zero_grad()
            (weights[slot] * next_token(run.model(input_ids=ids[slot]).logits, ids[slot])).backward()
            nn.utils.clip_grad_norm_(run.model.parameters(), bounds[slot])
            run.optimizer.step()
            run.generator = torch.get_rng_state()
            own[slot].step()
    assert largest_difference(array, runs) < 1e-10


@pytest.mark.parametrize("kind", ["AdamW", "RMSprop", "Adagrad", "LAMB", "SGD"])
def test_padding_stays_zero_with_its_gradient_and_its_state(kind: str) -> None:
    from thinwire.arrays import fusion

    base, configs = model_of("llama"), ranks("llama")
    array = adapters(base, configs, seeds=range(4))
    options = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(fusion, kind)(array.parameters(), lr=[1e-2] * 4, weight_decay=0.1, **options)
    for step in range(3):
        ids = tokens(step, 4, 2, 9)
        array.zero_grad()
        array.losses(next_token, array(input_ids=Each(ids)).logits, Each(ids)).sum().backward()
        optimizer.step()
    padded = 0
    for name, parameter in array.named_parameters():
        axis = 0 if ".lora_A." in name else 1
        path = name.partition(".lora_")[0]
        for slot in range(4):
            own = array.tensors(slot).get(path)
            rank = 0 if own is None else own["lora_A.weight"].shape[0]
            held = [parameter, parameter.grad, *(v for v in optimizer.state[parameter].values() if v.dim() > 1)]
            assert len(held) > 2
            for tensor in held:
                assert tensor is not None
                padding = tensor[slot].narrow(axis, rank, tensor.shape[axis + 1] - rank)
                assert not bool(padding.any())
                padded += padding.numel()
    assert padded


def test_the_base_is_in_memory_once_and_unchanged() -> None:
    base = model_of("llama")
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    flags = [parameter.requires_grad for parameter in base.parameters()]
    array, _, _ = compare(base, ranks("llama"), steps=1)
    with array.only(1) as model:
        held = {parameter.data_ptr() for parameter in model.parameters()}
    assert held == {parameter.data_ptr() for parameter in base.parameters()}
    assert {each.data_ptr() for each in array.extract(0).parameters() if not each.requires_grad} == held
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())
    assert flags == [parameter.requires_grad for parameter in base.parameters()]
    assert not any("lora" in name for name, _ in base.named_modules())
