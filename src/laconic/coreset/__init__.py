"""Coresets: the few points that speak for all, with their weights."""

from laconic.coreset.coreset import Coreset
from laconic.coreset.selection import select
from laconic.coreset.similarity import Distances, EuclideanDistances

__all__ = ["Coreset", "Distances", "EuclideanDistances", "select"]
