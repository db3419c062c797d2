# SPDX-License-Identifier: Apache-2.0
"""The costs of a recipe, computed before any run."""

from thinwire.planning.plan.bucket import BucketCost, Store, parse_store
from thinwire.planning.plan.card import Card, Link, Method, explain
from thinwire.planning.plan.over_bucket import BucketOption, plan_bucket

__all__ = ["BucketCost", "BucketOption", "Card", "Link", "Method", "Store", "explain", "parse_store", "plan_bucket"]
