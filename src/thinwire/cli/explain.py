# SPDX-License-Identifier: Apache-2.0
"""`thinwire explain`: what a strategy sends, stores and waits for, without training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Literal

from thinwire.cli.console import out, print_json
from thinwire.cli.options import as_typed
from thinwire.cli.step_time import ModelOptions
from thinwire.errors import ConfigError
from thinwire.lab.runs.settings import OptimizerName, option_name
from thinwire.planning.units import count, nbytes, rate, seconds, times, workers

if TYPE_CHECKING:
    from torch import nn

    from thinwire.methods.strategies.base import Strategy
    from thinwire.planning.plan import BucketCost, Card
    from thinwire.planning.plan.late import LateCost
    from thinwire.planning.plan.traffic import MakeOptimizer

_MOST_NAMED_RANKS = 8


@dataclass(frozen=True)
class Explain(ModelOptions):
    """Show the bytes, the memory and the waits of a strategy, without training.

    Example: thinwire explain "LocalSGD(period=8, codec=Quantize(4))" --task text --workers 4 --link 100mbit

    The strategy is run on tensors without data, so the bytes are exactly those of a real run; where they depend on the
    data, the least and the most are shown, and where not all workers send alike, the busiest and the mean. The model is
    that of --task (text unless given), or has --parameters. The optimizer, which some strategies average too, is the
    task's, or one that the strategy needs.

    Args:
        recipe: the strategy as text, such as "LocalSGD(period=8, codec=Quantize(4))".
        optimizer: sgd, adamw or lamb; onebit-lamb, onebit-adam or zero-one-adam. That of the task, or one that the
            strategy takes, unless given.
        parameters: how many parameters the model has, such as 6.5e6, instead of a task's model.
        workers: how many workers train together.
        link: the workers' links, [RANK:]RATE[+DELAY], separated by commas, such as 100mbit; seconds are computed from
            the slowest rate, and not shown unless given.
        bucket: a bucket over which the workers train, LATENCY,UP,DOWN, such as 40ms,20mbit,50mbit; shows requests, time
            and price.
        prices: with --bucket, dollars for 1,000 writes, for 1,000 reads, and for 1 GB that is read; those of S3 unless
            given, 0.005,0.0004,0.09.
        step_seconds: with --bucket, the duration of a step without communication.
        dtype: data type of the parameters.
        late: explain rounds that close without late workers, as attach(elastic=LateMerging()) has them.
        json: print everything as JSON.
    """

    recipe: str
    _: KW_ONLY
    optimizer: OptimizerName | None = None
    parameters: float | None = None
    workers: int = 4
    link: str | None = None
    bucket: str | None = None
    prices: str | None = None
    step_seconds: float = 0.2
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    late: bool = False
    json: bool = False

    def __call__(self) -> int:
        """Print the card; returns 0.

        Raises:
            ConfigError: options that exclude each other, or a value that cannot be read.
        """
        if self.bucket is None and (self.prices is not None or self.step_seconds != Explain.step_seconds):
            raise ConfigError("--prices and --step-seconds are for --bucket. Add that, or leave them out")
        import torch

        from thinwire.elastic.late import LateMerging
        from thinwire.planning.plan import explain, parse_store

        strategy = _strategy(self.recipe)
        bits_per_second = self._bits_per_second()
        name, model, optimizer = self._model(strategy)
        card = explain(
            strategy,
            parameters=model,
            workers=self.workers,
            dtype=getattr(torch, self.dtype),
            optimizer=optimizer,
            bits_per_second=bits_per_second,
            store=None if self.bucket is None else parse_store(self.bucket, self.prices),
            step_seconds=self.step_seconds,
            late=LateMerging() if self.late else None,
        )
        if self.json:
            print_json(card)
        else:
            _print_card(card, name, as_typed(self.recipe))
        return 0

    def _model(self, strategy: Strategy) -> tuple[str, int | nn.Module, MakeOptimizer | None]:
        """Return the model in words, the number of its parameters or the model itself, and what makes the optimizer.

        The optimizer is None where the strategy needs another than the task's, or there is no task.
        """
        import torch

        from thinwire.lab.runs.optimizer import maker_of

        if self.parameters is not None:
            for name in ("task", "model_size", "own_model", "own_loss", "data"):
                if (value := getattr(self, name)) is not None:
                    both = f"--{option_name(name)} {value} with --parameters {self.parameters:g}"
                    raise ConfigError(f"{both}: no task is loaded. Give one of them")
            if self.parameters < 1 or self.parameters % 1:
                raise ConfigError(f"--parameters {self.parameters:g}: must be a whole number from 1, such as 6.5e6")
            make = None if self.optimizer is None else maker_of(self.optimizer, 0.9)
            return "a model", int(self.parameters), make
        made = self.made(optimizer=self.optimizer, meta=True)
        if self.optimizer is None:
            try:
                parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))
                strategy.check(self.workers, made.optimizer([parameter]))
            except ConfigError:
                return made.name, made.module, None
        return made.name, made.module, made.optimizer

    def _bits_per_second(self) -> float | None:
        """Return the rate of the slowest link; None without a limit."""
        if self.link is None or self.workers < 1:
            return None
        from thinwire.lab.emulate import parse_links

        rates = [each.bits_per_second for each in parse_links(self.link, self.workers)]
        return min((each for each in rates if each is not None), default=None)


def _strategy(text: str) -> Strategy:
    from thinwire.lab.runs.recipes import BASELINES, parse_strategy
    from thinwire.methods.strategies.recipe import parse

    # Nothing but a strategy is explained, so that a mistyped name is not said to be near one of torch's methods.
    name = text.partition("(")[0].strip().replace("_", "-").lower()
    if name in BASELINES:
        return parse_strategy(text, "which needs data. AllReduce() sends what ddp does")
    return parse(text)


def _print_card(card: Card, model: str, typed: str) -> None:
    from rich.text import Text

    out.print(typed, style="bold")
    out.print(f"{model}, {count(card.parameters)} parameters in {card.dtype}, {workers(card.workers)}")
    for heading, lines in _sections(card, typed):
        out.print(Text.assemble("\n", (heading, "bold")))
        for name, words in lines:
            out.print(Text.assemble((f"  {name:<12}", "dim"), words))


def _sections(card: Card, typed: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield the card in words: headings, each with its (name, words) lines."""
    alike = "the same in every step" if card.period == 1 else f"repeating after {card.period} steps"
    if not card.repeats:
        alike = f"which does not repeat; means over {card.period} steps"
    equal = card.rank == 0 and card.mean_sent_bytes_per_step == card.sent_bytes_per_step
    if card.late is None:
        yield f"{'One worker' if equal else f'Rank {card.rank}, the busiest'}: traffic, {alike}", _traffic(card)
    else:
        yield "One worker, with LateMerging: traffic of a round", _of_rounds(card.late)
    if card.bucket is not None:
        yield "Over the bucket", _over_bucket(card.bucket)
    memory = card.memory_bytes_per_parameter
    each = ", ".join(f"{name} {_number(value)}" for name, value in memory.items())
    total = nbytes(sum(memory.values()) * card.parameters)
    yield (
        "Memory",
        [
            ("each", f"{each} bytes per parameter"),
            ("together", f"{total}, besides the state of {card.optimizer} and activations"),
            (
                "peak",
                f"{nbytes(card.peak_bytes)} more than training alone: {_number(_copies(card))} times the parameters",
            ),
        ],
    )
    if card.lr_factor not in (None, 1.0):
        words = (
            f"{_number(card.lr_factor)} times the optimizer's in the long run; for the same effect give the optimizer"
        )
        yield "Learning rate", [("effective", f"{words} {_number(1 / card.lr_factor)} times what AllReduce() has")]
    for place, method in enumerate(card.methods):
        lines = {"paper": method.paper, "waits": method.waits, "limits": method.limits}
        yield method.name if place else typed, [(name, words) for name, words in lines.items() if words]


