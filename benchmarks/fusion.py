# SPDX-License-Identifier: Apache-2.0
"""Arrays of models against a loop over them and against `torch.vmap`: layers, whole training steps, sweeps.

python -m benchmarks.fusion [--quick] [steps] [layers] [sweep]

The process keeps freed memory (`fusion.keep_memory`), for all contenders alike.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.arrays import fusion
from thinwire.arrays.fusion import Each, clear_autotune_cache, fuse, keep_memory, measuring
from thinwire.arrays.sweep.sampling import RandomSampler
from thinwire.arrays.sweep.space import Space, parse_domain
from thinwire.arrays.sweep.sweeping import sweep
from thinwire.arrays.sweep.training import Plan, train_alone
from thinwire.core.statistics import ratios
from thinwire.lab.tasks import load

Row = tuple[str, ...]
Work = Callable[[], object]
_TURN_SECONDS = 5e-3


def seconds(contenders: Mapping[str, Work], rounds: int, *, least_seconds: float = 0.0) -> dict[str, list[float]]:
    """Return the CPU seconds of each contender; they take turns for some rounds and some time.

    A turn is as many uses as take five milliseconds, after one that is not counted, because the caches still hold the
    previous contender's data. The first two rounds and autotuning are not counted either.
    """
    found: dict[str, list[float]] = {name: [] for name in contenders}
    with measuring():
        for work in contenders.values():
            work()
    uses = {name: max(2, round(_TURN_SECONDS / _timed(work, 2))) for name, work in contenders.items()}
    begin = time.perf_counter()
    for round_ in count():
        if round_ >= rounds + 2 and time.perf_counter() - begin >= least_seconds:
            break
        for name, work in contenders.items():
            work()
            taken = _timed(work, uses[name])
            if round_ >= 2:
                found[name].append(taken)
    return found


def _timed(work: Work, uses: int) -> float:
    """Return the CPU seconds of one use."""
    start = time.process_time()
    for _ in range(uses):
        work()
    return (time.process_time() - start) / uses


def layer(factory: Callable[[], nn.Module], x: Tensor, size: int, shared: bool) -> dict[str, Work]:
    """Make forward and backward of one layer of `size` models: as an array, as a loop, and under plain vmap.

    The gradient of every model's output exists beforehand, as from the next layer, and gradients of parameters are kept
    until the model's next pass, as in training.
    """
    models = [factory() for _ in range(size)]
    array = fuse(models)
    every = x if shared else torch.stack([x + index for index in range(size)]).requires_grad_()
    rows = [x] * size if shared else [row.detach().requires_grad_() for row in every]
    own = list(array.parameters())
    parameters, buffers = torch.func.stack_module_state(models)
    stacked = list(parameters.values())
    skeleton = models[0]
    above = torch.ones(size, *models[0](x).shape)
    each_above = list(above)
    held: list[tuple[Tensor, ...]] = [()] * size

    def one(values: Any, others: Any, given: Tensor) -> Tensor:
        return torch.func.functional_call(skeleton, (values, others), (given,))

    def keep(place: int, found: Tensor, given: list[Tensor], above: Tensor) -> None:
        held[place] = torch.autograd.grad(found, given, above)[: len(own)]

    def as_array() -> None:
        held[0] = ()
        keep(0, array(every if shared else Each(every)), own if shared else [*own, every], above)

    def as_vmap() -> None:
        held[0] = ()
        mapped = torch.vmap(one, in_dims=(0, 0, None if shared else 0), randomness="different")
        keep(0, mapped(parameters, buffers, every), stacked if shared else [*stacked, every], above)

    def as_loop() -> None:
        for place, (model, row, gradient) in enumerate(zip(models, rows, each_above, strict=True)):
            held[place] = ()
            keep(place, model(row), list(model.parameters()) if shared else [*model.parameters(), row], gradient)

    return {"array": as_array, "loop": as_loop, "vmap": as_vmap}


def layers(quick: bool) -> list[tuple[str, Callable[[], nn.Module], tuple[int, ...]]]:
    """Return layers and the shape of one model's input."""
    found: list[tuple[str, Callable[[], nn.Module], tuple[int, ...]]] = [
        ("linear 64-64, n=32", lambda: nn.Linear(64, 64), (32, 64)),
        ("linear 256-256, n=64", lambda: nn.Linear(256, 256), (64, 256)),
        ("conv 3-16 3x3, 16x16, n=16", lambda: nn.Conv2d(3, 16, 3, padding=1), (16, 3, 16, 16)),
        ("conv 16-32 3x3, 8x8, n=16", lambda: nn.Conv2d(16, 32, 3, padding=1), (16, 16, 8, 8)),
        ("transposed conv 16-8, 8x8, n=8", lambda: nn.ConvTranspose2d(16, 8, 4, 2, 1), (8, 16, 8, 8)),
        ("batch norm 16, 16x16, n=16", lambda: nn.BatchNorm2d(16), (16, 16, 16, 16)),
        ("layer norm 64, n=16x32", lambda: nn.LayerNorm(64), (16, 32, 64)),
        ("RMS norm 64, n=16x32", lambda: nn.RMSNorm(64), (16, 32, 64)),
    ]
    if not quick:
        found += [
            ("linear 1024-1024, n=128", lambda: nn.Linear(1024, 1024), (128, 1024)),
            ("conv 64-64 3x3, 16x16, n=16", lambda: nn.Conv2d(64, 64, 3, padding=1), (16, 64, 16, 16)),
            ("conv1d 64-128 1, 256, n=8", lambda: nn.Conv1d(64, 128, 1), (8, 64, 256)),
            ("group norm 32, 16x16, n=16", lambda: nn.GroupNorm(4, 32), (16, 32, 16, 16)),
        ]
    return found


