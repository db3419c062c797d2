# SPDX-License-Identifier: Apache-2.0
"""Means in flight that are dropped, since their connections are closed."""

import pytest
import torch

from thinwire import PeerLostError
from thinwire.core.comm.pending import PendingMeans, Stages


def mean(value: float) -> Stages:
    yield
    yield
    yield True
    yield
    return torch.tensor(value)


def lost() -> Stages:
    raise PeerLostError("rank 1 is lost")
    yield


def test_after_a_launch_that_failed_and_a_drop_the_next_mean_begins_anew() -> None:
    pending = PendingMeans()
    pending.launch(mean(1.0))
    with pytest.raises(PeerLostError):
        pending.launch(lost())
    pending.drop()
    assert pending.launch(mean(2.0)).wait() == 2
