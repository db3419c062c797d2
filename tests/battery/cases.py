# SPDX-License-Identifier: Apache-2.0
"""The table of cases: one line for each registered class of the package, and some for forms of it that differ most.

A new strategy needs one line here, with its oracle; `test_complete` says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.battery import adapters as to
from tests.battery.runs import Case, case
from tests.methods.topology.graphs import GRAPHS
from tests.oracles import codecs, common, diloco
from tests.oracles import machines as m
from tests.problems import Irregular
from thinwire import (
    ADPSGD,
    DQSGD,
    EASGD,
    QSGD,
    AllReduce,
    AsyncLeaderSGD,
    BackupWorkers,
    BetweenNodes,
    Bf16,
    BitBudget,
    Budget,
    Choco,
    ChunkedTopK,
    CoCoD,
    Codec,
    CompressedMomentum,
    DecentLaM,
    DiLoCo,
    DoubleAveraging,
    EagerPushSum,
    ErrorBound,
    ErrorFeedback,
    ExactDiffusion,
    FetchSGD,
    FixedBits,
    Fp8,
    Fp16,
    Fp32,
    FromGraph,
    Gathered,
    Gossip,
    LeaderGradientDescent,
    LeaderSGD,
    Local,
    LocalSGD,
    MajorityVote,
    MinibatchLocalSGD,
    MultiLeaderSGD,
    Natural,
    Nearest,
    NodeAverage,
    NoLoCo,
    Offloaded,
    OneBit,
    OneBitAdam,
    OuterOptimizer,
    OverlapLocalSGD,
    Paced,
    ParameterServer,
    Periodic,
    PowerSGD,
    PPeerExponential,
    Probe,
    PushSum,
    Quantize,
    QuasiGlobal,
    RandomK,
    RandomMatching,
    Ring,
    Sharded,
    Sketch,
    SketchedSGD,
    SlowMo,
    Strategy,
    Streaming,
    TernGrad,
    TopK,
    Topology,
    ZeroOne,
    ZeroOneAdam,
)

PLAIN = ("momentum", "adamw")
CODED = {"exact": False}
SIGNS = ErrorFeedback(OneBit(8))
CODES = {SIGNS: to.in_signs(8), Quantize(8, 8): to.in_levels(8, 8)}

SLOW = SlowMo(period=3, lr=0.8)
OVERLAP = OverlapLocalSGD(period=3)
ELASTIC, LEADER_GRADIENT = EASGD(3, centre_pull=0.8), LeaderGradientDescent(pull=0.7)
ONE_BIT_ADAM = CompressedMomentum(OneBit(8), warmup_steps=4)
ZERO_ONE_ADAM = ZeroOne(OneBit(8), variance_steps=4, variance_doubling=4, local_doubling=2, most_local=2)
DQ = [DQSGD(rule, block=8) for rule in (FixedBits(4), BitBudget(4.5, 12), ErrorBound(3e-3, 12, smoothness=2.0))]

SLOW_ORACLE = to.machine(lambda: m.SlowMomentum(m.Machine(), 3, lr=0.8))


def with_own_momentum(strategy: Any, graph: to.Graph, rule: Callable[..., Any]) -> Case:
    """A decentralised method whose momentum is its own."""
    oracle = to.on_graph(graph, lambda mixing: m.Momentum(mixing, rule, momentum=strategy.momentum))
    return case(strategy, oracle, *PLAIN, "bf16")


STRATEGIES: list[Case] = [
    case(AllReduce(), to.machine(m.MeanGradient)),
    case(AllReduce(ErrorFeedback(OneBit(8))), to.coded_gradients(8), "adamw", **CODED),
    case(AllReduce(PowerSGD(1, 0)), to.low_rank_gradients(1), **CODED),
    case(Local(), to.machine(m.Machine)),
    case(LocalSGD(3), to.machine(lambda: m.Means(3))),
    case(MinibatchLocalSGD(3, inner=0.5), to.machine(lambda: m.TwoRates(3, inner=0.5)), *PLAIN, "decay"),
    *(
        case(
            MinibatchLocalSGD(3, inner=0.5, codec=codec),
            to.coded(partial(m.TwoRates, 3, inner=0.5), mean),
            *PLAIN,
            "decay",
            **CODED,
        )
        for codec, mean in {**CODES, PowerSGD(1, 0): to.low_rank(1, 3)}.items()
    ),
    case(CoCoD(3), to.machine(lambda: m.Decoupled(3))),
    # Of periods that are short enough for several coded means to be used.
    *(case(CoCoD(2, codec), to.coded(partial(m.Decoupled, 2), mean), **CODED) for codec, mean in CODES.items()),
    case(OVERLAP, to.machine(lambda: m.Overlap(3))),
    *(
        case(
            OverlapLocalSGD(2, delay=delay, codec=SIGNS),
            to.served_overlap(8, period=2, pull=0.6, momentum=0.7, delay=delay),
            **CODED,
        )
        for delay in (None, 1)
    ),
    case(
        OverlapLocalSGD(2, delay=1, codec=Quantize(8, 8)),
        to.coded(partial(m.Overlap, 2, delay=1), CODES[Quantize(8, 8)]),
        **CODED,
    ),
    case(
        OverlapLocalSGD(2, codec=PowerSGD(1, 0)),
        to.coded(partial(m.Overlap, 2), to.low_rank(1, 2), tracked=True),
        **CODED,
    ),
    case(ELASTIC, to.machine(lambda: m.Elastic(3, centre_pull=0.8))),
    *(
        case(
            EASGD(3, centre_pull=0.8, codec=codec),
            to.coded(partial(m.Elastic, 3, centre_pull=0.8), mean, tracked=codec == SIGNS),
            **CODED,
        )
        for codec, mean in CODES.items()
    ),
    case(SLOW, SLOW_ORACLE),
    case(SlowMo(Gossip(), period=3), to.on_graph(common.ring, lambda w: m.SlowMomentum(m.Mixed(w), 3, lr=1.0))),
    case(
        SlowMo(PushSum(Irregular()), period=3),
        to.on_graph(common.irregular, lambda w: m.SlowMomentum(m.Pushed(w), 3, lr=1.0)),
    ),
    case(
        DiLoCo(period=3, outer=OuterOptimizer("SGD", lr=0.7, momentum=0.6, nesterov=True)),
        to.stacked(diloco.streaming_diloco, period=3, outer=diloco.descent(0.7, 0.6, nesterov=True)),
    ),
    case(
        DiLoCo(period=3, outer=OuterOptimizer("SGD", lr=0.7, momentum=0.6), fragments=2, delay=1, mixing=0.4),
        to.stacked(
            diloco.streaming_diloco,
            period=3,
            outer=diloco.descent(0.7, 0.6),
            edges=(0, 17, 34),
            delay=1,
            mixing=0.4,
        ),
    ),
    *(
        case(
            DiLoCo(period=2, outer=OuterOptimizer("SGD", lr=0.7, momentum=0.6), codec=codec, delay=1, mixing=0.4),
            to.stacked(
                diloco.streaming_diloco,
                period=2,
                outer=diloco.descent(0.7, 0.6),
                delay=1,
                mixing=0.4,
                mean=mean,
                feedback=codec == SIGNS,
            ),
            **CODED,
        )
        for codec, mean in CODES.items()
    ),
    case(Sharded(SLOW), SLOW_ORACLE),
    case(Offloaded(SLOW), SLOW_ORACLE),
    case(NodeAverage(LocalSGD(4), period=2), to.machine(lambda: m.Means(2)), 1, 3, 5),
    case(Streaming(OVERLAP, fragments=2), to.machine(lambda: m.Fragments(lambda ahead: m.Overlap(3, ahead), 3, 2))),
    case(Paced(LocalSGD(3), steps=(3,)), to.machine(lambda: m.Means(3))),
    # Enough for eight bits.
    case(
        Budget(LocalSGD(3, codec=ErrorFeedback(Nearest(4, 8))), "1MB/step"),
        to.coded(partial(m.Means, 3), to.in_nearest(8, 8)),
        **CODED,
    ),
    # Enough for every column, so that means are exact.
    case(Budget(AllReduce(PowerSGD(1, 0)), "1MB/step"), to.machine(m.MeanGradient), **CODED),
    case(Probe(every=2), to.machine(m.MeanGradient)),
    case(Gossip(), to.on_graph(common.ring, m.Mixed)),
    case(Gossip(order="after"), to.on_graph(common.ring, lambda w: m.Mixed(w, after=True))),
    with_own_momentum(DecentLaM(momentum=0.5), common.ring, m.decentlam),
    with_own_momentum(QuasiGlobal(momentum=0.5), common.one_peer, m.quasi_global),
    with_own_momentum(DoubleAveraging(momentum=0.5), common.ring, m.double_averaging),
    case(ExactDiffusion(momentum=0.5), to.on_graph(common.ring, lambda w: m.ExactDiffusion(w, 0.5)), *PLAIN, "bf16"),
    case(
        NoLoCo(period=2),
        to.on_graph(to.matching(RandomMatching()), lambda w: m.Pairs(w, 2, lr=0.7, momentum=0.5)),
    ),
    case(
        NoLoCo(Ring(), 3, lr=0.6, momentum=0.4, pull=0.9),
        to.on_graph(common.ring, lambda w: m.Pairs(w, 3, lr=0.6, momentum=0.4, pull=0.9)),
    ),
    case(
        Choco(codec=OneBit(8)),
        to.on_graph(common.ring, lambda w: m.PublicCopies(w, 0.3, codecs.signs(8))),
        **CODED,
    ),
    case(ADPSGD(), to.pairs(ADPSGD()), 1, 3, 5, real=to.pairs_in_order(ADPSGD()), reproducible=False),
    case(PushSum(), to.on_graph(common.one_peer, m.Pushed)),
    case(PushSum(Irregular()), to.on_graph(common.irregular, m.Pushed)),
    case(PushSum(staleness=2), to.on_graph(common.one_peer, lambda w: m.Pushed(w, staleness=2))),
    case(
        Gossip(Periodic(), "after"), to.on_graph(common.periodic(common.one_peer, 4), lambda w: m.Mixed(w, after=True))
    ),
    case(Gossip(Periodic(Ring(), 3)), to.on_graph(common.periodic(common.ring, 3), m.Mixed)),
    # The other methods that take a period.
    with_own_momentum(DecentLaM(Periodic(Ring(), 3), momentum=0.3), common.periodic(common.ring, 3), m.decentlam),
    with_own_momentum(QuasiGlobal(Periodic(Ring(), 3), momentum=0.5), common.periodic(common.ring, 3), m.quasi_global),
    with_own_momentum(
        DoubleAveraging(Periodic(Ring(), 2), momentum=0.5), common.periodic(common.ring, 2), m.double_averaging
    ),
    # Overlap SGP, Algorithm 2: sent every third step, and received before the next.
    case(
        PushSum(Periodic(every=3), staleness=2),
        to.on_graph(common.periodic(common.one_peer, 3), lambda w: m.Pushed(w, staleness=2)),
    ),
    case(EagerPushSum(staleness=0), to.on_graph(common.one_peer, m.Pushed)),
    case(EagerPushSum(Periodic(every=3), staleness=0), to.on_graph(common.periodic(common.one_peer, 3), m.Pushed)),
    case(LeaderSGD(3, pull=0.3), to.machine(lambda: m.Leader(3))),
    case(
        MultiLeaderSGD(2, pull=0.3, node_size=2, global_period=4, global_pull=0.2),
        to.machine(lambda: m.Leader(2, node_size=2, global_period=4, global_pull=0.2)),
        *(1, 3, 5),
    ),
    case(AsyncLeaderSGD(3, pull=0.3), to.machine(lambda: m.Leader(3)), lockstep=True),
    case(LEADER_GRADIENT, to.machine(lambda: m.LeaderGradient(0.7))),
    *(case(strategy, to.quantized(strategy), **CODED) for strategy in DQ),
    case(
        SketchedSGD(0.2, columns=2, rows=3, recovery="sketch", dense_below=0),
        to.sketched_sgd(7, columns=2, rows=3, momentum=0.9, second_round=4),
        *PLAIN,
        **CODED,
    ),
    case(FetchSGD(0.2, 2), to.fetch_sgd(7, columns=2, rows=5, momentum=0.9), *PLAIN, **CODED),
    case(
        ONE_BIT_ADAM,
        to.one_bit_adam(8, warmup=4),
        *PLAIN,
        optimizer=OneBitAdam,
        rate=0.02,
        **CODED,
    ),
    case(
        ZERO_ONE_ADAM,
        to.zero_one_adam(8, averages={0, 1, 2, 3}, agrees={4, 5, 7}),
        *PLAIN,
        optimizer=ZeroOneAdam,
        rate=0.02,
        **CODED,
    ),
    case(BackupWorkers(), to.backup_workers, 1, reproducible=False),
    case(ParameterServer(), to.server, 1, real=to.server_in_order(ParameterServer()), reproducible=False),
]


def is_first(each: Case) -> bool:
    """Whether a case is the first of its class; others are forms of it."""
    return next(other for other in STRATEGIES if type(other.strategy) is type(each.strategy)) is each


def is_of_a_family(each: Case) -> bool:
    """Whether a case stands for its family, where a question of all pairs would take too long."""
    kinds = (AllReduce, CompressedMomentum, LocalSGD, OverlapLocalSGD, SlowMo, Gossip, PushSum, LeaderSGD)
    return is_first(each) and isinstance(each.strategy, kinds)


def with_outer_step(base: Strategy) -> Strategy:
    return base if isinstance(base, SlowMo | DiLoCo) else SlowMo(base, period=3)


def with_bits(base: Strategy) -> Strategy:
    plain = isinstance(base, LocalSGD) and base.codec is None
    return LocalSGD(3, codec=ErrorFeedback(Nearest(8, 8))) if plain else base


WRAPPERS: dict[type, Callable[[Any], Strategy]] = {
    SlowMo: lambda base: SlowMo(base, period=3),
    DiLoCo: lambda base: DiLoCo(base, period=3),
    Sharded: lambda base: Sharded(with_outer_step(base)),
    Offloaded: lambda base: Offloaded(with_outer_step(base)),
    NodeAverage: lambda base: NodeAverage(base, period=1, node_size=1),
    Streaming: lambda base: Streaming(base, fragments=2),
    Paced: lambda base: Paced(base, steps=(3,)),
    Budget: lambda base: Budget(with_bits(base), "1MB/step"),
    Probe: lambda base: Probe(base, every=2),
}
"""Every wrapper around a base."""


@dataclass(frozen=True)
class CodecCase:
    """A codec, and what is to be known of it.

    Attributes:
        codec: with blocks of 16 elements.
        nbytes: of the payload of n elements.
        error: an upper bound of $E|x - C(x)|^2 / |x|^2$ for vectors of 320 elements.
        unbiased: the mean of decoded vectors is the vector.
    """

    codec: Codec
    nbytes: Callable[[int], int]
    error: float
    unbiased: bool = False

    def __str__(self) -> str:
        return str(self.codec)


def blocks(n: int) -> int:
    """Blocks of 16."""
    return -(-n // 16)


def bits(n: int) -> int:
    """Bytes of one bit for each element."""
    return -(-n // 8)


def indices(n: int, k: int) -> int:
    """Bytes of k indices below n, in as few bits as any of them takes."""
    return bits(k * max(n - 1, 0).bit_length())


def records(n: int, width: int, kept: int = 2) -> int:
    """Bytes of the largest of each 16, of which a shorter chunk has a share: a scale, places of 4 bits, and values."""
    shares = [-(-kept * min(16, n - begin) // 16) for begin in range(0, n, 16)]
    return sum(4 + bits(4 * k) + bits(width * k) for k in shares)


ONE_BIT = CodecCase(OneBit(16), lambda n: bits(n) + 4 * blocks(n), 1.0)
CODECS: list[CodecCase] = [
    CodecCase(Fp32(), lambda n: 4 * n, 0.0),
    CodecCase(Bf16(), lambda n: 2 * n, 2.0**-16),
    CodecCase(Fp16(), lambda n: 2 * n, 2.0**-20),
    CodecCase(Fp8(block=16), lambda n: n + 4 * blocks(n), 2.0**-8),
    CodecCase(Fp8("e5m2", 16), lambda n: n + 4 * blocks(n), 2.0**-6),
    ONE_BIT,
    CodecCase(OneBit(16, norm="l2"), lambda n: bits(n) + 4 * blocks(n), 2.0),
    CodecCase(OneBit(whole=True), lambda n: bits(n) + 4 * (n > 0), 1.0),
    CodecCase(Quantize(1, 16), lambda n: bits(n) + 4 * blocks(n), 16.0, unbiased=True),
    CodecCase(Quantize(2, 16), lambda n: 2 * bits(n) + 4 * blocks(n), 16.0, unbiased=True),
    CodecCase(Quantize(4, 16), lambda n: 4 * bits(n) + 4 * blocks(n), 16 / 49, unbiased=True),
    CodecCase(Quantize(3, 16, dither=True), lambda n: 3 * bits(n) + 4 * blocks(n), 16 / 9 / 12, unbiased=True),
    CodecCase(Quantize(8, 16, correlated=True), lambda n: 8 * bits(n) + 4 * blocks(n), 16 / 127**2, unbiased=True),
    CodecCase(QSGD(4, 16), lambda n: 4 * bits(n) + 4 * blocks(n), min(16 / 49, 4 / 7), unbiased=True),
    CodecCase(TernGrad(16, clip=None), lambda n: 2 * bits(n) + 4 * blocks(n), 3.0, unbiased=True),
    CodecCase(Natural(), lambda n: n + bits(n), 1 / 8, unbiased=True),
    CodecCase(MajorityVote(), bits, float("inf")),
    CodecCase(TopK(0.1), lambda n: 4 * -(-n // 10) + indices(n, -(-n // 10)), 0.9),
    CodecCase(RandomK(0.25), lambda n: 4 * -(-n // 4), 3.0, unbiased=True),
    CodecCase(RandomK(0.25, unbiased=False), lambda n: 4 * -(-n // 4), 0.75),
    CodecCase(Sketch(3, 64, 2), lambda n: 4 * min(n, 192), float("inf")),
    CodecCase(Nearest(1, 16), ONE_BIT.nbytes, 1.0),
    CodecCase(Nearest(2, 16), lambda n: 2 * bits(n) + 4 * blocks(n), 1.0),
    CodecCase(Nearest(4, 16), lambda n: 4 * bits(n) + 4 * blocks(n), 1.0),
    CodecCase(Nearest(8, 16), lambda n: 8 * bits(n) + 4 * blocks(n), 2.0**-12),
    CodecCase(ChunkedTopK(2, 16), lambda n: records(n, 2), 1.0),
    CodecCase(ChunkedTopK(5, 16, bits=4), lambda n: records(n, 4, 5), 1.0),
    CodecCase(Gathered(Quantize(8, 16)), lambda n: 8 * bits(n) + 4 * blocks(n), 16 / 127**2, unbiased=True),
    CodecCase(ErrorFeedback(Gathered(ChunkedTopK(2, 16)), decay=0.9), lambda n: records(n, 2), 1.0),
    CodecCase(BetweenNodes(Quantize(8, 16)), lambda n: 8 * bits(n) + 4 * blocks(n), 16 / 127**2, unbiased=True),
    CodecCase(PowerSGD(), lambda n: 4 * n, 0.0),  # of vectors without shapes
    CodecCase(ErrorFeedback(OneBit(16)), ONE_BIT.nbytes, ONE_BIT.error),
]
"""Every codec."""

TOPOLOGIES: list[Topology] = [
    *GRAPHS,
    *(Periodic(), Periodic(PPeerExponential(), 3), Periodic(RandomMatching(draws=4), 2)),
    FromGraph(edges=((0, 1), (1, 2), (1, 3), (3, 4))),
    FromGraph(((0, 1), (1, 2), (2, 0)), directed=True, weights="push-sum"),
]
"""Every topology."""

FAULTS: dict[tuple[str, Strategy | Codec], str] = {}
"""What is known to be wrong, by question and recipe; who mends it takes it out of this table."""