def layer_rows(quick: bool) -> Iterator[Row]:
    """Measure each layer: milliseconds, and the array's time relative to the faster alternative's, medians."""
    for name, factory, shape in layers(quick):
        for size in (8,) if quick else (4, 16):
            for shared in (True, False):
                draw = torch.Generator().manual_seed(0)
                contenders = layer(factory, torch.randn(shape, generator=draw), size, shared)
                found = seconds(contenders, 7 if quick else 15, least_seconds=0.3 if quick else 1.5)
                over = {
                    other: ratios(found["array"], found[other]).quartiles for other in contenders if other != "array"
                }
                strict = max(over["loop"], over["vmap"], key=lambda each: each[1])
                label = f"{name}, B={size}, {'shared' if shared else 'own'} input"
                times = (f"{1e3 * statistics.median(every):.2f}" for every in found.values())
                low, middle, high = (f"{each:.2f}" for each in strict)
                yield (label, *times, f"{middle} ({low} to {high})")


def perceptron() -> nn.Module:
    """Make a perceptron of three linear layers."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def cnn() -> nn.Module:
    """Make two convolutions with batch norm, and a linear layer."""
    body = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(
        *body, nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)
    )


class Contest:
    """Training steps of `size` models with Adam, each with its own learning rate, on fresh random labels."""

    def __init__(self, factory: Callable[[], nn.Module], shape: tuple[int, ...], size: int) -> None:
        draw = torch.Generator().manual_seed(1)
        self.batches = [
            (torch.randn(shape, generator=draw), torch.randint(0, 10, (shape[0],), generator=draw)) for _ in range(16)
        ]
        self.models = [factory() for _ in range(size)]
        for model in self.models:
            model(self.batches[0][0])
        self.lrs, self.step = [1e-3 * (1 + index / size) for index in range(size)], 0

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return the next batch."""
        self.step += 1
        return self.batches[self.step % len(self.batches)]

    def array(self) -> Work:
        """Train one fused array."""
        array = fuse(self.models)
        optimizer = fusion.Adam(array.parameters(), lr=self.lrs)

        def work() -> None:
            x, y = self.batch()
            array.zero_grad()
            array.losses(F.cross_entropy, array(x), y).sum().backward()
            optimizer.step()

        return work

    def loop(self) -> Work:
        """Train one model after another."""
        optimizers = [torch.optim.Adam(m.parameters(), lr=lr) for m, lr in zip(self.models, self.lrs, strict=True)]

        def work() -> None:
            x, y = self.batch()
            for model, optimizer in zip(self.models, optimizers, strict=True):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

        return work

    def vmap(self, shared_rate: bool) -> Work:
        """Train by torch alone: one Adam per model on its rows, or one Adam for all with a shared learning rate."""
        parameters, buffers = torch.func.stack_module_state(self.models)
        stacked, skeleton = list(parameters.values()), self.models[0]
        rows = [[p.detach()[index].requires_grad_() for p in stacked] for index in range(len(self.models))]
        optimizers = [torch.optim.Adam(own, lr=lr) for own, lr in zip(rows, self.lrs, strict=True)]
        together = torch.optim.Adam(stacked, lr=self.lrs[0])

        def one(values: Any, others: Any, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(torch.func.functional_call(skeleton, (values, others), (x,)), y)

        def work() -> None:
            x, y = self.batch()
            together.zero_grad()
            torch.vmap(one, in_dims=(0, 0, None, None))(parameters, buffers, x, y).sum().backward()
            if shared_rate:
                together.step()
                return
            for index, (own, optimizer) in enumerate(zip(rows, optimizers, strict=True)):
                for row, parameter in zip(own, stacked, strict=True):
                    row.grad = None if parameter.grad is None else parameter.grad[index]
                optimizer.step()

        return work


def step_rows(quick: bool) -> list[Row]:
    """Measure whole training steps: the alternatives' time relative to the array's, medians over rounds."""
    cases = [("MLP 64-64-64-10, n=32", perceptron, (32, 64), 32), ("CNN with batch norm, n=8", cnn, (8, 3, 16, 16), 8)]
    rows: list[Row] = []
    for name, factory, shape, size in cases:
        contest = Contest(factory, shape, size)
        contenders = {
            "array": contest.array(),
            "loop": contest.loop(),
            "vmap": contest.vmap(False),
            "vmap, one rate": contest.vmap(True),
        }
        found = seconds(contenders, 15 if quick else 60)
        for other in ("loop", "vmap", "vmap, one rate"):
            low, middle, high = ratios(found[other], found["array"]).quartiles
            milliseconds = f"{1e3 * statistics.median(found['array']):.2f}"
            rows.append(
                (f"{name}, B={size}, Adam: array vs {other}", milliseconds, f"{middle:.2f}", f"{low:.2f} to {high:.2f}")
            )
    return rows


def sweep_rows(quick: bool) -> list[Row]:
    """Measure trials of `digits` as one array and one after another: seconds, ratio, difference of losses."""
    rows: list[Row] = []
    for size, trials, steps in (("mlp", 64, 50 if quick else 300), ("cnn", 16, 10 if quick else 300)):
        space = Space({"lr": parse_domain("log:1e-4:1e-1"), "momentum": parse_domain("0:0.95")})
        fixed = Space({**space.domains, "model_size": parse_domain(size)})
        plan = Plan(load("digits"), steps=steps)
        # Neither time should include reading the data, or what torch loads with a process's first optimizer.
        train_alone(replace(plan, steps=1), RandomSampler(fixed, seed=0).ask(1)[0])
        start = time.perf_counter()
        fused = sweep(plan, RandomSampler(fixed, seed=0), trials)
        middle = time.perf_counter()
        alone = [train_alone(plan, each.trial) for each in fused]
        after = time.perf_counter()
        apart = max(abs(a.loss - b.loss) for a, b in zip(fused, alone, strict=True))
        best = [min(every, key=lambda each: each.loss).trial.number for every in (fused, alone)]
        words = "same best" if best[0] == best[1] else f"best {best[0]} and {best[1]}"
        seconds = f"{middle - start:.2f}", f"{after - middle:.2f}", f"{(after - middle) / (middle - start):.2f}"
        rows.append((f"{trials} trials of digits, {size}, {steps} steps", *seconds, f"{apart:.1e}", words))
    return rows


def main(arguments: Sequence[str]) -> None:
    """Print Markdown tables."""
    quick, parts = "--quick" in arguments, [each for each in arguments if not each.startswith("-")]
    torch.set_num_threads(1)
    keep_memory()
    clear_autotune_cache()
    show = partial(print, flush=True)
    tables = {
        "steps": (("training step", "array, ms", "speed ratio", "quartiles"), step_rows),
        "layers": (
            (
                *("layer, forward and backward", "array, ms", "loop, ms", "vmap, ms"),
                "array / faster of loop and vmap (quartiles)",
            ),
            layer_rows,
        ),
        "sweep": (("sweep", "array, s", "one by one, s", "ratio", "largest difference of losses", "trial"), sweep_rows),
    }
    for name, (head, rows) in tables.items():
        if parts and name not in parts:
            continue
        for row in chain((head, ("---",) * len(head)), rows(quick)):
            show(f"| {' | '.join(row)} |")
        show()


if __name__ == "__main__":
    main(sys.argv[1:])
