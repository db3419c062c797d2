# SPDX-License-Identifier: Apache-2.0
"""Latency, bandwidth and arithmetic are measured alike on all ranks."""

from __future__ import annotations

import pytest

from tests.pretend_gpu import as_over_nccl, pretend_gpu
from thinwire import ConfigError
from thinwire.core.comm.threads import run_threads
from thinwire.tensor2d.pace import measure_flops, measure_pace


def test_a_pace_is_measured_alike_on_all_ranks() -> None:
    first, second = run_threads(2, lambda comm: measure_pace(comm, nbytes=1 << 16, width=32))
    assert first == second
    assert min(first.bits_per_second, first.flops_per_second, measure_flops(width=32)) > 0
    assert first.seconds_per_message > 0
    with pytest.raises(ConfigError, match="at least 2 ranks"):
        run_threads(1, measure_pace)


def test_a_pace_is_measured_on_the_gpu_where_nothing_else_is_sent() -> None:
    with pretend_gpu():
        first, second = run_threads(2, lambda comm: measure_pace(as_over_nccl(comm), nbytes=1 << 16, width=32))
    assert first == second
    with pretend_gpu(), pytest.raises(AssertionError, match="tensors of the CPU"):
        run_threads(2, lambda comm: measure_pace(as_over_nccl(comm), nbytes=1 << 16, width=32, device="cpu"))
