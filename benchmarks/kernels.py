# SPDX-License-Identifier: Apache-2.0
"""What the kernels cost on one core, relative to copying the vector and to torch computing the same.

python -m benchmarks.kernels [--quick] [--torch-rounds N] [--only RECIPE_CLASSES]
python -m benchmarks.kernels --device cuda [--quick]

On a GPU, whole codes are measured: the bytes that they must read and write, a second, as a share of a copy's.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor

import thinwire
from benchmarks.paired import Row, Step, show, start, take_turns
from thinwire.core import kernels
from thinwire.core.kernels import adaptive
from thinwire.core.kernels.base import compiled
from thinwire.core.kernels.reference import adaptive as by_torch
from thinwire.core.kernels.reference import chunks, largest, quantized, rounded, signs, sketched
from thinwire.lab.report.statistics import ratios

Work = Callable[[], object]

BLOCK, KEY, ROWS, BITS = 2048, 7, 5, 4
MILLION = 1 << 20


@dataclass(frozen=True)
class Case:
    """A kernel, the same computation by torch, and the nanoseconds per element that it should not exceed."""

    name: str
    ours: Work
    theirs: Work
    bar: float | None = None


def sign_cases(x: Tensor) -> list[Case]:
    """Encode signs with a residual, and decode them."""
    n, residual, decoded = x.numel(), torch.zeros_like(x), torch.empty_like(x)
    payload = torch.empty(kernels.sign_nbytes(n, BLOCK), dtype=torch.uint8)
    several, how = torch.zeros(8, len(payload), dtype=torch.uint8), {"block": BLOCK, "scale_bytes": 4}

    def ours() -> None:
        kernels.encode_signs_(x, residual, payload, block=BLOCK)
        kernels.decode_signs_(payload, decoded, block=BLOCK)

    def theirs() -> None:
        signs.encode_signs_(x, residual, payload, norm="l1", **how)
        signs.decode_signs_(payload, decoded, **how)

    return [
        Case("1-bit encode with residual + decode", ours, theirs, 3.0),
        Case(
            "sum of 8 workers' signs",
            lambda: kernels.sum_signs_(several, decoded, block=BLOCK),
            lambda: signs.sum_signs_(several, decoded, **how),
        ),
    ]


def bit_cases(x: Tensor) -> list[Case]:
    """Quantise to four bits, and decode."""
    decoded, payload = (
        torch.empty_like(x),
        torch.empty(kernels.quantized_nbytes(x.numel(), BITS, BLOCK), dtype=torch.uint8),
    )
    how: dict[str, Any] = {"bits": BITS, "block": BLOCK, "key": KEY}
    more: dict[str, Any] = {**how, "shift": 0.0, "scale_bytes": 4}
    return [
        Case(
            "4-bit quantise + pack",
            lambda: kernels.quantize_(x, payload, **how),
            lambda: quantized.quantize_(x, payload, norm="max", **more),
            1.2,
        ),
        Case(
            "4-bit dequantise",
            lambda: kernels.dequantize_(payload, decoded, **how),
            lambda: quantized.dequantize_(payload, decoded, dither=False, **more),
        ),
        Case(
            "4-bit dequantise with dither",
            lambda: kernels.dequantize_(payload, decoded, dither=True, **how),
            lambda: quantized.dequantize_(payload, decoded, dither=True, **more),
        ),
    ]


def rounded_cases(x: Tensor) -> list[Case]:
    """Round to the nearest level with a residual and decode, at every width; and the largest of every chunk."""
    n, residual, decoded = x.numel(), torch.zeros_like(x), torch.empty_like(x)

    def rounded_case(bits: int) -> Case:
        payload, how = torch.empty(kernels.quantized_nbytes(n, bits, BLOCK), dtype=torch.uint8), {"block": BLOCK}

        def ours() -> None:
            kernels.encode_rounded_(x, residual, payload, bits=bits, **how)
            kernels.decode_rounded_(payload, decoded, bits=bits, **how)

        def theirs() -> None:
            rounded.encode_rounded_(x, residual, payload, bits=bits, **how)
            rounded.decode_rounded_(payload, decoded, bits=bits, **how)

        return Case(f"nearest, {bits}-bit, encode with residual + decode", ours, theirs, 1.5)

    size: dict[str, Any] = {"chunk": 4096, "kept": 64, "bits": 2}
    few = torch.zeros_like(x)
    packed = torch.empty(kernels.chunked_nbytes(n, **size), dtype=torch.uint8)

    def ours() -> None:
        kernels.encode_chunks_(x, few, packed, **size)
        kernels.add_chunks_(packed, decoded, **size)

    def theirs() -> None:
        chunks.encode_chunks_(x, few, packed, **size)
        chunks.add_chunks_(packed, decoded, **size)

    chunked = Case("64 of each 4096, 2-bit, encode with residual + decode", ours, theirs, 6.0)
    return [*(rounded_case(bits) for bits in range(1, 9)), chunked]


def large_cases(x: Tensor) -> list[Case]:
    """Find the largest elements, of the vector and of its sketch."""
    n, table = x.numel(), torch.zeros(ROWS, x.numel() // 64)
    k = n // 2048

    def ours() -> None:
        kernels.sketch_(x, table.zero_(), key=KEY)
        kernels.heavy(table, n, k, key=KEY)

    def theirs() -> None:
        sketched.sketch_(x, table.zero_(), key=KEY, scale=1.0)
        largest.top_k(sketched.unsketch(table, None, n, key=KEY), k)

    return [
        Case("sketch (5 rows) + heavy hitters", ours, theirs, 12.0),
        Case("the largest thousandth", lambda: kernels.top_k(x, n // 1000), lambda: largest.top_k(x, n // 1000)),
        Case("the largest hundredth", lambda: kernels.top_k(x, n // 100), lambda: largest.top_k(x, n // 100)),
    ]


def step_cases(x: Tensor) -> list[Case]:
    """Steps of 1-bit LAMB and 1-bit Adam with frozen variance."""
    one = torch.ones_like(x)
    momentum, before, frozen, fresh, weights = ([each] for each in (x.clone(), x.clone(), one, one.clone(), x.clone()))
    how: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "decay": 0.01}
    numbers, ratio = (0.9, 0.999, (1 - 0.999) / (1 - 0.9) ** 2, 1e-8, 0.01), torch.ones(1)
    every = (momentum, before, frozen, fresh, weights)

    def ours() -> None:
        adaptive.lamb_direction_(*every, **how)
        adaptive.scaled_step_(weights, momentum, ratio, rate=1e-6)

    def theirs() -> None:
        by_torch.lamb_direction_(*every, numbers)
        by_torch.scaled_step_(weights, momentum, ratio, 1e-6)

    return [
        Case("1-bit LAMB's step, with decay", ours, theirs),
        Case(
            "1-bit Adam's step, with decay",
            lambda: adaptive.frozen_adam_step_(weights, before, momentum, frozen, eps=1e-8, decay=0.01, rate=1e-6),
            lambda: by_torch.frozen_adam_step_(weights, before, momentum, frozen, (1e-8, 0.01, 1e-6)),
        ),
    ]


def without_result(work: Work) -> Step:
    """Run the same without returning a result."""

    def once() -> None:
        work()

    return once


def turns_of(contenders: Mapping[str, Work], rounds: int, *, warm_up: int) -> dict[str, list[float]]:
    """Return the seconds of contenders that take turns."""
    steps = {name: without_result(work) for name, work in contenders.items()}
    turns = take_turns(steps, rounds=rounds, steps=1, warm_up=warm_up)
    return {name: turn.wall for name, turn in turns.items()}


def measured(case: Case, x: Tensor, torch_rounds: int) -> Row:
    """Measure one row: in turns with a copy, then with torch, which takes up to a hundred times as long."""
    copy = torch.empty_like(x)
    beside_copy = turns_of({"copy": lambda: copy.copy_(x), "ours": case.ours}, 9, warm_up=1)
    beside_torch = turns_of({"theirs": case.theirs, "ours": case.ours}, torch_rounds, warm_up=int(torch_rounds > 1))
    each = beside_copy["ours"]
    nanoseconds = statistics.median(each) / x.numel() * 1e9
    share = ratios(beside_copy["copy"], each).median
    ratio = ratios(*beside_torch.values()).median
    bar = "" if case.bar is None else f"{case.bar} ns, 5x"
    spread = f"{nanoseconds:.2f} ({min(each) / x.numel() * 1e9:.2f} to {max(each) / x.numel() * 1e9:.2f})"
    return (case.name, spread, f"{share:.2f}", f"{ratio:.1f}", bar)


def rows(*, quick: bool, torch_rounds: int, only: str) -> Iterator[Row]:
    """Measure all rows of the table."""
    n = (4 if quick else 32) * MILLION
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    for make in (sign_cases, bit_cases, rounded_cases, large_cases, step_cases):
        yield from (measured(case, x, torch_rounds) for case in make(x) if only in case.name)


GPU_CODES = (
    "ErrorFeedback(OneBit())",
    "ErrorFeedback(Nearest(bits=4))",
    "ErrorFeedback(ChunkedTopK())",
    "Quantize(4)",
    "Quantize(8)",
    "Natural()",
)


def options(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a vector of 4 Mi entries instead of 32 Mi")
    parser.add_argument("--torch-rounds", type=int, default=1, help="how often torch is timed; 3 for a median")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: codes on a GPU")
    parser.add_argument("--only", default="", help="rows whose name has these words in it")
    asked = parser.parse_args(arguments)
    if asked.torch_rounds < 1:
        parser.error(f"--torch-rounds {asked.torch_rounds}: must be at least 1")
    return asked


def milliseconds(work: Work, device: torch.device, seconds: float) -> float:
    """Return the median time of a call, in batches of calls without a wait between them."""
    wait: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    taken, calls = list[float](), 8
    work()
    wait()
    begun = time.perf_counter()
    while time.perf_counter() < begun + seconds or len(taken) < 3:
        start = time.perf_counter()
        for _ in range(calls):
            work()
        wait()
        taken.append((time.perf_counter() - start) / calls)
    return 1000 * statistics.median(taken)


@dataclass(frozen=True)
class DeviceCase:
    """A code's computations as a training step runs them, and the bytes that each must read and write."""

    encode: Work
    decode: Work
    encoded_bytes: int
    decoded_bytes: int
    sent: int


