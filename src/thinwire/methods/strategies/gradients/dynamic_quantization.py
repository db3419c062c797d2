# SPDX-License-Identifier: Apache-2.0
"""Average gradients at every step, with bits that a rule chooses for each step and bucket."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from thinwire.core.comm.work import Work
from thinwire.core.kernels import all_finite
from thinwire.core.kernels.decisions import decide, on_host
from thinwire.core.replica.replica import Replica
from thinwire.core.validation import check_range
from thinwire.methods.codecs.base import check_multiple_of_8, draw_key
from thinwire.methods.codecs.cast import Fp32
from thinwire.methods.codecs.quantize import Quantize
from thinwire.methods.reduce.compressed_all_reduce import two_stage_mean_
from thinwire.methods.strategies.base import Strategy, Traits
from thinwire.methods.strategies.gradients.bit_rules import (
    BitBudget,
    BitLedger,
    ErrorBound,
    FixedBits,
    Step,
    skipped_step,
)
from thinwire.methods.strategies.gradients.bits import MOST, square_of
from thinwire.registry import registered

_FP32_BITS = 32.0


@registered
class DQSGD(Strategy):
    r"""Average quantized gradients; a rule chooses the bits of each step.

    With $C_b$ random rounding to $s = 2^{b-1}-1$ levels on each side of zero, relative to the largest entry of each
    block, $b_t$ the rule's bits for step $t$, and $a$ more bits for the mean,

    $$x \leftarrow x - \gamma\, C_{b_t+a}\Big(\tfrac1n \sum_i C_{b_t}(g_i)\Big) .$$

    `ErrorBound` uses the fewest bits that keep the effect on the loss within a bound, `BitBudget` minimizes the error
    for a given number of bits, and `FixedBits` is the baseline. Rules use the squares of the previous step's gradients,
    which workers sum in a message of 8 bytes per bucket; no worker waits for it. All ranks therefore choose the same
    bits for each bucket before the backward pass starts. The first step takes the most bits that the rule allows.

    Rounding is unbiased, so there is no residual, and any optimizer can be used. A single worker encodes nothing. If a
    gradient is not finite on any rank, it becomes NaN on all of them, and the rule skips that step.

    Rules count the bits that workers send; the bits of the mean that is sent back are counted separately.
    Traffic: $\frac{n-1}{n}$ of the payload in each direction per worker and step, $b_t/8$ and $(b_t+a)/8$ bytes per
    entry and a scale per block, and the squares. State: `ledger`, the bits spent and the resulting error, and a few
    numbers per bucket.

    Yan et al., DQ-SGD: Dynamic Quantization in SGD for Communication-Efficient Distributed Learning, 2021,
    arXiv:2107.14575.

    Example:
        >>> import torch, thinwire
        >>> def train(comm):
        ...     model = torch.nn.Linear(64, 1, bias=False)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     worker = thinwire.attach(model, optimizer, DQSGD(BitBudget(bits=3.0, steps=4, most=6)), comm=comm)
        ...     for _ in range(5):
        ...         optimizer.zero_grad()
        ...         model(torch.ones(1, 64)).sum().backward()
        ...         optimizer.step()
        ...     return worker.metrics()["spent_bits_per_entry"]
        >>> thinwire.run_threads(2, train)  # 4 steps of 3 bits on average
        [12.0, 12.0]

    Args:
        rule: chooses the bits of each step.
        block: entries that share a scale; fewer entries are more exact, and add bytes for scales.
        dither: subtract the random numbers after decoding; this divides the squared error by three, and makes it
            independent of the gradient.
        correlated: workers round the same entry at evenly spaced thresholds: better if their gradients are nearly
            equal, worse if they differ by half a level.
        answer: $a$, the additional bits of the mean. The errors of the gradients average out over workers, that of the
            mean does not: with $\frac12 \log_2 n$ both are equal. None sends the mean uncompressed in fp32, as in
            papers that count one direction only.
    """

    rule: FixedBits | ErrorBound | BitBudget = BitBudget()
    block: int = 2048
    dither: bool = True
    correlated: bool = False
    answer: int | None = 0

    paper = "Yan et al., DQ-SGD: Dynamic Quantization in SGD, 2021, arXiv:2107.14575"
    waits = "every step, all wait for the slowest worker and for the transfer of the codes, twice"
    limits = "rules plan for a known number of steps; codes of two bits are noisy and need small learning rates"

    def make_traits(self) -> Traits:
        """See `Traits`."""
        return Traits(
            sends_gradients=True,
            data_dependent_bytes=self.rule.least < self.rule.most,
            equal_replicas=True,
            growing=("plan", "sent", "last_squares", "squares"),
        )

    def __post_init__(self) -> None:
        check_multiple_of_8("block", self.block, 2048)
        fix = (
            f"With the rule's {self.rule.most} bits codes have at most {MOST}. Let the rule have fewer, as in "
            "BitBudget(most=7), or use None for the mean itself"
        )
        check_range("answer", self.answer, f"0..{MOST - self.rule.most}", fix)

    # `r.state` has:
    #     ledger: fp64 [6]; a `BitLedger`.
    #     plan: int64 [buckets, 3]; start, stop and bits of every bucket, as planned for this backward pass.
    #     sent: int64 [buckets, 3]; the same for the buckets of this backward pass so far.
    #     last_squares: fp64 [buckets]; the squares of the last finite step, over all workers.
    #     lr_and_share: fp64 [2]; the learning rate of the plan, and the `share` of a `Step`.
    #     squares: fp64 [buckets so far]; this worker's squares, until they are sent.

    def start(self, r: Replica) -> None:
        """Start with an empty ledger and no buckets."""
        r.state["ledger"] = BitLedger().to_tensor()
        r.state["lr_and_share"] = torch.zeros(2, dtype=torch.float64, device="cpu")
        r.state["squares"] = r.x.new_zeros(0, dtype=torch.float64)
        self._forget_buckets(r)

    def _forget_buckets(self, r: Replica) -> None:
        r.state["plan"], r.state["sent"] = _no_buckets(), _no_buckets()
        r.state["last_squares"] = torch.zeros(0, dtype=torch.float64, device="cpu")

    def on_gradient(self, r: Replica, part: slice) -> Work[Tensor]:
        """Launch the compressed mean of one bucket; after the last one, the sum of squares."""
        # Buckets are final in order from the end of the vector to its beginning.
        if part.stop == r.x.numel():
            self._plan(r)
        # Divided by the ranks with data, so that the sum is the mean square of one worker.
        squares = torch.cat([r.state["squares"], square_of(r.g[part], self.block).reshape(1) / r.active])
        bits, key = self._bits_of(r, part), draw_key(r.seed, r.step, offset=part.start)
        codec, server = self._codec(bits), Fp32() if self.answer is None else self._codec(bits + self.answer)
        mean = two_stage_mean_(
            r.comm, r.g[part], codec, {}, key=key, count=r.active, pending=r.pending_means, server=server
        )
        if part.start == 0:
            # Collected by the next backward pass, so that it delays no worker.
            r.launch("squares", r.comm.all_reduce_(squares).then(lambda squares: [squares]))
            squares = squares.new_zeros(0)
        r.state["squares"] = squares
        return mean

    def regroup(self, r: Replica, before: int) -> None:
        """Give all workers the most advanced ledger, and drop the squares of the last pass.

        If a worker was lost during a pass, only some workers have used the squares of the pass before.
        """
        ledgers = r.comm.all_gather(r.state["ledger"].to(r.x.device)).wait()
        r.state["ledger"] = max((each.cpu() for each in ledgers), key=lambda ledger: float(ledger[0]))
        r.inflight.pop("squares", None)
        self._forget_buckets(r)

    # -- the bits of a step ----------------------------------------------------------------------------------------

    def _plan(self, r: Replica) -> None:
        """Add the previous step, whose squares have arrived, to the ledger, and choose the bits of this step."""
        # Sums of a backward pass without a step are dropped.
        r.state["squares"] = r.x.new_zeros(0, dtype=torch.float64)
        r.state["plan"], r.state["sent"] = r.state["sent"], _no_buckets()
        received = r.collect("squares")
        found = r.lr
        lr = found if not isinstance(found, Tensor) else decide(found, lambda: float(found.max()), most=1.0, least=1.0)
        # Each further bit at least halves a level, which divides the squared error of the mean by four.
        answer_error = 0.0 if self.answer is None else 0.25**self.answer
        error = (1 if self.correlated else 1 / r.active) + answer_error
        share = error / 3 if self.dither else error
        if received is not None:
            ledger, sizes = self._settled(r, received[0])
            squares = r.state["last_squares"].tolist()
            # Saved squares may belong to other buckets if a resumed run has another bucket size.
            squares = squares if len(squares) == len(sizes) else [inf] * len(sizes)
            step, rule = Step(squares, sizes, lr, share), self.rule
            most, least = ([bits] * len(sizes) for bits in (rule.most, rule.least))
            chosen = decide(received[0], lambda: rule.choose(ledger, step), most=most, least=least)
            r.state["plan"][:, 2] = torch.tensor(chosen, dtype=torch.int64, device="cpu")
        r.state["lr_and_share"] = torch.tensor((lr, share), dtype=torch.float64, device="cpu")

    def _settled(self, r: Replica, squares: Tensor) -> tuple[BitLedger, list[int]]:
        """Return the ledger after the previous step, and the sizes of its buckets."""
        buckets, squares = r.state["plan"].tolist(), on_host(squares)
        sizes, bits = [stop - start for start, stop, _ in buckets], [each for _, _, each in buckets]
        ledger, finite = BitLedger.read(r.state["ledger"]), all_finite(squares)
        step = Step(squares.tolist() if finite else [], sizes, *r.state["lr_and_share"].tolist())
        if finite:
            r.state["last_squares"] = squares
        ledger = self.rule.settle(ledger, step, bits) if finite else skipped_step(ledger, step, bits)
        sent_bits = step.mean_bits(bits)
        ledger = ledger.with_answer(_FP32_BITS if self.answer is None else sent_bits + self.answer)
        r.state["ledger"] = ledger.to_tensor()
        r.metrics["bits"] = sent_bits
        r.metrics["spent_bits_per_entry"] = ledger.bits
        r.metrics["answered_bits_per_entry"] = ledger.answered
        r.metrics["quantisation_error"] = ledger.error
        return ledger, sizes

    def _bits_of(self, r: Replica, part: slice) -> int:
        """Return the planned bits of this bucket, or of unknown squares if the last step did not have this bucket."""
        place = [part.start, part.stop]
        bits = next((each for *known, each in r.state["plan"].tolist() if known == place), 0)
        if not bits:
            unknown = Step([inf], [part.stop - part.start], *r.state["lr_and_share"].tolist())
            (bits,) = self.rule.choose(BitLedger.read(r.state["ledger"]), unknown)
        r.state["sent"] = torch.cat([r.state["sent"], torch.tensor([[*place, bits]], dtype=torch.int64, device="cpu")])
        return bits

    def _codec(self, bits: int) -> Quantize:
        return Quantize(bits, self.block, self.dither, self.correlated)


def _no_buckets() -> Tensor:
    return torch.zeros(0, 3, dtype=torch.int64, device="cpu")
