# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels: interpreted on the CPU, compiled for a GPU that is not there, and run where there is one.

Where there is none, torch computes the same on the pretended GPU, so that the tests themselves are known to be right.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.grids import fast_where
from tests.pretend_gpu import GPU, REAL, pretend_gpu
from thinwire.core import kernels
from thinwire.core.kernels import base

HERE = Path(__file__).parent

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
DEVICES = (torch.device("cpu"), GPU)
SIZES = fast_where(lambda n: n == 5000, (1, 9, 5000, 1 << 20))


def output_of(script: str, folder: Path, **names: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(folder), **names}
    done = subprocess.run([sys.executable, HERE / script], env=environment, capture_output=True, text=True, timeout=110)
    if "triton/runtime/interpreter" in done.stderr and "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("this Triton's interpreter does not know this NumPy, where an array of one element is no number")
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@needs_triton
def test_interpreted_kernels_give_what_torch_gives(tmp_path: Path) -> None:
    assert output_of("interpreted.py", tmp_path, TRITON_INTERPRET="1").endswith(" agree")


@needs_triton
def test_kernels_compile_for_a_gpu_and_fuse_no_product_with_a_sum(tmp_path: Path) -> None:
    assert output_of("for_gpu.py", tmp_path, TRITON_INTERPRET="0") == "29 compiled"


# -- on a GPU ----------------------------------------------------------------------------------------------------------


def drawn(n: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n))


@contextmanager
def gpu() -> Iterator[None]:
    """At the end on a real GPU: the kernels of Triton were used, none of them was replaced."""
    with pretend_gpu():
        yield
    assert not REAL or (base._agreeing and all(base._agreeing.values()))


@pytest.mark.gpu
@pytest.mark.parametrize("n", SIZES)
def test_signs_on_a_gpu_are_those_on_the_cpu(n: int) -> None:
    x, error = drawn(n), 0.1 * drawn(n)
    payloads: list[Tensor] = []
    with gpu():
        for device in DEVICES:
            payload = torch.zeros(kernels.sign_nbytes(n, 2048), dtype=torch.uint8, device=device)
            rest, decoded = error.clone().to(device), torch.empty(n, device=device)
            kernels.encode_signs_(x.to(device), rest, payload, block=2048)
            kernels.decode_signs_(payload, decoded, block=2048)
            assert torch.equal(rest, x.to(device) + error.to(device) - decoded)
            payloads.append(payload.cpu())
    head = 4 * -(-n // 2048)
    assert payloads[0][head:].equal(payloads[1][head:])
    assert torch.allclose(*(each[:head].clone().view(torch.float32) for each in payloads), rtol=1e-6, atol=0)


def few_bits_and_sketches(n: int, device: torch.device) -> Iterator[Tensor]:
    x = drawn(n).to(device)
    for bits in (1, 4, 8):
        payload = torch.zeros(kernels.quantized_nbytes(n, bits, 2048), dtype=torch.uint8, device=device)
        decoded = torch.empty(n, device=device)
        kernels.quantize_(x, payload, bits=bits, block=2048, key=7)
        kernels.dequantize_(payload, decoded, bits=bits, block=2048, key=7, dither=True)
        yield payload
        yield decoded
    table = torch.zeros(5, 1000, device=device)
    kernels.sketch_(x, table, key=7, scale=0.3)
    yield table
    yield kernels.unsketch(table, None, n, key=7)
    yield kernels.heavy(table, n, 10, key=7)
    powers = kernels.encode_powers(x, key=7)
    yield powers
    yield kernels.decode_powers(powers, n)
    yield kernels.top_k(x, 10)
    yield kernels.uniform(n, 3, device=device)


def nearest_levels(n: int, device: torch.device) -> Iterator[Tensor]:
    x = drawn(n).to(device)
    for bits, block in ((1, 2048), (4, 2048), (7, 2048), (3, 40), (4, 16384)):
        payload = torch.zeros(kernels.quantized_nbytes(n, bits, block), dtype=torch.uint8, device=device)
        rest, decoded, how = 0.1 * x, torch.empty(n, device=device), {"bits": bits, "block": block}
        kernels.encode_rounded_(x, rest, payload, **how)
        kernels.decode_rounded_(payload, decoded, **how)
        yield from (payload, rest, decoded)
        kernels.encode_rounded_(x, None, payload, **how)
        kernels.sum_rounded_([payload] * 3, decoded, **how)
        yield from (payload, decoded)


def largest_of_chunks(n: int, device: torch.device) -> Iterator[Tensor]:
    # Some elements are equal, so that the first of them must be sent.
    x = torch.where(torch.arange(n) % 3 == 0, drawn(n), drawn(n).mul(4).round()).to(device)
    for chunk, kept, bits in ((4096, 64, 2), (100, 7, 6), (16384, 500, 8)):
        how = {"chunk": chunk, "kept": kept, "bits": bits}
        payload = torch.zeros(kernels.chunked_nbytes(n, **how), dtype=torch.uint8, device=device)
        rest, decoded = 0.1 * x, torch.full((n,), 5.0, device=device)
        kernels.encode_chunks_(x, rest, payload, **how)
        kernels.add_chunks_(payload, decoded, **how)
        yield from (payload, rest, decoded)
        kernels.encode_chunks_(x, None, payload, **how)
        kernels.add_chunks_(payload, decoded, fresh=True, **how)
        yield from (payload, decoded)
        if device == GPU:  # where the host does not wait to refuse these
            kernels.encode_chunks_(torch.full_like(x, torch.nan), None, payload, **how)
            kernels.add_chunks_(torch.full_like(payload, 255), decoded, **how)


@pytest.mark.gpu
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("results", [few_bits_and_sketches, nearest_levels, largest_of_chunks])
def test_results_on_a_gpu_are_bit_by_bit_those_on_the_cpu(
    results: Callable[[int, torch.device], Iterator[Tensor]], n: int
) -> None:
    with gpu():
        # Each result at once, since the next call may write into its memory.
        found = [[each.cpu().clone() for each in results(n, device)] for device in DEVICES]
    assert [i for i, pair in enumerate(zip(*found, strict=True)) if not torch.equal(*pair)] == []
