# SPDX-License-Identifier: Apache-2.0
"""Many tensors in one flat vector, with a named segment for each."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.core.torch_internals import foreach


@dataclass(frozen=True)
class Segment:
    """Where one named tensor lies in a flat vector."""

    name: str
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.size

    def of(self, vector: Tensor) -> Tensor:
        """The tensor as a view of `vector`, with its original strides."""
        return torch.as_strided(vector, self.shape, self.stride, vector.storage_offset() + self.start)


def dense_strides(x: Tensor) -> tuple[int, ...]:
    """The strides of `x` without gaps: its own if it is dense (channels-last stays so), else row-major ones."""
    # On the meta device torch chooses the strides without allocating.
    return torch.empty_like(x, device="meta", memory_format=torch.preserve_format).stride()


def lay_out(named: Sequence[tuple[str, Tensor]]) -> tuple[Segment, ...]:
    """One segment for each named tensor, end to end in the given order."""
    segments: list[Segment] = []
    start = 0
    for name, x in named:
        segments.append(Segment(name, start, tuple(x.shape), dense_strides(x)))
        start += x.numel()
    return tuple(segments)


def cut_out(segments: Sequence[Segment], where: slice) -> tuple[Segment, ...]:
    """The segments of a slice of the vector; a tensor that lies in it in part is there as a vector of that part."""
    found: list[Segment] = []
    for segment in segments:
        start, stop = max(segment.start, where.start), min(segment.stop, where.stop)
        if (start, stop) == (segment.start, segment.stop):
            found.append(replace(segment, start=start - where.start))
        elif start < stop:
            found.append(Segment(segment.name, start - where.start, (stop - start,), (1,)))
    return tuple(found)


def views(vector: Tensor, segments: Sequence[Segment]) -> list[Tensor]:
    """All segments of `vector`, as tensors that share its memory."""
    return [segment.of(vector) for segment in segments]


def flatten(tensors: Sequence[Tensor], segments: Sequence[Segment]) -> Tensor:
    """A new vector that holds copies of `tensors`, one for each segment."""
    vector = torch.empty(segments[-1].stop, dtype=tensors[0].dtype, device=tensors[0].device)
    copy_each_(views(vector, segments), [x.detach() for x in tensors])
    return vector


def copy_each_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy many tensors in one call, which is one kernel on a GPU."""
    foreach.copy_(targets, sources)
