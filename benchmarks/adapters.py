# SPDX-License-Identifier: Apache-2.0
"""Adapters of one base as one array against separate runs with PEFT, one after another: time of a step, and memory.

python -m benchmarks.adapters [speed] [memory] [ranks] [gpu]

All models are random and of the structure of Llama. Times are CPU seconds, and on a GPU seconds until it is idle; the
contenders take turns, and a figure is the median of ratios within rounds, with the quartiles. Memory is the peak of
what tensors hold.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import peft
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from thinwire import AdapterArray, adapters
from thinwire.arrays.fusion import AdamW, Each, keep_memory, measuring
from thinwire.lab.report.statistics import ratios
from thinwire.planning.plan.peak_memory import PeakMemory

_TURN_SECONDS = 5e-3
# Hidden size, layers; the base of 25 million parameters is the last.
BASES = {"0.4 M": (64, 4), "3 M": (192, 6), "25 M": (512, 8)}
# The targets and the rank that PEFT has for Llama by default.
_USUAL = ["q_proj", "v_proj"]
SHAPES = [(8, 1, 64), (8, 1, 16), (8, 4, 64), (2, 1, 64), (1, 1, 64), (8, 2, 512)]


def seconds(contenders: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of each contender; they take turns for some rounds.

    A turn is as many uses as take five milliseconds, after one that is not counted, because the caches still hold the
    previous contender's data. The first two rounds and autotuning are not counted either.
    """
    found: dict[str, list[float]] = {name: [] for name in contenders}
    with measuring():
        for work in contenders.values():
            work()
    uses = {name: max(2, round(_TURN_SECONDS / _timed(work, 2))) for name, work in contenders.items()}
    for round_ in range(rounds + 2):
        for name, work in contenders.items():
            work()
            taken = _timed(work, uses[name])
            if round_ >= 2:
                found[name].append(taken)
    return found


def _timed(work: Callable[[], object], uses: int) -> float:
    """Return the CPU seconds of one use."""
    start = time.process_time()
    for _ in range(uses):
        work()
    return (time.process_time() - start) / uses