def device_case(recipe: str, x: Tensor) -> DeviceCase:
    """Prepare a code. Encoding reads the vector and writes the payload; with feedback it updates the residual too."""
    codec: Any = cast(Any, thinwire.parse(f"AllReduce(codec={recipe})")).codec
    n, residual, inner = x.numel(), torch.zeros_like(x), codec.codec if codec.traits.keeps_residual else codec

    def encode() -> Tensor:
        return inner.encode_with_residual_(residual, x, 1) if codec.traits.keeps_residual else codec.encode(x, {}, 1)

    payload = encode()
    sent, reads = payload.nbytes, (12 if codec.traits.keeps_residual else 4) * n
    return DeviceCase(encode, lambda: inner.decode(payload, x, 1), reads + sent, 4 * n + sent, sent)


def on_device(n: int, device: torch.device, seconds: float = 0.4) -> Iterator[tuple[str, ...]]:
    """Yield a row per code: the share of a copy's bandwidth of encoding and decoding, with milliseconds and GB/s."""
    x, out = torch.randn(n, device=device), torch.empty(n, device=device)
    copy = 8 * n / milliseconds(lambda: out.copy_(x), device, seconds)
    yield "a copy", "", f"1.00 ({8 * n / copy:.3f} ms, {copy / 1e6:.0f} GB/s)", ""
    for recipe in GPU_CODES:
        try:
            case = device_case(recipe, x)
            cells = [
                f"{nbytes / taken / copy:.2f} ({taken:.3f} ms, {nbytes / taken / 1e6:.0f} GB/s)"
                for work, nbytes in ((case.encode, case.encoded_bytes), (case.decode, case.decoded_bytes))
                for taken in [milliseconds(work, device, seconds)]
            ]
            yield recipe, f"{8 * case.sent / n:.2f}", *cells
        except Exception as error:  # the other codes are measured
            yield recipe, f"{type(error).__name__}: {str(error)[:200]}", "", ""


def tables_of_device(n: int, device: torch.device) -> None:
    """Print the table of a GPU."""
    head = ("code", "bits per element", "encode, share of a copy", "decode, share of a copy")
    show(head, ("---",) * 4, *on_device(n, device))


def main(arguments: Sequence[str]) -> None:
    """Print a Markdown table, with ranges from minimum to maximum, and the peak memory."""
    asked = options(arguments)
    if asked.device == "cuda":
        tables_of_device((4 if asked.quick else 64) * MILLION, torch.device("cuda"))
        return
    start()
    if compiled(torch.empty(0)) is None:
        print("no compiled kernels: there is no C compiler, or THINWIRE_NATIVE=0")
        return
    head = ("kernel, on one core", "ns per element", "speed vs copying", "speed vs torch", "bar")
    for row in chain((head, ("---",) * 5), rows(quick=asked.quick, torch_rounds=asked.torch_rounds, only=asked.only)):
        show(row)
    print(f"\nat most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / MILLION:.1f} GiB of memory")


if __name__ == "__main__":
    main(sys.argv[1:])
