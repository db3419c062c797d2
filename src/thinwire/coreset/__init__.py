# SPDX-License-Identifier: Apache-2.0
"""Coresets: small weighted subsets that represent all points of a data set."""

from thinwire.coreset.craig import Craig
from thinwire.coreset.policy import Points
from thinwire.coreset.proxies import reader
from thinwire.coreset.sampler import CraigSampler, Weighted, weighted_mean
from thinwire.coreset.schedule import Selector
from thinwire.coreset.selection import select
from thinwire.coreset.similarity import Distances, EuclideanDistances
from thinwire.coreset.subset import Coreset

__all__ = [
    "Coreset",
    "Craig",
    "CraigSampler",
    "Distances",
    "EuclideanDistances",
    "Points",
    "Selector",
    "Weighted",
    "reader",
    "select",
    "weighted_mean",
]