def _copies(card: Card) -> float:
    """Return the peak as a multiple of the parameters."""
    return card.peak_bytes / (card.memory_bytes_per_parameter["parameters"] * card.parameters)


def _traffic(card: Card) -> list[tuple[str, str]]:
    if not card.sent_bytes_per_step and not card.received_bytes_per_step:
        return [("sent", "nothing")]
    received = f", {nbytes(card.received_bytes_per_step)} received" * (
        card.received_bytes_per_step != card.sent_bytes_per_step
    )
    full, half = card.all_reduce_bytes_per_step, card.bf16_all_reduce_bytes_per_step
    all_reduce = f"would send {nbytes(full)} a step, with codec=Bf16() {nbytes(half)}"
    if card.sent_bytes_per_step:
        ratios = f"{times(full / card.sent_bytes_per_step)} and {times(half / card.sent_bytes_per_step)}"
        all_reduce = f"{all_reduce}: {ratios} of this"
    sent = nbytes(card.sent_bytes_per_step)
    if card.least_sent_bytes_per_step < card.sent_bytes_per_step:
        # All else is told of the most.
        sent = f"{nbytes(card.least_sent_bytes_per_step)} to {sent}, by the data,"
    lines = [
        ("sent", f"{sent} a step{received}, in {_number(card.messages_per_step)} messages"),
        *_mean_over_workers(card),
        ("to", _receivers(card)),
        ("at most", f"{nbytes(card.largest_message_bytes)} in a message, {nbytes(card.largest_step_bytes)} in a step"),
        ("AllReduce()", all_reduce),
    ]
    if card.bits_per_second is not None and card.seconds_per_step is not None:
        longest = f", {seconds(card.largest_step_seconds or 0)} in the longest" * (card.period > 1)
        transfer = f"{seconds(card.seconds_per_step)} of transfer a step{longest}"
        lines.append((rate(card.bits_per_second), f"{transfer}; transfers that overlap with computation cost no time"))
    return lines


