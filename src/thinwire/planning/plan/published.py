# SPDX-License-Identifier: Apache-2.0
"""Predict measurements of other clusters: a table of cells, the networks and models they ran on, and what is fitted.

A source is two files. `NAME.tsv` has one measurement per line, with the columns of `Cell`. `NAME.toml` has `models` and
`links` by the names that the table uses, each link with the entries of a network file, and `fits`:

    [models.ResNet-50]
    compute = "271ms"
    layers = [[161, 159000, 1.0]]   # tensors, elements of each, share of the backward pass; in forward order.
                                    # [12, [[4, 590000, 0.08], ...]] repeats a block of tensors

    [links.10GbE]
    network = {bandwidth = "10gbit", latency = "50us"}

    [[fits]]
    numbers = ["links/10GbE/network/bandwidth"]
    cell = "ResNet-50, 32, 10GbE, AR-SGD"

A fit changes numbers of the file until the prediction of one cell is what was measured. Every other cell is then
predicted by the strategy's own code on the simulated network.
"""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from math import exp, log
from pathlib import Path
from typing import Any

import torch

from thinwire.errors import ConfigError
from thinwire.methods.strategies.recipe import parse
from thinwire.planning.plan.predict import ModelTime, own_work, predict
from thinwire.planning.quantities import parse_duration, parse_rate
from thinwire.planning.simulate import Network, SimulatedComm, simulate
from thinwire.planning.simulate.network import read_network

_MEGABYTE = 1_000_000
_WHOLE = 1 << 60  # bytes of a bucket that takes all gradients
_TIMED_ELEMENTS = 1 << 21  # of a codec on the device that a link names
_FEW_WORKERS = 2  # of more, one stands for all where all do the same
_PASSES, _TRIES, _TOLERANCE = 4, 13, 2e-3
_BACKWARD = 2 / 3  # of a step's computation, unless the model says otherwise
_NEEDED = {"compute": '"250ms"', "layers": "[[24, 1000000, 1.0]]"}


@dataclass(frozen=True)
class Cell:
    """One published measurement.

    Attributes:
        model: its name in the source's `models`.
        workers: that are simulated; nodes where the GPUs of a node act as one.
        link: its name in the source's `links`.
        method: as the source calls it.
        recipe: the strategy that does the same, or `call:` and a collective call; "" where there is none.
        bucket: megabytes of gradient per message, or several with `|` between them, of which the fastest counts; "" for
            one message after the backward pass, and 0 for one message per tensor.
        steps: whose time was measured: 1 for a step.
        seconds: what was measured.
        kind: `dense`, `methods` or `hard`; "" where it is not predicted.
        note: how it was published, or why it is not predicted.
    """

    model: str
    workers: int
    link: str
    method: str
    recipe: str
    bucket: str
    steps: float
    seconds: float
    kind: str
    note: str

    @property
    def name(self) -> str:
        """Model, workers, link and method, as fits name a cell."""
        return f"{self.model}, {self.workers}, {self.link}, {self.method}"

    @property
    def group(self) -> tuple[str, int, str]:
        """The cells among which methods are compared."""
        return self.model, self.workers, self.link


@dataclass(frozen=True)
class Predicted:
    """A cell and its prediction.

    Attributes:
        cell: what was measured.
        seconds: what is predicted.
        calibrates: whether a number was fitted to it.
    """

    cell: Cell
    seconds: float
    calibrates: bool

    @property
    def error(self) -> float:
        """Predicted over published, less 1."""
        return self.seconds / self.cell.seconds - 1

    def words(self) -> str:
        """Write it as a line."""
        times = f"predicted {self.seconds:.4g} s, published {self.cell.seconds:.4g} s"
        return f"{self.error:+7.1%}  {times}  {self.cell.name}" + ", calibrates" * self.calibrates


