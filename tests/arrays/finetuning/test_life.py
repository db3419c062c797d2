# SPDX-License-Identifier: Apache-2.0
"""Adapters of an array enter, leave, are saved, generate, and are refused."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft", reason="needs peft")
pytest.importorskip("transformers", reason="needs transformers")

import peft
import torch
from torch import Tensor, nn

from tests.arrays.finetuning.separate import (
    QUIET,
    Run,
    largest_difference,
    model_of,
    next_token,
    targets_of,
    tokens,
)
from thinwire import CheckpointError, ConfigError
from thinwire.arrays import adapters
from thinwire.arrays.finetuning import measure_capacity
from thinwire.arrays.fusion import SGD, AdamW, Each, Schedules
from thinwire.planning.plan.peak_memory import PeakMemory

pytestmark = QUIET


def lora(rank: int = 4, **options: Any) -> Any:
    return peft.LoraConfig(**{"r": rank, "target_modules": targets_of("llama"), "lora_dropout": 0.1, **options})


def advance(array: Any, optimizer: Any, ids: Tensor) -> Tensor:
    array.zero_grad()
    losses = array.losses(next_token, array(input_ids=Each(ids)).logits, Each(ids))
    losses.sum().backward()
    optimizer.step()
    return losses.detach()


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(family, kind, marks=() if fast else pytest.mark.slow)
        for family, quick in (("llama", "dora"), ("gpt2", "lora"), ("bert", "ia3"))
        for kind in ("lora", "dora", "rslora", "ia3")
        for fast in (kind == quick,)
    ],
)
@pytest.mark.slow
def test_a_saved_member_is_loaded_by_peft(tmp_path: Path, family: str, kind: str) -> None:
    base, targets = model_of(family, torch.float32), targets_of(family)
    if kind == "ia3":
        configs: list[Any] = [peft.IA3Config(target_modules=targets, feedforward_modules=targets[-1:])] * 3
    else:
        options = {"use_dora": kind == "dora", "use_rslora": kind == "rslora"}
        configs = [peft.LoraConfig(r=rank, target_modules=targets, **options) for rank in (2, 4, 3)]
    array = adapters(base, configs, seeds=range(3))
    optimizer = AdamW(array.parameters(), lr=1e-2)
    ids = tokens(0, 3, 2, 9)
    for _ in range(2):
        advance(array, optimizer, ids)
    array.eval()
    wanted = array(input_ids=Each(ids)).logits
    for slot in range(3):
        folder = array.save_pretrained(tmp_path / str(slot), slot)
        assert sorted(each.name for each in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), folder).eval()
        torch.testing.assert_close(loaded(input_ids=ids[slot]).logits, wanted[slot], rtol=0, atol=1e-5)
    # In again: from folders, and from models.
    for members in (
        [tmp_path / str(slot) for slot in range(3)],
        [peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / str(slot)) for slot in range(3)],
    ):
        again = adapters(base, members).eval()
        assert torch.equal(again(input_ids=Each(ids)).logits, wanted)


def test_an_array_resumes_bit_for_bit(tmp_path: Path) -> None:
    base = model_of("gpt2")
    configs = [peft.LoraConfig(r=rank, target_modules=["c_attn"], lora_dropout=0.1) for rank in (2, 8, 3)]

    def begin(members: list[Any]) -> tuple[Any, Any, Any]:
        array = adapters(base, members, seeds=range(len(members)))
        optimizer = AdamW(array.parameters(), lr=[1e-2] * len(members))
        return array, optimizer, Schedules(optimizer, lambda one: torch.optim.lr_scheduler.ExponentialLR(one, 0.9))

    array, optimizer, schedules = begin(configs)
    for step in range(2):
        advance(array, optimizer, tokens(step, 3, 2, 9))
        schedules.step()
    kept = array.select([2, 0])
    optimizer.select(kept)
    schedules.select(kept)
    array.save(tmp_path / "array", optimizer=optimizer, schedules=schedules, extra={"step": 2})
    assert sum(each.stat().st_size for each in (tmp_path / "array").rglob("*")) < 200_000
    for step in range(2, 4):
        advance(array, optimizer, tokens(step, 2, 2, 9))
        schedules.step()
    for members in ([configs[2], configs[0]], configs):
        other, optimizing, scheduling = begin(members)
        extra = other.load(tmp_path / "array", optimizer=optimizing, schedules=scheduling)
        assert extra == {"step": 2} and other.size == 2
        for step in range(2, 4):
            advance(other, optimizing, tokens(step, 2, 2, 9))
            scheduling.step()
        mine, theirs = other.state_dict(), array.state_dict()
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    # A checkpoint that is refused late changes nothing.
    other, optimizing, _ = begin(configs)
    advance(other, optimizing, tokens(9, 3, 2, 9))
    before, moments = other.state_dict(), copy.deepcopy(optimizing.state_dict()["state"])
    before = {name: tensor.clone() for name, tensor in before.items()}
    with pytest.raises(CheckpointError, match="schedules"):
        other.load(tmp_path / "array", optimizer=optimizing)
    assert other.size == 3 and all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())
    held = optimizing.state_dict()["state"]
    assert all(torch.equal(held[place][name], kept[name]) for place, kept in moments.items() for name in kept)
    advance(other, optimizing, tokens(10, 3, 2, 9))
    another = model_of("gpt2")
    with torch.no_grad():
        next(another.parameters()).add_(1)
    with pytest.raises(CheckpointError, match="another base"):
        adapters(another, configs, seeds=range(3)).load(tmp_path / "array")
    without = adapters(base, configs)
    with pytest.raises(CheckpointError, match="seeds"):
        without.load(tmp_path / "array")


class Life:
    """An array and the separate runs of its members, changed alike at random."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.draw, self.folder, self.made = random.Random(seed), folder, 0
        self.base = model_of("llama")
        size = self.draw.randint(2, 4)
        self.runs = [self.run() for _ in range(size)]
        self.build([run.config for run in self.runs], [run.seed for run in self.runs])

    def run(self, *, within: bool = False) -> Run:
        every = targets_of("llama")
        rank, self.made = self.draw.choice((2, 3, 5, 8, 16)), self.made + 1
        targets = every if self.made == 1 or self.draw.random() < 0.7 else self.draw.sample(every, 2)
        if within:
            targets = sorted({path.rpartition(".")[2] for path in self.array.tensors(0)})
        config = lora(rank, lora_alpha=self.draw.choice((4, 8, 16)), target_modules=targets)
        config.lora_dropout = self.draw.choice((0.0, 0.1, 0.4))
        return Run(self.base, config, self.made, self.draw.choice((1e-3, 1e-2)), self.draw.choice((0.0, 0.1)))

    def build(self, configs: list[Any], seeds: list[Any]) -> None:
        self.array = adapters(self.base, configs, seeds=seeds)
        self.optimizer = AdamW(
            self.array.parameters(), lr=[run.lr for run in self.runs], weight_decay=[run.decay for run in self.runs]
        )

    def step(self, number: int) -> None:
        ids = tokens(number, self.array.size, 2, 7)
        at_once = self.draw.choice((None, 1, 2))
        self.array.zero_grad()
        self.array.backward(
            lambda: self.array.losses(next_token, self.array(input_ids=Each(ids)).logits, Each(ids)), at_once=at_once
        )
        self.optimizer.step()
        for slot, run in enumerate(self.runs):
            run.step(lambda model, own=ids[slot]: next_token(model(input_ids=own).logits, own))

    def drop(self) -> None:
        kept = self.draw.sample(range(self.array.size), max(1, self.array.size - 1))
        self.optimizer.select(self.array.select(kept))
        self.runs = [self.runs[slot] for slot in kept]

    def add(self) -> None:
        run = self.run(within=True)
        slot = self.array.size
        self.optimizer.select(self.array.add([run.config], seeds=[run.seed]))
        self.optimizer.reset(slot, lr=run.lr, weight_decay=run.decay)
        self.runs.append(run)

    def replace(self) -> None:
        slot, order = self.draw.randrange(self.array.size), list(range(self.array.size))
        order[slot] = self.array.size
        self.add()
        self.optimizer.select(self.array.select(order))
        self.runs[slot] = self.runs.pop()

    def resume(self) -> None:
        self.array.save(self.folder, optimizer=self.optimizer)
        self.build([run.config for run in self.runs], [0] * len(self.runs))
        self.array.load(self.folder, optimizer=self.optimizer)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow) if seed >= 3 else seed for seed in range(20)]
)
def test_random_lives_equal_separate_runs(seed: int, tmp_path: Path) -> None:
    life = Life(seed, tmp_path / "array")
    for number in range(6):
        life.step(number)
        getattr(life, life.draw.choice(("drop", "add", "replace", "resume")))()
        life.step(100 + number)
    assert largest_difference(life.array, life.runs) < 1e-10


