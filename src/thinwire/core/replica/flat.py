# SPDX-License-Identifier: Apache-2.0
"""Many tensors in one flat vector, with a named segment for each."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.core.torch_internals import foreach


@dataclass(frozen=True)
class Segment:
    """The position of one named tensor in a flat vector."""

    name: str
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def stop(self) -> int:
        """Return the index after the last element."""
        return self.start + self.size

    def of(self, vector: Tensor) -> Tensor:
        """Return the tensor as a view of `vector`, with its original strides."""
        return torch.as_strided(vector, self.shape, self.stride, vector.storage_offset() + self.start)


def dense_strides(x: Tensor) -> tuple[int, ...]:
    """Return strides without gaps: those of `x` if it is dense (also channels-last), else row-major ones."""
    # On the meta device torch chooses the strides without allocating.
    return torch.empty_like(x, device="meta", memory_format=torch.preserve_format).stride()


def lay_out(named: Sequence[tuple[str, Tensor]]) -> tuple[Segment, ...]:
    """Make one segment for each named tensor, end to end in the given order."""
    segments: list[Segment] = []
    start = 0
    for name, x in named:
        segments.append(Segment(name, start, tuple(x.shape), dense_strides(x)))
        start += x.numel()
    return tuple(segments)


def cut_out(segments: Sequence[Segment], where: slice) -> tuple[Segment, ...]:
    """Return the segments of a slice of the vector; a partly covered tensor becomes a vector of that part."""
    found: list[Segment] = []
    for segment in segments:
        start, stop = max(segment.start, where.start), min(segment.stop, where.stop)
        if (start, stop) == (segment.start, segment.stop):
            found.append(replace(segment, start=start - where.start))
        elif start < stop:
            found.append(Segment(segment.name, start - where.start, (stop - start,), (1,)))
    return tuple(found)


def views(vector: Tensor, segments: Sequence[Segment]) -> list[Tensor]:
    """Return all segments of `vector` as tensors that share its memory."""
    return [segment.of(vector) for segment in segments]


def flatten(tensors: Sequence[Tensor], segments: Sequence[Segment]) -> Tensor:
    """Copy `tensors`, one for each segment, into a new vector."""
    vector = torch.empty(segments[-1].stop, dtype=tensors[0].dtype, device=tensors[0].device)
    copy_each_(views(vector, segments), [x.detach() for x in tensors])
    return vector


def copy_each_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy many tensors in one call, which is one kernel on a GPU."""
    foreach.copy_(targets, sources)


@contextmanager
def restored(tensors: Sequence[Tensor]) -> Generator[None]:
    """Restore the values of these tensors at the end of the block."""
    own = [x.detach().clone() for x in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for x, value in zip(tensors, own, strict=True):
                x.copy_(value)