@dataclass(frozen=True)
class Source:
    """A table of measurements, and what they ran on.

    Attributes:
        name: of the files.
        cells: the measurements.
        table: models, links and fits, as the file has them.
    """

    name: str
    cells: tuple[Cell, ...]
    table: Mapping[str, Any]

    @property
    def predictable(self) -> list[Cell]:
        """The cells that a strategy of thinwire has a prediction for."""
        return [cell for cell in self.cells if cell.kind]

    def cell(self, name: str) -> Cell:
        """Return the one cell of a name.

        Raises:
            ConfigError: the table has none, or several.
        """
        found = [cell for cell in self.cells if cell.name == name]
        if len(found) != 1:
            names = "; ".join(each.name for each in self.cells[:3])
            raise ConfigError(f"{self.name}.tsv has {len(found)} cells {name!r}. It must have one, such as {names}")
        return found[0]

    def calibrated(self) -> Source:
        """Fit the numbers that the source's `fits` name, each to its cell."""
        table, fits = deepcopy(dict(self.table)), self.table.get("fits", [])
        source = Source(self.name, self.cells, table)
        for _ in range(_PASSES if len(fits) > 1 else 1):
            were_right = [_fit(source, table, fit) for fit in fits]
            if all(were_right):
                break
        return source

    def seconds(self, cell: Cell) -> float:
        """Predict what a cell measured."""
        model, network = self._entry("models", cell.model), self.network(cell.link)
        buckets = (
            [_WHOLE] if not cell.bucket else [max(1, int(float(each) * _MEGABYTE)) for each in cell.bucket.split("|")]
        )
        steps = cell.steps * float(model.get("steps", 1))
        layers = self._of_model(cell.model, "layers")
        try:
            tensors = list(_tensors(layers))
        except (TypeError, ValueError):
            raise ConfigError(
                f"{self.name}.toml: models.{cell.model}: layers={layers!r}: must be a list of [tensors, elements of "
                f"each, share of the backward pass], such as {_NEEDED['layers']}"
            ) from None
        if cell.recipe.startswith("call:"):
            return steps * _call_seconds(cell, sum(elements for elements, _ in tensors), network)
        compute = parse_duration(
            self._of_model(cell.model, "compute"), argument=f"{self.name}.toml: models.{cell.model}: compute"
        )
        # One message after the backward pass does not depend on the order of gradients.
        shapes, ready = _layers(tensors if cell.bucket else [(sum(elements for elements, _ in tensors), 1.0)])
        backward = compute * float(model.get("backward", _BACKWARD))
        strategy, dtype = parse(cell.recipe), getattr(torch, str(model.get("dtype", "float32")), None)
        if not isinstance(dtype, torch.dtype):
            raise ConfigError(
                f"{self.name}.toml: models.{cell.model}: dtype={model['dtype']!r}: must be a dtype of torch, such as "
                '"bfloat16"'
            )
        given: dict[str, Any] = {"parameters": shapes, "workers": cell.workers, "dtype": dtype}
        if network.device:
            given["own_seconds"] = own_work(strategy, device=network.device, most_elements=_TIMED_ELEMENTS, **given)
        found = [
            predict(
                strategy,
                network=network,
                model_time=ModelTime(compute - backward, backward, ready=ready),
                bucket_bytes=bucket,
                most_workers=_FEW_WORKERS,
                **given,
            ).seconds
            for bucket in buckets
        ]
        return steps * min(found)

    def _of_model(self, name: str, key: str) -> Any:
        """Return an entry of a model that its prediction needs."""
        model = self._entry("models", name)
        if key not in model:
            raise ConfigError(f"{self.name}.toml: models.{name} has no {key}. Add {key} = {_NEEDED[key]}")
        return model[key]

    def network(self, link: str) -> Network:
        """Return the network of a link of the file."""
        return read_network(self._entry("links", link), name=f"{self.name}.toml: {link}")

    def predict(self) -> list[Predicted]:
        """Calibrate, then predict every cell that has a class."""
        source, calibrating = self.calibrated(), {fit["cell"] for fit in self.table.get("fits", [])}
        return [Predicted(cell, source.seconds(cell), cell.name in calibrating) for cell in source.predictable]

    def _entry(self, kind: str, name: str) -> Mapping[str, Any]:
        try:
            return self.table[kind][name]
        except KeyError:
            known = ", ".join(self.table.get(kind, {}))
            raise ConfigError(f"{self.name}.toml has no {kind[:-1]} {name!r}. It must be one of {known}") from None

    def numbers(self) -> dict[str, str]:
        """Return each fitted number and its value."""
        return {path: _get(self.table, path) for fit in self.table.get("fits", []) for path in fit["numbers"]}