def test_dropped_members_free_their_memory() -> None:
    array = adapters(model_of("llama"), [lora(2), lora(16), lora(4)])
    optimizer = SGD(array.parameters(), lr=0.1, momentum=0.9)
    advance(array, optimizer, tokens(0, 3, 2, 9))
    before = sum(parameter.numel() for parameter in array.parameters())
    optimizer.select(array.select([0, 2]))
    # Two members instead of three, padded to 4 instead of 16.
    assert sum(parameter.numel() for parameter in array.parameters()) * 6 == before
    assert all(state["momentum_buffer"].shape == p.shape for p, state in optimizer.state.items())


def test_a_layer_that_nobody_trains_any_more_is_the_base_s() -> None:
    base = model_of("llama")
    array = adapters(base, [lora(target_modules=["q_proj"]), lora(target_modules=["v_proj"])], seeds=[0, 1])
    optimizer = AdamW(array.parameters(), lr=1e-2)
    run = Run(base, array.configs[0], 0, 1e-2, 1e-2)
    for step, size in enumerate((2, 1)):
        ids = tokens(step, 2, 2, 9)[:size]
        advance(array, optimizer, ids)
        run.step(lambda model, own=ids[0]: next_token(model(input_ids=own).logits, own))
        if size == 2:
            optimizer.select(array.select([0]))
    assert all("q_proj" in name for name, _ in array.named_parameters())
    assert largest_difference(array, [run]) < 1e-10


