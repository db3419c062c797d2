"""`thinwire explain`: what a recipe will send, keep and wait for, before any run."""

from __future__ import annotations

import json as json_text
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import Positional

from thinwire.cli.console import out
from thinwire.errors import ConfigError
from thinwire.report.units import count, nbytes, rate, seconds, times

if TYPE_CHECKING:
    from thinwire.plan import Card
    from thinwire.strategies import Strategy

_NAMED_LINKS = 8


@dataclass(frozen=True)
class Explain:
    """Say what a recipe will send, keep and wait for, before any run; or what each mesh will, that cuts a model.

    Example: thinwire explain "SlowMo(base=PushSum(), period=48)" --task text --workers 4 --link 100mbit

    The recipe itself is run, on tensors without data, so that the bytes are exactly those of a real run.

    Args:
        recipe: such as "SlowMo(base=PushSum(), period=48)".
        tensor_parallel: instead of a recipe, so many ranks: shows every mesh of rows and columns over which they can
            cut a language model, and names the best for --link RATE+DELAY.
        batch_size: with --tensor-parallel, samples of the whole batch.
        task: whose model is trained: text (unless given), digits, mnist, cifar10, shakespeare, wikitext2, agnews,
            multi30k or a9a.
        model_size: a named size of the task's model.
        parameters: how many the model has, such as 6.5e6, instead of a task.
        workers: how many.
        link: the workers' links, [RANK:]RATE[+DELAY], several by commas, such as 100mbit; the slowest rate counts.
        dtype: of the parameters.
        data: the folder of data files; THINWIRE_DATA unless given.
        json: print everything as JSON.
    """

    recipe: Positional[str | None] = None
    tensor_parallel: int | None = None
    batch_size: int = 16
    task: str | None = None
    model_size: str | None = None
    parameters: float | None = None
    workers: int = 4
    link: str | None = None
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    data: Path | None = None
    json: bool = False

    def __call__(self) -> int:
        """Explain; returns 0."""
        import torch

        from thinwire.plan import explain

        if self.tensor_parallel is not None:
            return self._explain_meshes(self.tensor_parallel)
        if self.recipe is None:
            raise ConfigError('RECIPE is missing; name one, such as "SlowMo(period=48)", or give --tensor-parallel 4')
        strategy = _strategy(self.recipe)
        bits_per_second = self._bits_per_second()
        model, sizes = self._model()
        dtype: torch.dtype = getattr(torch, self.dtype)
        card = explain(strategy, parameters=sizes, workers=self.workers, dtype=dtype, bits_per_second=bits_per_second)
        if self.json:
            out.print(json_text.dumps(asdict(card)), markup=False)
        else:
            _show(card, model)
        return 0

    def _explain_meshes(self, ranks: int) -> int:
        from thinwire.cli.meshes import explain_meshes

        if self.recipe is not None or self.parameters is not None:
            raise ConfigError(
                "--tensor-parallel: shows meshes for a task's model; leave out the recipe and --parameters"
            )
        explain_meshes(
            ranks,
            task=self.task,
            size=self.model_size,
            batch_size=self.batch_size,
            link=self.link,
            data=self.data,
            json=self.json,
        )
        return 0

    def _model(self) -> tuple[str, int | list[int]]:
        """The model in words, and the elements of its parameter tensors."""
        if self.parameters is None:
            return self._task_model()
        if self.task is not None or self.model_size is not None:
            raise ConfigError(f"--parameters {self.parameters:g}: instead of --task and --model-size; give one of them")
        if self.parameters < 1 or self.parameters % 1:
            raise ConfigError(f"--parameters {self.parameters:g}: must be a whole number from 1, such as 6.5e6")
        return "a model", int(self.parameters)

    def _task_model(self) -> tuple[str, list[int]]:
        import torch

        from thinwire import tasks

        task = tasks.load(self.task or "text", data=self.data)
        size = self.model_size or task.default_size
        with torch.device("meta"):
            model = task.model(size, seed=0)
        return f"{task.name} ({size})", [p.numel() for p in model.parameters() if p.requires_grad]

    def _bits_per_second(self) -> float | None:
        """The slowest of the links; None without a limit."""
        from thinwire.emulate import parse_links

        if self.link is None or self.workers < 1:
            return None
        rates = [link.bits_per_second for link in parse_links(self.link, self.workers)]
        return min((rate for rate in rates if rate is not None), default=None)


