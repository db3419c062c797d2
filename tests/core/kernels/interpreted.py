# SPDX-License-Identifier: Apache-2.0
"""Run with TRITON_INTERPRET=1: the kernels for GPUs on CPU tensors, against what torch gives. Prints how many agree."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from thinwire.core.kernels import (
    chunked_nbytes,
    floats,
    quantized_nbytes,
    sign_nbytes,
    triton_chunks,
    triton_floats,
    triton_quantized,
    triton_rounded,
    triton_rows,
    triton_signs,
    triton_sketched,
)
from thinwire.core.kernels.reference import chunks, quantized, rounded, signs, sketched
from thinwire.core.kernels.reference.rows import adam_rows_, sgd_rows_

SIZES = (1, 9, 500)


def special(n: int, seed: int = 0) -> Tensor:
    """Numbers with both zeros, and a range of zeros."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    x[1::11], x[n // 2 : n // 2 + 40] = -0.0, 0
    return x


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.view(torch.int32).equal(b.view(torch.int32))


def check_signs(n: int, block: int, norm: str, scale_bytes: int) -> None:
    x, ours, theirs = special(n), 0.3 * special(n, 1), 0.3 * special(n, 1)
    nbytes, head = sign_nbytes(n, block, scale_bytes), -(-n // block) * scale_bytes
    payload, expected = torch.zeros(2, nbytes, dtype=torch.uint8)
    how = {"block": block, "scale_bytes": scale_bytes}
    triton_signs.encode_signs_(x, ours, payload, norm=norm, **how)
    signs.encode_signs_(x, theirs, expected, norm=norm, **how)
    assert payload[head:].equal(expected[head:])
    decoded, wanted = torch.empty(n), torch.empty(n)
    signs.decode_signs_(payload, decoded, **how)
    signs.decode_signs_(expected, wanted, **how)
    assert torch.allclose(decoded, wanted, rtol=1e-6 if scale_bytes == 4 else 2**-7, atol=0)
    assert same_bits(ours, x + 0.3 * special(n, 1) - decoded)
    triton_signs.encode_signs_(x, None, payload, norm=norm, **how)
    signs.encode_signs_(x, None, expected, norm=norm, **how)
    assert payload[head:].equal(expected[head:])
    several = torch.stack([payload, expected, payload])
    triton_signs.sum_signs_(several, decoded, **how)
    signs.sum_signs_(several, wanted, **how)
    assert same_bits(decoded, wanted)


def check_few_bits(n: int, block: int, bits: int, norm: str, scale_bytes: int) -> None:
    x, decoded, wanted = special(n), torch.empty(n), torch.empty(n)
    payload, expected = torch.zeros(2, quantized_nbytes(n, bits, block, scale_bytes), dtype=torch.uint8)
    how = {"bits": bits, "block": block, "key": n, "shift": 0.375, "scale_bytes": scale_bytes}
    triton_quantized.quantize_(x, payload, norm=norm, **how)
    quantized.quantize_(x, expected, norm=norm, **how)
    if norm == "max":
        assert payload.equal(expected)
    for dither in (False, True):
        triton_quantized.dequantize_(payload, decoded, dither=dither, **how)
        quantized.dequantize_(payload, wanted, dither=dither, **how)
        assert same_bits(decoded, wanted)
    quantized.dequantize_(expected, wanted, dither=True, **how)
    # Within a level, where scales differ in their last bits.
    assert float((decoded - wanted).abs().max()) <= float(x.norm()) / max(0.5, 2 ** (bits - 1) - 1) * 1.01


def same_values(a: Tensor, b: Tensor) -> bool:
    """The same bits, but any NaN equals any other."""
    return same_bits(a.nan_to_num(1e30), b.nan_to_num(1e30)) and a.isnan().equal(b.isnan())


def check_nearest(n: int, block: int, bits: int) -> None:
    """Ordinary numbers; then blocks that are zero, tiny, that overflow in a sum, and that are not finite."""
    x = special(n)
    wild = x.clone()
    for start, value in ((0, 0.0), (1, 1e-32), (2, 1e38), (3, torch.inf), (4, torch.nan), (5, -torch.inf)):
        wild[start * block : start * block + (1 if value == value and abs(value) > 1e38 else block)] = value
    for of, off in ((x, 0), (wild, 0), (x, 1)) if bits == 4 else ((x, 0), (wild, 0)):
        nbytes, how = quantized_nbytes(n, bits, block), {"bits": bits, "block": block}
        payload, expected = torch.full((2, nbytes + off), 7, dtype=torch.uint8)[:, off:]
        rest = torch.cat([torch.zeros(off), 0.3 * special(n, 1)])
        given, (ours, theirs) = torch.cat([torch.zeros(off), of])[off:], (rest.clone()[off:], rest.clone()[off:])
        triton_rounded.encode_rounded_(given, ours, payload, **how)
        rounded.encode_rounded_(given, theirs, expected, **how)
        assert payload.equal(expected)
        assert same_values(ours, theirs)
        if off:
            triton_rounded.encode_rounded_(given, None, payload, **how)
            rounded.encode_rounded_(given, None, expected, **how)
            assert payload.equal(expected)
        decoded, wanted = torch.empty(2, n + off)[:, off:]
        for payloads, add in ((payload[None], False), (torch.stack([payload, expected, payload]), True)):
            triton_rounded.sum_rounded_(payloads, decoded, add=add, **how)
            rounded.sum_rounded_(payloads, wanted, add=add, **how)
            assert same_values(decoded, wanted)


def check_powers(n: int) -> None:
    x = special(n)
    x[::7], x[3::50], x[4::50], x[5::50] = 1e-42, torch.inf, torch.nan, 3.4e38
    payload, expected = triton_floats.encode_powers(x, key=n), floats.encode_powers(x, key=n)
    assert payload.equal(expected)
    payload[0] = 255
    assert same_bits(triton_floats.decode_powers(payload, n), floats.decode_powers(payload, n))


def check_chunks(n: int, chunk: int, kept: int, bits: int) -> None:
    """Ordinary numbers with equal ones, chunks of zeros, tiny and infinite numbers; NaN, and a damaged payload."""
    x, how = special(n).mul(4).round().div(4), {"chunk": chunk, "kept": kept, "bits": bits}
    x[: n // 3] += 0.01 * special(n, 2)[: n // 3]
    x[-2:] = torch.inf
    x[n // 4 : n // 4 + chunk] *= 1e-33
    rest = 0.3 * special(n, 1)
    rest[n // 4 :] = 0
    payload, expected = torch.full((2, chunked_nbytes(n, **how)), 7, dtype=torch.uint8)
    for ours, theirs in ((rest.clone(), rest.clone()), (None, None)):
        triton_chunks.encode_chunks_(x, ours, payload, **how)
        chunks.encode_chunks_(x, theirs, expected, **how)
        assert payload.equal(expected)
        assert ours is None or theirs is None or same_values(ours, theirs)
    ours, theirs = rest.clone(), rest.clone()
    for fresh in (False, True):
        triton_chunks.add_chunks_(ours, payload, fresh=fresh, **how)
        chunks.add_chunks_(payload, theirs.zero_() if fresh else theirs, **how)
        assert same_values(ours, theirs)
    # More NaNs than are sent, and any positions: nothing beyond the end is written.
    x[n // 2 :] = torch.nan
    guarded = torch.full((payload.numel() + 64,), 7, dtype=torch.uint8)
    triton_chunks.encode_chunks_(x, ours, guarded[: payload.numel()], **how)
    assert guarded[payload.numel() :].eq(7).all()
    ours = torch.full((n + chunk,), 7.0)
    triton_chunks.add_chunks_(ours[:n], payload.fill_(255), fresh=True, **how)
    assert ours[n:].eq(7).all()


def check_sketch(n: int, rows: int, columns: int) -> None:
    x, ours, theirs = special(n), torch.ones(rows, columns), torch.ones(rows, columns)
    triton_sketched.sketch_(x, ours, key=n, scale=0.3)
    sketched.sketch_(x, theirs, key=n, scale=0.3)
    assert same_bits(ours, theirs)
    assert triton_sketched.unsketch(ours, n, key=n).equal(sketched.unsketch(ours, None, n, key=n))
    ours[0, 0] = torch.nan
    found, expected = triton_sketched.unsketch(ours, n, key=n), sketched.unsketch(ours, None, n, key=n)
    assert torch.equal(found.isnan(), expected.isnan())


def check_rows(n: int, dtype: torch.dtype) -> None:
    """Rows take every branch: decay of both kinds, means by both formulas, both kinds of momentum, an inactive row."""
    active = torch.tensor([True, True, False, True])
    first, second = torch.tensor([[0.9, 0.3, 0.9, 0.0], [0.999, 0.9, 0.9, 0.0]], dtype=torch.float64)
    decay = torch.tensor([0.0, 0.1, 0.0, 0.3], dtype=torch.float64)
    shrink, scale = torch.tensor([1.0, 0.9, 1.0, 1.0], dtype=torch.float64), torch.full((4,), 1.5, dtype=torch.float64)
    adam = torch.stack([shrink, decay, 1 - first, first, second, 1 - second, scale, scale / 1e4, scale / 10], 1)
    sgd = torch.tensor([[0, 0, 1, 0, 0.1], [0.1, 0.9, 1, 0, 0.1], [0, 0.9, 1, 1, 0.1], [0, 0.5, 0.7, 1, 0.1]]).double()
    for amsgrad in (False, True):
        ours = [torch.stack([special(n, 4 * place + row).to(dtype) for row in range(4)]) for place in range(5)]
        ours[3].abs_(), ours[4].abs_()
        ours[0][0, 0] = float("inf")
        theirs = [each.clone() for each in ours]
        for _ in range(2):
            triton_rows.adam_rows_(*ours[:4], ours[4] if amsgrad else None, adam, active)
            adam_rows_(*theirs[:4], theirs[4] if amsgrad else None, adam, active)
        triton_rows.sgd_rows_(*ours[:3], sgd, active)
        sgd_rows_(*theirs[:3], sgd, active)
        for mine, wanted in zip(ours, theirs, strict=True):
            # The last bit of a square root of torch in fp64 may be wrong.
            assert torch.allclose(mine, wanted, rtol=0 if dtype == torch.float32 else 1e-13, atol=0, equal_nan=True)


def main() -> None:
    count = 0
    for n in SIZES:
        for dtype in (torch.float32, torch.float64):
            check_rows(n, dtype)
            count += 1
        for block, (norm, scale_bytes) in itertools.product((8, 2048, 12), (("l1", 4), ("l2", 2), ("l1", 2))):
            check_signs(n, block, norm, scale_bytes)
            count += 1
        for block, bits, (norm, scale_bytes) in itertools.product(
            (40, 2048), (1, 4, 8), (("max", 4), ("max", 2), ("l2", 4))
        ):
            check_few_bits(n, block, bits, norm, scale_bytes)
            count += 1
        check_powers(n)
        for block, bits in [(96, bits) for bits in range(1, 9)] if n == 500 else [(8, 4), (2048, 5)]:
            check_nearest(n, block, bits)
            count += 1
        for rows, columns in ((1, 1), (3, 64), (5, 1100), (7, 50)):
            if n // columns <= 100:
                check_sketch(n, rows, columns)
                count += 1
    check_nearest(2500, 2048, 4)
    for n, chunk, kept, bits in ((500, 64, 5, 2), (300, 100, 7, 6), (1100, 1024, 64, 2), (9, 8, 8, 1), (40, 2, 1, 8)):
        check_chunks(n, chunk, kept, bits)
        count += 1
    print(f"{count} agree")


if __name__ == "__main__":
    main()