def test_held_out_losses_and_generated_tokens_are_the_member_s() -> None:
    base = model_of("llama", torch.float32)
    array = adapters(base, [lora(2), lora(8)], seeds=[0, 1])
    optimizer = AdamW(array.parameters(), lr=1e-2)
    advance(array, optimizer, tokens(0, 2, 2, 9))
    held_out = [tokens(1, 2, 9), tokens(2, 2, 5)]
    held_out[1][0, :3] = -100
    batches = [{"input_ids": ids.clamp(min=0), "labels": ids} for ids in held_out]
    found = array.evaluate(lambda batch: array(**batch).loss, batches)
    assert array.training
    for slot in range(2):
        alone = array.extract(slot).eval()
        counts = [int((ids[:, 1:] != -100).sum()) for ids in held_out]
        with torch.no_grad():
            losses = [float(alone(**batch).loss) for batch in batches]
        wanted = sum(c * loss for c, loss in zip(counts, losses, strict=True)) / sum(counts)
        assert abs(float(found[slot]) - wanted) < 1e-5
        prompt = tokens(3, 1, 4)
        options = {"max_new_tokens": 6, "do_sample": False}
        assert torch.equal(array.generate(slot, prompt, **options), alone.generate(prompt, **options))
    with pytest.raises(ConfigError, match="at least one batch"):
        array.evaluate(lambda batch: array(**batch).loss, [])


@pytest.mark.slow
def test_the_measured_capacity_is_the_largest_that_fits() -> None:
    base, ids = model_of("llama", torch.float32), tokens(0, 1, 16)

    def compute(array: Any) -> Tensor:
        return array(input_ids=ids, labels=ids).loss

    for at_once in (None, 2):
        found = measure_capacity(base, lora(8), compute, limit=1 << 20, at_once=at_once)
        assert found.members > 4
        with PeakMemory([*base.parameters(), *base.buffers()]) as memory:
            array = adapters(base, [lora(8)] * found.members)
            optimizer = AdamW(array.parameters(), lr=0.1)
            for _ in range(2):
                array.zero_grad()
                array.backward(lambda array=array: compute(array), at_once=at_once)
                optimizer.step()
        assert found.limit - 3 * found.each < memory.peak <= found.limit * 1.02
    assert measure_capacity(base, lora(8), compute, limit=1000).members == 0


