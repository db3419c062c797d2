# SPDX-License-Identifier: Apache-2.0
"""Strategies on real processes, which do bit for bit what threads do."""

from __future__ import annotations

import torch

from tests.battery.cases import STRATEGIES, is_first
from tests.battery.runs import Setting, case, ended, together, with_
from tests.pool import run_processes
from thinwire import CompressedMomentum, OneBit, OneBitAdam, parse

FIRST = [each for each in STRATEGIES if is_first(each) and each.reproducible and 2 not in each.refuses]
# Those that send in another way than the first case of their class.
FORMS = (
    *("AllReduce(PowerSGD(1, 0))", "AllReduce(Gathered(Quantize(8)))", "AllReduce(ErrorFeedback(Sketch(1, 32, 1)))"),
    *("AllReduce(ErrorFeedback(RandomK(0.3, unbiased=False)))", "AllReduce(MajorityVote())"),
    "LocalSGD(2, codec=ErrorFeedback(Gathered(ChunkedTopK(4, 16)), decay=0.9))",
    *("LocalSGD(4, weights='samples')", "SlowMo(period=3, buffers='average')", "EASGD(3, momentum=0.5)"),
    *("DiLoCo(period=4, fragments=2, delay=1, mixing=0.4)", "DQSGD(FixedBits(4), block=8, answer=None)"),
    *("PushSum(staleness=2)", "MultiLeaderSGD(2, pull=0.3, node_size=1, global_period=4, global_pull=0.2)"),
)
OVERLAPPED = case(
    CompressedMomentum(OneBit(8), warmup_steps=4, overlap=True), lambda s: s.start, optimizer=OneBitAdam, exact=False
)


def settings() -> list[Setting]:
    """The first case of each class, and the forms."""
    cases = [*FIRST, OVERLAPPED, *(case(parse(recipe), lambda s: s.start, exact=False) for recipe in FORMS)]
    return [with_(each, dtype=torch.float64 if each.exact else torch.float32) for each in cases]


def on_a_process() -> list[list[float]]:
    return [ended(None, setting)[0].tolist() for setting in settings()]


def test_two_processes_do_bit_for_bit_what_threads_do() -> None:
    # On two workers Gloo adds in the order of ranks, as threads do.
    rows = run_processes(2, on_a_process)
    wrong = [
        str(setting.case)
        for place, setting in enumerate(settings())
        if [row[place] for row in rows] != together(setting).tolist()
    ]
    assert not wrong