def base_of(hidden: int, layers: int) -> Any:
    """Make a model with random weights."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": hidden, "intermediate_size": 43 * hidden // 16, "num_hidden_layers": layers}
    heads: dict[str, Any] = {"num_attention_heads": hidden // 32, "num_key_value_heads": hidden // 32}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, vocab_size=1000, use_cache=False)).train()


def configs(members: int) -> list[Any]:
    """Adapters of ranks 2 to 16 of all linear layers of attention."""
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return [peft.LoraConfig(r=(2, 4, 8, 16)[slot % 4], target_modules=targets) for slot in range(members)]


def as_array(base: Any, members: int, ids: Tensor, each: Any = None, **options: Any) -> Callable[[], object]:
    """Return one step of an array on ids [members, rows, length]."""
    array: AdapterArray = adapters(base, each or configs(members))
    optimizer = AdamW(array.parameters(), lr=1e-4)

    def step() -> None:
        array.zero_grad()
        array.backward(lambda: array(input_ids=Each(ids), labels=Each(ids)).loss, **options)
        optimizer.step()

    return step


def one_by_one(
    base: Any, members: int, ids: Tensor, each: Any = None, kept: dict[int, Any] | None = None
) -> Callable[[], object]:
    """Return one step of each of as many separate runs."""
    models = [
        peft.get_peft_model(copy.deepcopy(base, dict(kept or {})), config).train()
        for config in each or configs(members)
    ]
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-4) for m in models]

    def step() -> None:
        for model, optimizer, own in zip(models, optimizers, ids, strict=True):
            optimizer.zero_grad()
            model(input_ids=own, labels=own).loss.backward()
            optimizer.step()

    return step


def speed(rounds: int = 7) -> None:
    """Print a row per base and shape of batch."""
    print(f"{'base':6} members rows length  array ms  separate ms  speed-up (quartiles)")
    for name, sizes in reversed(BASES.items()):
        for members, rows, length in SHAPES:
            if sizes[0] > 192 and rows * length > 512:
                continue
            base, ids = base_of(*sizes), torch.randint(1000, (members, rows, length))
            found = seconds({"array": as_array(base, members, ids), "separate": one_by_one(base, members, ids)}, rounds)
            low, middle, high = ratios(found["separate"], found["array"]).quartiles
            times = [1e3 * sorted(each)[len(each) // 2] for each in found.values()]
            print(
                f"{name:6} {members:7} {rows:4} {length:6} {times[0]:9.1f} {times[1]:12.1f}  "
                f"{middle:.2f} ({low:.2f} to {high:.2f})",
                flush=True,
            )


def ranks(rounds: int = 5) -> None:
    """Print what padding of 8 members of ranks 2 to 64 costs, a row per base.

    "padded" is the array as it is, padded to rank 64. "two arrays" groups ranks up to 8 and ranks above. "rank 2" has
    all members at rank 2, which is less work than any grouping within a layer can reach.
    """
    each = [2, 2, 4, 8, 16, 32, 64, 64]
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    print("base    padded ms  two arrays / padded  rank 2 / padded (quartiles)", flush=True)
    for name, sizes in BASES.items():
        base, ids = base_of(*sizes), torch.randint(1000, (len(each), 1, 64))

        def step_of(own: list[int], ids: Tensor, base: Any = base) -> Callable[[], object]:
            return as_array(base, len(own), ids, [peft.LoraConfig(r=rank, target_modules=targets) for rank in own])

        halves = step_of(each[:4], ids[:4]), step_of(each[4:], ids[4:])

        def two(halves: Any = halves) -> None:
            for half in halves:
                half()

        steps = {"padded": step_of(each, ids), "two": two, "rank 2": step_of([2] * 8, ids)}
        found = seconds(steps, rounds)
        rows = (ratios(found[kind], found["padded"]).quartiles for kind in ("two", "rank 2"))
        text = "  ".join(f"{middle:.2f} ({low:.2f} to {high:.2f})" for low, middle, high in rows)
        print(f"{name:6} {1e3 * statistics.median(found['padded']):10.1f}  {text}", flush=True)


def gpu(rounds: int = 5) -> None:
    """Print a row per shape of batch: 16 adapters of a base of 125 million parameters in bf16, on a GPU."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "vocab_size": 16000,
    }
    config = LlamaConfig(**sizes, num_attention_heads=12, num_key_value_heads=12, use_cache=False)
    model: Any = LlamaForCausalLM(config)
    base, members = model.to("cuda", torch.bfloat16).train(), 16
    print(f"a base of {sum(p.numel() for p in base.parameters()) / 1e6:.0f} M on {torch.cuda.get_device_name()}")
    for rows, length in ((1, 64), (1, 256), (4, 512)):
        ids = torch.randint(16000, (members, rows, length)).to("cuda")
        steps = {"array": as_array(base, members, ids), "separate": one_by_one(base, members, ids)}
        taken: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(-1, rounds):  # the first one is not counted
            for name, step in steps.items():
                torch.cuda.synchronize()
                began = time.perf_counter()
                step()
                step()
                torch.cuda.synchronize()
                if turn >= 0:
                    taken[name].append((time.perf_counter() - began) / 2)
        low, middle, high = ratios(taken["separate"], taken["array"]).quartiles
        times = [1e3 * statistics.median(each) for each in taken.values()]
        print(
            f"{members} members of {rows} x {length}: array {times[0]:.1f} ms, separate {times[1]:.1f} ms, "
            f"{middle:.2f} ({low:.2f} to {high:.2f})",
            flush=True,
        )
        del steps


def memory(members: int = 16) -> None:
    """Print the peak of an array relative to that of one separate run."""
    base, ids = base_of(*BASES["25 M"]), torch.randint(1000, (members, 1, 64))
    with PeakMemory([*base.parameters(), *base.buffers()]) as one:
        # One run holds the base itself, and not a copy.
        kept = {id(each): each for each in base.parameters()}
        _two(one_by_one(base, 1, ids[:1], [peft.LoraConfig(target_modules=_USUAL)], kept))
    print(f"one run: {one.peak / 1e6:.0f} MB")
    for at_once, checkpointed in ((None, False), (4, False), (1, False), (4, True), (2, True)):
        if checkpointed:
            base.activation_checkpointing_enable()
        with PeakMemory([*base.parameters(), *base.buffers()]) as many:
            _two(as_array(base, members, ids, [peft.LoraConfig(target_modules=_USUAL)] * members, at_once=at_once))
        print(
            f"{members} members, at_once={at_once}, checkpointed={checkpointed}: {many.peak / 1e6:.0f} MB, "
            f"{many.peak / one.peak:.2f} times one run",
            flush=True,
        )


def _two(step: Callable[[], object]) -> None:
    # The second step has the optimizer's state from its beginning.
    step()
    step()


if __name__ == "__main__":
    PARTS: dict[str, Callable[[], None]] = {"speed": speed, "memory": memory, "ranks": ranks, "gpu": gpu}
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} [default: speed memory]")
    parts = parser.parse_args().parts or ["speed", "memory"]
    if unknown := [name for name in parts if name not in PARTS]:
        parser.error(f"{unknown[0]}: unknown. Use {', '.join(PARTS)}")
    warnings.simplefilter("ignore", FutureWarning)
    keep_memory()
    for name in parts:
        PARTS[name]()