def test_bad_input_is_refused_and_names_the_member() -> None:
    base = model_of("llama", torch.float32)
    other = model_of("llama", torch.float32)
    with torch.no_grad():
        next(other.parameters()).add_(1)
    trained = peft.get_peft_model(copy.deepcopy(base), lora())
    trained.get_base_model().model.norm.weight.requires_grad_(True)
    conv = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 4))
    cases: list[tuple[nn.Module, list[Any], str]] = [
        (base, [], "at least one member"),
        (base, [lora(), peft.get_peft_model(other, lora())], r"member 1 has another base: its model\.embed_tokens"),
        (base, [lora(), trained], r"member 1 trains model\.norm\.weight of the base"),
        (base, [lora(), lora(bias="all")], "member 1: bias='all'"),
        (base, [lora(modules_to_save=["lm_head"])], "member 0: modules_to_save"),
        (base, [lora(init_lora_weights="pissa")], "member 0: init_lora_weights='pissa'"),
        (base, [lora(), peft.LoHaConfig(target_modules=["q_proj"])], "member 1 has a LoHaConfig"),
        (base, [lora(), peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])], "member 1 of IA3"),
        (base, [lora(), "nowhere"], "member 1: nowhere is not the folder of an adapter"),
        (base, [lora(), 7], "member 1 is a int"),
        (base, [lora(), lora(target_modules=["no_proj"])], "member 1: PEFT refuses its configuration.*no_proj"),
        (base, [lora(), lora(33)], r"member 1: rank 33 of layer 'model\.layers\.0.*at most rank 32"),
        (base, [lora(), lora(17)], r"member 1: rank 17 of layer .*v_proj.*at most rank 16"),
        (conv, [lora(2, target_modules=["0"])], "member 0 targets '0', a Conv2d"),
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), [lora(2, target_modules=["0"])], "BatchNorm1d: it mixes"),
        (trained, [lora()], "the base has an adapter at"),
    ]
    for model, members, message in cases:
        with pytest.raises(ConfigError, match=message):
            adapters(model, members)
    with pytest.raises(ConfigError, match="seeds of length 1: there are 2 members"):
        adapters(base, [lora(), lora()], seeds=[0])
    array = adapters(base, [lora(2), lora(2, target_modules=["q_proj"])])
    with pytest.raises(ConfigError, match=r"Each of length 3: there are 2 members"):
        array(input_ids=Each(tokens(0, 3, 1, 4)))
    with pytest.raises(ConfigError, match="2 and 3 rows per member"):
        array(input_ids=Each(tokens(0, 2, 3, 4)), labels=Each(tokens(0, 2, 2, 4)))
    with pytest.raises(ConfigError, match="slot 2: there are 2"):
        array.select([2])
    with pytest.raises(ConfigError, match=r"member 2 trains model\.layers\.0\.self_attn\.k_proj"):
        array.add([lora(2, target_modules=["k_proj"])])
    with pytest.raises(ConfigError, match="no seeds"):
        array.add([lora(2)], seeds=[1])
    with pytest.raises(ConfigError, match="at_once=0"):
        array.backward(lambda: torch.zeros(2), at_once=0)


def test_a_layer_whose_rows_are_not_the_batch_is_refused() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.sum(0, keepdim=True))

    array = adapters(Mixing(), [peft.LoraConfig(r=2, target_modules=["layer"])] * 2)
    with pytest.raises(ConfigError, match=r"layer 'layer' gets an input of shape \[1, 4\].*6 rows of the batch"):
        array(Each(torch.ones(2, 3, 4)))


def test_the_saved_configuration_is_the_member_s(tmp_path: Path) -> None:
    array = adapters(model_of("llama", torch.float32), [lora(2, lora_alpha=3), lora(5, lora_alpha=7)])
    values = json.loads((array.save_pretrained(tmp_path, 1) / "adapter_config.json").read_text())
    assert (values["r"], values["lora_alpha"], values["peft_type"]) == (5, 7, "LORA")


def test_generators_continue_where_they_stand_on_the_same_type_of_device() -> None:
    array = adapters(nn.Sequential(nn.Linear(3, 4)), [peft.LoraConfig(r=2, target_modules=["0"])] * 2, seeds=[1, 2])
    assert array.generators is not None
    array.generators[1].manual_seed(77)
    torch.rand(3, generator=array.generators[1])
    before = [each.get_state() for each in array.generators]
    array.to("cpu")
    assert all(torch.equal(each.get_state(), state) for each, state in zip(array.generators, before, strict=True))
