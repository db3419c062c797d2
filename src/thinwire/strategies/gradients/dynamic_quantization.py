"""Average gradients at every step, in as many bits as they are worth."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from thinwire.codecs.base import draw_key
from thinwire.codecs.cast import Fp32
from thinwire.codecs.quantize import Quantize
from thinwire.comm.work import Work
from thinwire.errors import ConfigError
from thinwire.reduce.stages import TwoStageMean, launched
from thinwire.replica.replica import Replica
from thinwire.strategies.base import Strategy
from thinwire.strategies.gradients.bit_rules import BitBudget, BitLedger, ErrorBound, FixedBits, Step, passed_over
from thinwire.strategies.gradients.bits import MOST, square_of
from thinwire.validation import check_kinds

_WHOLE = 32.0  # bits of an entry that is not coded


@dataclass(frozen=True)
class DQSGD(Strategy):
    r"""Average gradients in codes whose number of bits follows from how large gradients are and what is left to spend.

    With $C_b$ random rounding to $s = 2^{b-1}-1$ levels to each side of zero, relative to the largest entry of each
    block, the bits $b_t$ of step $t$ from a rule, $a$ bits more for the mean, and two stages as of any coded mean,

    $$x \leftarrow x - \gamma\, C_{b_t+a}\Big(\tfrac1n \sum_i C_{b_t}(g_i)\Big) .$$

    `ErrorBound` says the least that keeps what quantisation adds to the loss within bounds, `BitBudget` makes the most
    of a given number of bits, `FixedBits` is what both are compared to. Rules know the gradients of the step before:
    workers add up their squares, in a message of 8 bytes for each bucket which nobody waits for. So all ranks choose
    the same bits, bucket by bucket of the backward pass, before it begins. Of the first step nothing is known: it has
    as many bits as the rule allows.

    Codes are unbiased, so nothing is remembered of what they are off by, and any optimizer may follow. One worker alone
    codes nothing. A gradient that is not finite on any rank is NaN on all of them, and the rule passes over the step.
    Rules spend what workers say; what they hear back is counted beside it. Traffic: $\frac{n-1}{n}$ of the codes either
    way per worker and step, $b_t/8$ and $(b_t+a)/8$ bytes an entry and a scale a block, and the squares. State:
    `ledger`, what has been spent and what came of it, and a few numbers for each bucket.

    Yan et al., DQ-SGD: Dynamic Quantization in SGD for Communication-Efficient Distributed Learning, 2021,
    arXiv:2107.14575.

    Args:
        rule: says how many bits each step is worth.
        block: entries that share a scale; fewer are coded more exactly, in more bytes.
        dither: subtract at the receiver what was added before rounding, which makes the error a third of its bound and
            the same whatever the gradient.
        correlated: let workers round the same entry at evenly spread thresholds: better where their gradients are
            nearly equal, worse where they differ by half a level.
        answer: $a$, bits that codes of the mean have more than those it is made of. The errors of these average out
            over workers, that of the mean does not: $\frac12 \log_2 n$ makes both alike.
            None sends the mean itself, in fp32, as papers do that count one direction only.
    """

    rule: FixedBits | ErrorBound | BitBudget = BitBudget()
    block: int = 2048
    dither: bool = True
    correlated: bool = False
    answer: int | None = 0

    paper = "Yan et al., DQ-SGD: Dynamic Quantization in SGD, 2021, arXiv:2107.14575"
    waits = "every step, all wait for the slowest worker and for the codes to travel, twice"
    limits = "rules plan for a given number of steps; codes of two bits are noisy, and small learning rates bear them"

    def __post_init__(self) -> None:
        """Check the kinds and the block."""
        check_kinds(self)
        if self.block < 8 or self.block % 8:
            raise ConfigError(f"block={self.block}: codes are cut at whole bytes; use a multiple of 8, such as 2048")
        if self.answer is not None and not 0 <= self.answer <= MOST - self.rule.most:
            raise ConfigError(
                f"answer={self.answer}: at least 0, and with the rule's {self.rule.most} bits at most {MOST}; let the "
                "rule have fewer, as in BitBudget(most=7), or use None for the mean itself"
            )

    @property
    def sends_gradients(self) -> bool:
        """Yes, bucket by bucket."""
        return True

    def start(self, r: Replica) -> None:
        """An empty ledger, and no parts yet."""
        r.state["ledger"] = BitLedger().written()
        r.state["now"] = torch.zeros(0, 3, dtype=torch.int64)
        r.state["known"] = torch.zeros(0, dtype=torch.float64)
        r.state["terms"] = torch.zeros(2, dtype=torch.float64)

    def on_gradient(self, r: Replica, part: slice) -> Work[Tensor]:
        """Launch the coded mean of one bucket; after the last, the sum of squares."""
        if part.stop == r.x.numel():
            self._begin(r)
        square = square_of(r.g[part], self.block).reshape(1) / r.active
        r.state["squares"] = torch.cat([r.state["squares"], square])
        bits, key = self._bits_of(r, part), draw_key(r.seed, r.step, offset=part.start)
        codec, server = self._codec(bits), Fp32() if self.answer is None else self._codec(bits + self.answer)
        mean = launched(r.comm, TwoStageMean(r.comm, r.g[part], codec, None, key, r.active, server=server))
        if part.start == 0:
            total = r.comm.all_reduce_(r.state.pop("squares"))
            r.launch("squares", total.then(lambda squares: [squares]))
        return mean

    def average_(self, r: Replica) -> None:
        """Nothing to do: all ranks hold the same vector."""

    def consensus(self, r: Replica) -> Tensor:
        """The parameters themselves."""
        return r.x

    # -- what a step may say -------------------------------------------------------------------------------------

    def _begin(self, r: Replica) -> None:
        """Settle the exchange before, whose squares are known by now, and choose the bits of this one."""
        r.state["squares"] = r.x.new_zeros(0, dtype=torch.float64)
        r.state["parts"], r.state["now"] = r.state["now"], torch.zeros(0, 3, dtype=torch.int64)
        heard, parts = r.collect("squares"), r.state["parts"].tolist()
        # Each bit more at least halves a level.
        answers = 0.0 if self.answer is None else 0.25**self.answer
        terms = _largest_rate(r), (1 if self.correlated else 1 / r.active) + answers
        if heard is not None:
            sizes, bits = [stop - start for start, stop, _ in parts], [each for _, _, each in parts]
            ledger = self._settled(r, heard[0], sizes, bits)
            known = r.state["known"].tolist()
            known = known if len(known) == len(sizes) else [inf] * len(sizes)
            chosen = self.rule.choose(ledger, Step(known, sizes, terms[0], self._share(terms[1])))
            r.state["parts"][:, 2] = torch.tensor(chosen)
        r.state["terms"] = torch.tensor(terms, dtype=torch.float64)

    def _settled(self, r: Replica, squares: Tensor, sizes: list[int], bits: list[int]) -> BitLedger:
        ledger, (lr, share) = BitLedger.read(r.state["ledger"]), r.state["terms"].tolist()
        step = Step([], sizes, lr, share)
        if squares.is_meta or not bool(squares.isfinite().all()):
            ledger = passed_over(ledger, step, bits)
        else:
            r.state["known"] = squares.cpu()
            ledger = self.rule.settle(ledger, Step(squares.tolist(), sizes, lr, self._share(share)), bits)
        said = step.mean_bits(bits)
        ledger = ledger.with_answer(_WHOLE if self.answer is None else said + self.answer)
        r.state["ledger"] = ledger.written()
        r.metrics["bits"] = said
        r.metrics["spent_bits_per_entry"] = ledger.bits
        r.metrics["answered_bits_per_entry"] = ledger.answered
        r.metrics["quantisation_error"] = ledger.error
        return ledger

    def _bits_of(self, r: Replica, part: slice) -> int:
        """What was chosen for this part; for one that was not exchanged before, what the rule says blindly."""
        place = [part.start, part.stop]
        bits = next((each for *known, each in r.state["parts"].tolist() if known == place), 0)
        if not bits:
            blind = Step([inf], [part.stop - part.start], *r.state["terms"].tolist())
            (bits,) = self.rule.choose(BitLedger.read(r.state["ledger"]), blind)
        r.state["now"] = torch.cat([r.state["now"], torch.tensor([[*place, bits]])])
        return bits

    def _codec(self, bits: int) -> Quantize:
        return Quantize(bits, self.block, self.dither, self.correlated)

    def _share(self, stages: float) -> float:
        """The mean square error of both stages together, over a quarter of a level's square."""
        return stages / 3 if self.dither else stages


def _largest_rate(r: Replica) -> float:
    return float(torch.as_tensor(r.lr).max())