def _strategy(text: str) -> Strategy:
    from thinwire.runs.recipes import parse_recipe
    from thinwire.strategies import Strategy

    recipe = parse_recipe(text)
    if not isinstance(recipe, Strategy):
        raise ConfigError(
            f"{text}: is torch's own, which cannot be run without data; AllReduce() sends what ddp does, "
            f'and thinwire compare --strategies "{text}; AllReduce()" measures both'
        )
    return recipe


def _show(card: Card, model: str) -> None:
    from rich.text import Text

    out.print(card.recipe, style="bold", markup=False)
    out.print(f"{model}, {count(card.parameters)} parameters in {card.dtype}, {card.workers} workers", markup=False)
    for heading, lines in _sections(card):
        out.print(Text.assemble("\n", (heading, "bold")))
        for name, words in lines:
            out.print(Text.assemble((f"  {name:<12}", "dim"), words))


def _sections(card: Card) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The card in words: headings, each with its lines."""
    alike = "the same in every step" if card.period == 1 else f"repeating after {card.period} steps"
    yield f"{'One worker' if card.rank == 0 else f'Rank {card.rank}, the busiest'}: traffic, {alike}", _traffic(card)
    yield "Memory", _memory(card)
    for method in card.methods:
        lines = {"paper": method.paper, "waits": method.waits, "limits": method.limits}
        yield method.name, [(name, words) for name, words in lines.items() if words]


def _traffic(card: Card) -> list[tuple[str, str]]:
    if not card.sent_bytes_per_step and not card.received_bytes_per_step:
        return [("sent", "nothing")]
    received = f", {nbytes(card.received_bytes_per_step)} received" * (
        card.received_bytes_per_step != card.sent_bytes_per_step
    )
    lines = [
        ("sent", f"{nbytes(card.sent_bytes_per_step)} a step{received}, in {_number(card.messages_per_step)} messages"),
        ("to", _receivers(card)),
        ("at most", f"{nbytes(card.largest_message_bytes)} in a message, {nbytes(card.largest_step_bytes)} in a step"),
        ("AllReduce()", _yardstick(card)),
    ]
    if card.bits_per_second is not None and card.seconds_per_step is not None:
        longest = f", {seconds(card.largest_step_seconds or 0)} in the longest" * (card.period > 1)
        transfer = f"{seconds(card.seconds_per_step)} of transfer a step{longest}"
        lines.append((rate(card.bits_per_second), f"{transfer}; what overlaps with computation is not waited for"))
    return lines


def _receivers(card: Card) -> str:
    """Who gets how much of it."""
    words = [f"everyone: {nbytes(card.collective_bytes_per_step)}"] if card.collective_bytes_per_step else []
    ranks: dict[float, list[int]] = {}
    for link in card.links:
        ranks.setdefault(link.bytes_per_step, []).append(link.dst)
    for each, named in ranks.items():
        who = f"{len(named)} others" if len(named) > _NAMED_LINKS else f"ranks {', '.join(map(str, named))}"
        words.append(f"rank {named[0]}: {nbytes(each)}" if len(named) == 1 else f"{who}: {nbytes(each)} each")
    return "; ".join(words) or "nobody"


def _yardstick(card: Card) -> str:
    """What AllReduce would send, in full and in bf16, and how that compares."""
    full, half = card.all_reduce_bytes_per_step, card.bf16_all_reduce_bytes_per_step
    words = f"would send {nbytes(full)} a step, with codec=Bf16() {nbytes(half)}"
    if not card.sent_bytes_per_step:
        return words
    return f"{words}: {times(full / card.sent_bytes_per_step)} and {times(half / card.sent_bytes_per_step)} of this"


def _memory(card: Card) -> list[tuple[str, str]]:
    kept = card.memory_bytes_per_parameter
    return [
        ("each", ", ".join(f"{name} {_number(each)}" for name, each in kept.items()) + " bytes per parameter"),
        ("together", f"{nbytes(sum(kept.values()) * card.parameters)}, besides the optimizer's state and activations"),
    ]


def _number(value: float) -> str:
    return f"{value:.3g}"
