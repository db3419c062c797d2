# SPDX-License-Identifier: Apache-2.0
"""The requests, the time and the price of a run over a bucket, from the calls that a strategy makes in a dry run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.core.validation import check_range
from thinwire.elastic.fleet import BEAT_SECONDS
from thinwire.errors import ConfigError
from thinwire.methods.strategies.base import Strategy
from thinwire.planning.plan.objects import Objects
from thinwire.planning.quantities import parse_duration, parse_rate
from thinwire.worker.compatibility import check_carried

_DAY = 86_400.0


@dataclass(frozen=True)
class Store:
    """An object store as one worker reaches it.

    Args:
        latency: seconds of one request without its bytes.
        up: bits per second to the store.
        down: bits per second from the store.
        put_price: dollars for 1,000 writes.
        get_price: dollars for 1,000 reads.
        out_price: dollars for 1 GB that is read.

    Raises:
        ConfigError: a value is out of its range.
    """

    latency: float
    up: float
    down: float
    # As of S3 Standard in us-east-1 in 2026.
    put_price: float = 0.005
    get_price: float = 0.0004
    out_price: float = 0.09

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("latency", "up", "down", "put_price", "get_price", "out_price"):
            within, fix = ("[0, inf)", "Use 0 for no price") if "price" in name else ("(0, inf)", "Measure it")
            check_range(name, getattr(self, name), within, fix)

    def seconds(self, objects: Objects) -> float:
        """Return how long a step waits for its objects: a write and a read for each stage, and the bytes."""
        return 2 * self.latency * objects.stages + 8 * (objects.up / self.up + objects.down / self.down)


def parse_store(text: str, prices: str | None = None) -> Store:
    """Read a store from `LATENCY,UP,DOWN`, and prices from `PUT,GET,OUT`.

    Args:
        text: such as "40ms,20mbit,50mbit".
        prices: dollars for 1,000 writes, 1,000 reads, and 1 GB that is read, such as "0.005,0.0004,0.09".

    Raises:
        ConfigError: one of them cannot be read.

    Example:
        >>> parse_store("40ms,20mbit,50mbit", "0,0,0.01").out_price
        0.01
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 3:
        raise ConfigError(
            f"bucket {text!r} is invalid: it must be LATENCY,UP,DOWN. Use a text such as 40ms,20mbit,50mbit"
        )
    argument = f"bucket {text!r}"
    latency = parse_duration(parts[0], argument=argument)
    up, down = (parse_rate(part, argument=argument) for part in parts[1:])
    if prices is None:
        return Store(latency, up, down)
    try:
        put, get, out = (float(part) for part in prices.split(","))
    except ValueError:
        raise ConfigError(
            f"prices {prices!r} is invalid: it must be PUT,GET,OUT in dollars. Use a text such as 0.005,0.0004,0.09"
        ) from None
    return Store(latency, up, down, put, get, out)


@dataclass(frozen=True)
class BucketCost:
    """The cost of a run over a bucket with a fixed number of workers.

    A worker that asks for an object before it is written asks again, which adds reads.

    Attributes:
        refusal: why the strategy cannot be used over this bucket; None if it can.
        puts_per_step: objects that the worker writes, mean.
        gets_per_step: objects that it reads.
        up_bytes_per_step: bytes that it writes, with headers and seals.
        down_bytes_per_step: bytes that it reads.
        seconds_per_step: time of requests and transfers, mean; strategies with a delay hide a part of it.
        longest_seconds: the same for the step with the longest time.
        exposed_seconds_per_step: the part that training waits for, mean: the steps of a delay hide the rest.
        requests_per_day: of all workers, with their heartbeats.
        bytes_per_day: that all workers read.
        dollars_per_day: of all workers.
    """

    refusal: str | None
    puts_per_step: float
    gets_per_step: float
    up_bytes_per_step: float
    down_bytes_per_step: float
    seconds_per_step: float
    longest_seconds: float
    exposed_seconds_per_step: float
    requests_per_day: float
    bytes_per_day: float
    dollars_per_day: float


def bucket_cost(
    strategy: Strategy, steps: Sequence[Objects], store: Store, workers: int, step_seconds: float
) -> BucketCost:
    """Add up the objects of a period.

    Args:
        strategy: the recipe.
        steps: the objects of each step of a period, of the worker that writes and reads most.
        store: the bucket.
        workers: number of workers.
        step_seconds: of a step without communication.

    Raises:
        ConfigError: `step_seconds` is not positive.
    """
    check_range("step_seconds", step_seconds, "(0, inf)", "Measure a step without communication")
    try:
        check_carried(strategy, 2 * store.latency)
        refusal = None
    except ConfigError as error:
        refusal = str(error)
    count = len(steps)
    puts, gets = sum(each.puts for each in steps) / count, sum(each.gets for each in steps) / count
    up, down = sum(each.up for each in steps) / count, sum(each.down for each in steps) / count
    waits = [store.seconds(each) for each in steps]
    mean = sum(waits) / count
    hidden = strategy.traits.rounds.delay * step_seconds
    exposed = sum(max(0.0, each - hidden) for each in waits) / count
    a_day = workers * _DAY / (step_seconds + exposed)
    beats = workers * _DAY / BEAT_SECONDS
    dollars = (puts * a_day + beats) / 1e3 * store.put_price + gets * a_day / 1e3 * store.get_price
    return BucketCost(
        refusal=refusal,
        puts_per_step=puts,
        gets_per_step=gets,
        up_bytes_per_step=up,
        down_bytes_per_step=down,
        seconds_per_step=mean,
        longest_seconds=max(waits),
        exposed_seconds_per_step=exposed,
        requests_per_day=(puts + gets) * a_day + beats,
        bytes_per_day=down * a_day,
        dollars_per_day=dollars + down * a_day / 1e9 * store.out_price,
    )
