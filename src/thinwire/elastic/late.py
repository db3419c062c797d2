# SPDX-License-Identifier: Apache-2.0
"""The options of elastic runs whose rounds close without late workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch.optim import Optimizer

from thinwire.elastic.closing import CloseRule, Closing, LateRule
from thinwire.errors import ConfigError
from thinwire.methods.codecs.base import Codec, MatrixCodec, check_differences
from thinwire.methods.strategies.base import Strategy, codecs_of, nested
from thinwire.worker.annexes import ElasticOptions


@dataclass(frozen=True)
class LateMerging(CloseRule, ElasticOptions):
    r"""Close rounds without late workers, and add their work to a later round.

    Give it to `attach(..., elastic=LateMerging())` with `DiLoCo`, `SlowMo` or `LocalSGD` over local steps. With
    $\theta_k$ the parameters at the start of round $k$, a worker that has started in round $s$ sends
    $\delta = x - \theta_s$ and its tokens $m$. Round $k$ takes a set $S$ of contributions and continues from

    $$\theta_k + \frac{\sum_{i \in S} w_i \delta_i}{\sum_{i \in S} w_i}, \qquad w_i = m_i \, (1 + k - s_i)^{-1/2},$$

    on which the strategy takes its outer step. A worker that is in time waits for the closing of its round. A late one
    sends its contribution, takes the closings that it has missed, and continues in the newest round. Workers wait for
    each other only as long as the closing rule says. All messages are objects that any worker can read later.

    With `fragments`, as in `DiLoCo(fragments=4)` or `Streaming(SlowMo(), fragments=4)`, each fragment has rounds of its
    own, which close one after the other; ages are in rounds of the same fragment.

    `worker.step` counts the group's steps, as under `Paced`: loop while it is below a number. Evaluate at the end of a
    round. Each worker saves alone, at any step; `load` on all workers, directly after `attach`, continues from the
    newest round that any of them has saved. `worker.elastic.closings` lists the rounds that this worker has applied.

    The discount is that of Xie, Koyejo and Gupta, Asynchronous Federated Optimization, 2019, arXiv:1903.03934,
    Section 5.2. Rounds with a quorum and a grace window, and radial-directional merging: Douillard et al., Decoupled
    DiLoCo, 2026, arXiv:2604.21428.

    Args:
        quorum: see `CloseRule`.
        tokens: see `CloseRule`.
        deviations: see `CloseRule`.
        late: "discounted" as above; "full" weights late work by its tokens alone; "off" drops it.
        codec: compresses contributions; biased ones with `ErrorFeedback`. The error of a message is added to the
            worker's next one, in whichever round that counts.
        delay: the steps before the end of a round at which the contribution is sent. The worker takes them while the
            others' arrive, so that it waits less.
        carry: how these steps are kept: "off" drops them; "full" adds them to the new parameters; "adaptive" adds them
            times their cosine with the change of the common parameters, at least 0.
        merge: "mean" as above; "radial" takes of each tensor but embeddings the mean of the norms $\|\delta_i\|$, along
            the mean of the directions $\delta_i / \|\delta_i\|$, both with the weights $w_i$. Contributions are nearly
            orthogonal, so that their mean is shorter than each; this merge is as long as they are.
        replay: the log of a run with workers that were all present from the start; it is repeated bit by bit.

    Raises:
        ConfigError: a value is out of its range, or values do not fit together.

    Example:
        >>> import torch, thinwire
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> late = thinwire.LateMerging(quorum=0.5)
        >>> worker = thinwire.attach(model, optimizer, "LocalSGD(period=2)", rendezvous="memory://late", elastic=late)
        >>> while worker.step < 4:
        ...     model(torch.ones(1, 1)).sum().backward()
        ...     optimizer.step()
        >>> worker.elastic.closings[1].contributions
        (Contribution(started=1, worker='0', tokens=2.0),)
        >>> worker.detach()
    """

    late: LateRule = "discounted"
    codec: Codec | None = None
    delay: int = 0
    carry: Literal["off", "full", "adaptive"] = "off"
    merge: Literal["mean", "radial"] = "mean"
    replay: tuple[Closing, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if self.delay < 0 or (self.carry != "off" and self.delay == 0):
            raise ConfigError(
                f"delay={self.delay} with carry={self.carry!r}: it must not be negative, and only steps of a delay can "
                "be carried. Use a delay of at least 1, or carry='off'"
            )
        if self.codec is not None and (isinstance(self.codec, MatrixCodec) or self.codec.traits.own_mean):
            raise ConfigError(
                f"codec={self.codec}: it needs calls that all workers make together. Use a codec of single messages, "
                "such as ErrorFeedback(Nearest(4)), without Gathered"
            )
        check_differences(self.codec)
        if [each.round for each in self.replay] != list(range(len(self.replay))):
            raise ConfigError(
                f"replay has rounds {[each.round for each in self.replay][:20]}: they must be 0, 1, 2 and so on. Pass "
                "all closings of a worker that was present from the start"
            )

    def check(self, strategy: Strategy, optimizer: Optimizer, *, init: str, global_batch: int | None) -> None:
        """Check that a strategy has rounds of local steps, each with one plain mean of the parameters."""
        traits = strategy.traits
        rounds, period = traits.rounds, traits.period or 0
        ends = [step for step in range(1, period + 1) if traits.averages_at(step)]
        whole = ends == [period] or (rounds.fragments > 1 and not rounds.ends)
        plain = rounds.local and whole and not traits.skips_steps and rounds.optimizer_state == "maintain"
        coded = any(True for each in nested(strategy) for _ in codecs_of(each))
        weighted = any(each.traits.rounds.weight for each in nested(strategy))
        if not plain or weighted or coded or rounds.guarded:
            raise ConfigError(
                f"{strategy} with elastic={self}: rounds that close without late workers need local steps and one "
                "plain mean of the parameters after each period, to which all workers return. Use DiLoCo(period=100), "
                "SlowMo or LocalSGD without codec, delay, mixing, weights, outliers and moments. LateMerging has its "
                "own codec and delay, and weights work by tokens"
            )
        if self.delay >= period // rounds.fragments:
            many = f" and fragments={rounds.fragments}" * (rounds.fragments > 1)
            raise ConfigError(
                f"delay={self.delay} with period={period}{many}: must be less than the "
                f"{period // rounds.fragments} steps between two rounds. Use 0 for none"
            )
        if init != "broadcast" or global_batch is not None:
            raise ConfigError(
                f"init={init!r}, global_batch={global_batch} with elastic={self}: all workers start from the first "
                "one's parameters, and take steps at different times. Leave both out"
            )