def load_source(path: str | Path) -> Source:
    """Read `NAME.toml` and `NAME.tsv`.

    Args:
        path: of either file, or without a suffix.

    Raises:
        ConfigError: a file cannot be read, or has columns or numbers of another form.
    """
    path = Path(path)
    path = path.with_suffix("") if path.suffix in (".toml", ".tsv") else path
    try:
        table = tomllib.loads(path.with_name(f"{path.name}.toml").read_text(encoding="utf-8"))
        with path.with_name(f"{path.name}.tsv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file, delimiter="\t", strict=True))
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(f"{path}: {error}. A source is a .toml and a .tsv file of this name") from error
    columns = [each.name for each in fields(Cell)]
    for row in rows:
        if list(row) != columns or None in row.values():
            raise ConfigError(f"{path}.tsv: {row}: a line must have the columns {', '.join(columns)}")
    try:
        cells = tuple(_cell(row) for row in rows)
    except ValueError as error:
        raise ConfigError(f"{path}.tsv: {error}. workers, steps and seconds must be numbers") from error
    for fit in table.get("fits", []):
        for number in fit.get("numbers", [None]):
            try:
                _number(_get(table, number))
            except (KeyError, TypeError, AttributeError, ValueError):
                raise ConfigError(
                    f"{path}.toml: [[fits]] numbers: {number!r} is no number of the file. Name the entries that are "
                    'fitted, such as numbers = ["links/home/network/bandwidth"]'
                ) from None
        if "cell" not in fit:
            raise ConfigError(f'{path}.toml: [[fits]] has no cell. Add cell = "{cells[0].name if cells else "..."}"')
    return Source(path.name, cells, table)


def _cell(row: Mapping[str, str]) -> Cell:
    texts = {name: row[name] for name in ("model", "link", "method", "recipe", "bucket", "kind", "note")}
    steps, seconds = float(row["steps"] or 1), float(row["seconds"])
    return Cell(**texts, workers=int(row["workers"]), steps=steps, seconds=seconds)


def explain_cell(source: Source, name: str) -> str:
    """Describe one prediction: what was measured, what is predicted, and on what."""
    source = source.calibrated()
    cell = source.cell(name)
    seconds, network = source.seconds(cell), source.network(cell.link)
    lines = [
        f"{cell.name}",
        f"  published  {cell.seconds:.4g} s ({cell.note})",
        f"  predicted  {seconds:.4g} s, {seconds / cell.seconds - 1:+.1%}",
        f"  recipe     {cell.recipe}" + (f", messages of {cell.bucket} MB" if cell.bucket else ""),
        f"  network    {network.bits_per_second / 1e9:.4g} Gbit/s, {network.latency * 1e3:g} ms",
    ]
    return "\n".join([*lines, *(f"  fitted     {path} = {value}" for path, value in source.numbers().items())])


def _tensors(layers: Sequence[Any]) -> Iterator[tuple[int, float]]:
    """Yield the elements of each tensor in forward order, and its share of the backward pass."""
    for count, *entry in layers:
        for _ in range(int(count)):
            if len(entry) == 1:
                yield from _tensors(entry[0])
            else:
                yield int(entry[0]), entry[1] / count


def _layers(tensors: Sequence[tuple[int, float]]) -> tuple[list[tuple[int]], tuple[float, ...]]:
    """Shapes in forward order, and when in the backward pass each gradient is final."""
    total, passed, ready = sum(share for _, share in tensors), 0.0, list[float]()
    for _, share in reversed(tensors):
        passed += share
        ready.append(min(1.0, passed / total))
    ready[-1] = 1.0  # sums of floats
    return [(elements,) for elements, _ in tensors], tuple(reversed(ready))


def _call_seconds(cell: Cell, elements: int, network: Network) -> float:
    """Seconds of collective calls on a vector, one after the other: `call:all_to_all+all_gather`."""

    def work(comm: SimulatedComm) -> float:
        for call in cell.recipe.removeprefix("call:").split("+"):
            if call == "all_reduce":
                comm.all_reduce_(torch.empty(elements, device="meta", dtype=torch.float32)).wait()
            elif call == "broadcast":
                comm.broadcast_(torch.empty(elements, device="meta", dtype=torch.float32), 0).wait()
            elif call == "all_gather":
                comm.all_gather(torch.empty(elements // comm.size, device="meta", dtype=torch.float32)).wait()
            elif call == "all_to_all":
                part = elements // comm.size
                xs = [torch.empty(part, device="meta", dtype=torch.float32) for _ in range(comm.size)]
                comm.all_to_all(xs, [part] * comm.size).wait()
            elif call == "send":
                there, here = {0: ([1], []), 1: ([], [0])}.get(comm.rank, ([], []))
                comm.send_recv(torch.empty(elements, device="meta", dtype=torch.float32), there, here).wait()
            else:
                raise ConfigError(f"{cell.name}: {call!r} is no call. Use all_reduce, broadcast, all_gather, send")
        return comm.now

    ended = simulate(cell.workers, work, network=network, timeout=1e9)
    for failure in ended.failures.values():
        raise failure
    return max(each for each in ended.results if each is not None)


# -- fits --------------------------------------------------------------------------------------------------------------


def _fit(source: Source, table: dict[str, Any], fit: Mapping[str, Any]) -> bool:
    """Change the numbers of a fit until its cell is predicted; whether they were right already."""
    cell, paths = source.cell(fit["cell"]), list(fit["numbers"])
    text, before = _get(table, paths[0]), None
    value = _number(text)
    # A rate that is higher by a factor makes a step's communication shorter by it, and a time longer.
    slope = usual = -1.0 if "bit" in str(text) else 1.0
    error = 0.0
    for tried in range(_TRIES):
        for path in paths:
            set_number(table, path, _like(text, value))
        error = log(source.seconds(cell) / cell.seconds)
        if abs(error) <= _TOLERANCE:
            return not tried
        if before is not None:
            slope = (error - before[1]) / (log(value / before[0]) or 1.0)
        step = -error / (slope or usual)
        before, value = (value, error), value * exp(step if before is None else max(-1.5, min(1.5, step)))
    raise ConfigError(
        f"{source.name}.toml: no value of {', '.join(paths)} gives {cell.seconds:g} s for {cell.name}: the last one, "
        f"{_get(table, paths[0])}, is off by {error:+.1%}. Start nearer, or calibrate with another cell"
    )


def _get(table: Any, path: str) -> Any:
    for key in path.split("/"):
        table = table[key]
    return table


def set_number(table: Any, path: str, value: Any) -> None:
    """Change an entry of a source's file, such as `links/10GbE/network/bandwidth`."""
    *keys, last = path.split("/")
    (_get(table, "/".join(keys)) if keys else table)[last] = value


def _number(value: Any) -> float:
    """Return a rate in bits per second, a time in seconds, or a plain number."""
    if not isinstance(value, str):
        return float(value)
    return (parse_rate if "bit" in value else parse_duration)(value, argument=value)


def _like(text: Any, value: float) -> Any:
    """Return a number in the form of the file."""
    if not isinstance(text, str):
        return value
    return f"{value / 1e6:.6f}mbit" if "bit" in text else f"{value * 1e3:.6f}ms"