def _of_rounds(cost: LateCost) -> list[tuple[str, str]]:
    return [
        ("sent", nbytes(cost.sent_bytes_per_round)),
        ("received", f"{nbytes(cost.received_bytes_per_round)}, if all workers are present"),
        ("closes", f"when {cost.closes}"),
        ("late work", cost.late),
        (
            "memory",
            f"besides that below, a copy of the parameters and {nbytes(cost.received_bytes_per_round)} received",
        ),
    ]


def _over_bucket(cost: BucketCost) -> list[tuple[str, str]]:
    lines = [] if cost.refusal is None else [("refused", cost.refusal)]
    requests = f"{_number(cost.puts_per_step)} writes and {_number(cost.gets_per_step)} reads a step"
    carried = f"{nbytes(cost.up_bytes_per_step)} up and {nbytes(cost.down_bytes_per_step)} down"
    longest = f"{seconds(cost.longest_seconds)} in the longest"
    exposed = f"{seconds(cost.exposed_seconds_per_step)} a step is exposed"
    day = f"{cost.requests_per_day:,.0f} requests and {nbytes(cost.bytes_per_day)} a day"
    return [
        *lines,
        ("each", f"{requests}, {carried}"),
        ("time", f"{seconds(cost.seconds_per_step)} a step, {longest}; {exposed}"),
        ("all", f"this run makes {day}, for ${cost.dollars_per_day:.2f}; waiting adds reads"),
    ]


def _mean_over_workers(card: Card) -> list[tuple[str, str]]:
    """Return what workers send on average, where not all send what this one does."""
    mean = card.mean_sent_bytes_per_step
    if mean is None or mean == card.sent_bytes_per_step:
        return []
    return [("mean", f"{nbytes(mean)} a step, over all {card.workers} workers")]


def _receivers(card: Card) -> str:
    """Return which ranks receive how many of the bytes; those of collectives go to all."""
    words = [f"everyone: {nbytes(card.collective_bytes_per_step)}"] if card.collective_bytes_per_step else []
    ranks: dict[float, list[int]] = {}
    for link in card.links:
        ranks.setdefault(link.bytes_per_step, []).append(link.dst)
    for each, named in ranks.items():
        who = f"{len(named)} others" if len(named) > _MOST_NAMED_RANKS else f"ranks {', '.join(map(str, named))}"
        words.append(f"rank {named[0]}: {nbytes(each)}" if len(named) == 1 else f"{who}: {nbytes(each)} each")
    return "; ".join(words) or "nobody"


def _number(value: float) -> str:
    return f"{value:.3g}"
