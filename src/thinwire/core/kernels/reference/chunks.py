# SPDX-License-Identifier: Apache-2.0
"""The largest elements of each chunk, in torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from thinwire.core.kernels.reference.bits import pack_numbers, read_scales, unpack_numbers, write_scales
from thinwire.core.kernels.reference.rounded import levels_of


def encode_chunks_(x: Tensor, residual: Tensor | None, out: Tensor, *, chunk: int, kept: int, bits: int) -> Tensor:
    """Write a record for each chunk; return whether none contains NaN, as a tensor."""
    if residual is not None:
        x = residual.add_(x)
    finite = torch.ones((), dtype=torch.bool, device=x.device)
    for rows, k, records in _records(x, out, chunk, kept, bits):
        places = torch.sort(rows.abs(), dim=1, descending=True, stable=True).indices[:, :k].sort(1).values
        values = rows.gather(1, places)
        finite &= values.isnan().logical_not().all()
        counts = torch.full((len(rows),), float(k), dtype=torch.float32, device=x.device)
        scales, codes, decoded = levels_of(values, counts, bits)
        width = (chunk - 1).bit_length()
        written = torch.empty(4 * len(rows), dtype=torch.uint8, device=x.device)
        write_scales(scales, written, 4)
        parts = [written.view(len(rows), 4), pack_numbers(places, width), pack_numbers(codes.long(), bits)]
        records.copy_(torch.cat(parts, 1))
        if residual is not None:
            rows.scatter_(1, places, values - decoded)
    return finite


def add_chunks_(payload: Tensor, out: Tensor, *, chunk: int, kept: int, bits: int) -> Tensor:
    """Add the elements of the records; return whether all positions are inside their chunks, as a tensor.

    Elements outside their chunk are left out.
    """
    width = (chunk - 1).bit_length()
    valid = torch.ones((), dtype=torch.bool, device=out.device)
    for rows, k, records in _records(out, payload, chunk, kept, bits):
        middle = 4 + -(-k * width // 8)
        scales = read_scales(records[:, :4].reshape(-1), len(rows), 4)
        places = unpack_numbers(records[:, 4:middle], width, k)
        inside = places < rows.shape[1]
        valid &= inside.all()
        values = (2 * unpack_numbers(records[:, middle:], bits, k) - (2**bits - 1)).float() * scales[:, None]
        places, values = places.clamp(max=rows.shape[1] - 1), values.where(inside, 0.0)
        # Column by column, since positions may repeat in a damaged payload.
        for place, value in zip(places.T, values.T, strict=True):
            rows[torch.arange(len(rows), device=rows.device), place] += value
    return valid


def _records(x: Tensor, payload: Tensor, chunk: int, kept: int, bits: int) -> Iterator[tuple[Tensor, int, Tensor]]:
    """Yield the whole chunks as rows of a matrix, then the shorter last one: rows, kept elements, records."""
    begin = at = 0
    for count, length in ((x.numel() // chunk, chunk), (1, x.numel() % chunk)):
        k = -(-kept * length // chunk)
        nbytes = 4 + -(-k * (chunk - 1).bit_length() // 8) + -(-k * bits // 8)
        if count and length:
            rows, records = x[begin : begin + count * length], payload[at : at + count * nbytes]
            yield rows.view(count, length), k, records.view(count, nbytes)
            begin, at = begin + count * length, at + count * nbytes
