"""Coresets: the few points that speak for all, with their weights."""

from laconic.coreset.coreset import Coreset
from laconic.coreset.craig import Craig
from laconic.coreset.policy import Points
from laconic.coreset.proxies import reader
from laconic.coreset.sampler import CraigSampler, Weighted, weighted_mean
from laconic.coreset.schedule import Selector
from laconic.coreset.selection import select
from laconic.coreset.similarity import Distances, EuclideanDistances

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
