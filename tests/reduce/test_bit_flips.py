"""One bit of what a compressed mean sends is flipped on the way: an error on all ranks, and nobody applies anything."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Literal

import pytest
import torch
from torch import Tensor

from thinwire import Codec, Comm, CommError, run_threads
from thinwire.codecs.cast import Fp8
from thinwire.codecs.header import HEADER_BYTES
from thinwire.codecs.one_bit import OneBit
from thinwire.codecs.quantize import Quantize
from thinwire.codecs.top_k import TopK
from thinwire.comm.pending import PendingMeans
from thinwire.comm.threads import Hub, ThreadComm
from thinwire.comm.work import Work
from thinwire.reduce.compressed_all_reduce import two_stage_mean_

SIZE, LENGTH = 3, 96
CODECS: list[Codec] = [OneBit(8), Quantize(4, 16), TopK(0.1), Fp8(block=16)]
Stage = Literal["scatter", "gather"]


class Flipping(ThreadComm):
    """A comm that flips one bit of a message that this rank sends, or of the copy of it that one rank receives.

    Args:
        hub: of the ranks.
        rank: this one.
        stage: of which call the message is.
        call: of which of those calls, from 0.
        src: the sender of the message.
        dst: the rank whose copy is flipped; None flips what is sent.
        bit: which bit, counted from the message's begin; taken modulo its length.
    """

    def __init__(self, hub: Hub, rank: int, *, stage: Stage, call: int, src: int, dst: int | None, bit: int) -> None:
        super().__init__(hub, rank, timeout=10)
        self._stage, self._src, self._dst, self._bit = stage, src, dst, bit
        self._left = {stage: call}

    def _is_chosen(self, stage: Stage) -> bool:
        left = self._left[stage] = self._left.get(stage, 0) - 1
        return left == -1 and stage == self._stage

    def _flipped(self, x: Tensor) -> Tensor:
        x, bit = x.clone(), self._bit % (8 * x.numel())
        x[bit // 8] ^= 1 << bit % 8
        return x

    def _received(self, rows: list[Tensor]) -> list[Tensor]:
        return [self._flipped(row) if rank == self._src else row for rank, row in enumerate(rows)]

    def _all_to_all(self, xs: Sequence[Tensor], sizes: Sequence[int]) -> Work[list[Tensor]]:
        chosen = self._is_chosen("scatter")
        if chosen and self._dst is None and self.rank == self._src:
            xs = [self._flipped(x) for x in xs]
        work = super()._all_to_all(xs, sizes)
        return work.then(self._received) if chosen and self.rank == self._dst else work

    def _all_gather(self, x: Tensor) -> Work[list[Tensor]]:
        chosen = self._is_chosen("gather")
        if chosen and self._dst is None and self.rank == self._src:
            x = self._flipped(x)
        work = super()._all_gather(x)
        return work.then(self._received) if chosen and self.rank == self._dst else work


def outcomes(draw: random.Random) -> tuple[dict[int, str], dict[int, bool], int | None]:
    """What each rank raised, whether its residuals stayed, and which rank alone saw the flip, if one did.

    Half of the flips are in headers. In half of the runs a rank's vector is not finite, in half two means finish
    together.
    """
    codec, stage = draw.choice(CODECS), draw.choice(("scatter", "gather"))
    src, dst = draw.randrange(SIZE), draw.choice([None, *range(SIZE)])
    bit = draw.randrange(8 * HEADER_BYTES) if draw.random() < 0.5 else 8 * HEADER_BYTES + draw.randrange(10**6)
    bad, count = draw.random() < 0.5, draw.choice([1, 2])
    xs = torch.randn(count, SIZE, LENGTH, generator=torch.Generator().manual_seed(draw.randrange(2**31)))
    if bad:
        xs[0, draw.randrange(SIZE), 5] = torch.nan
    errors, kept = dict[int, str](), dict[int, bool]()

    def body(comm: Comm) -> None:
        # The flip is in the last mean, so that an earlier one would be applied first.
        hub = comm._hub  # type: ignore[attr-defined]
        comm = Flipping(hub, comm.rank, stage=stage, call=count - 1, src=src, dst=dst, bit=bit)
        state, pending = dict[str, Tensor](), PendingMeans()
        vectors = [x[comm.rank].clone() for x in xs]
        works = [
            two_stage_mean_(comm, x, codec, state, key=i, offset=i * LENGTH, length=count * LENGTH, pending=pending)
            for i, x in enumerate(vectors)
        ]
        try:
            for work in works:
                work.wait()
            comm.all_reduce_(torch.zeros(1)).wait()  # the next call
        except CommError as error:
            errors[comm.rank] = str(error)
            kept[comm.rank] = not any(bool(x.any()) for x in state.values())
            raise

    with pytest.raises(CommError):
        run_threads(SIZE, body, timeout=10)
    return errors, kept, dst if stage == "gather" else None


@pytest.mark.parametrize("count", [200, pytest.param(5000, marks=pytest.mark.slow)])
def test_a_flipped_bit_is_an_error_on_all_ranks_before_anyone_applies_the_mean(count: int) -> None:
    draw = random.Random(17)
    for _ in range(count):
        errors, kept, only = outcomes(draw)
        assert sorted(errors) == list(range(SIZE))
        if only is None:
            assert all(kept.values())
            assert all(re.match(rf"rank {rank}, step 0, compressed mean: ", words) for rank, words in errors.items())
        else:
            # The others got the right bytes; their next call names the rank that did not.
            assert kept[only]
            assert errors[only].startswith(f"rank {only}, step 0, compressed mean: what rank ")
            assert all(f"rank {only} was lost" in words for rank, words in errors.items() if rank != only)
