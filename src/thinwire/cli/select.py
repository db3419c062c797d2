"""`thinwire select`: the few points of a feature matrix that stand for all."""

from __future__ import annotations

import io
import json as json_text
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from thinwire.cli.console import err, out
from thinwire.errors import ConfigError
from thinwire.report import units
from thinwire.storage.files import write_atomically

if TYPE_CHECKING:
    from torch import Tensor

    from thinwire.coreset import Coreset
    from thinwire.coreset.quality import Quality

_RANDOM_DRAWS = 5
Fields = dict[str, Any]


@dataclass(frozen=True)
class Select:
    """Choose the few points of a feature matrix that stand for all, with their weights.

    Example: thinwire select --data features.npy --fraction 0.1

    Prints how far points are from those chosen and how wrong the weighted gradient is, beside random points. Writes
    coreset.npz and coreset.csv (index, weight, gain; in greedy order), summary.json and report.html with a picture.

    Args:
        data: the matrix, a row for each point: .npy, .npz, .parquet, .libsvm, .svm or .svmlight.
        fraction: of all points; 0.1 unless a budget or a cover is given.
        budget: how many points, instead.
        cover: as few points as bring the sum of all distances to this, instead.
        per_class: select in each class for itself, with its share of the budget.
        labels: a column of the file, by name or by number in .npy, an array of the .npz, or a .npy file of labels.
        method: lazy is exact; sparse and streaming are for millions of points.
        neighbours: of each point, for sparse; more is nearer to exact.
        parts: of greedi; more is faster and further off.
        seed: of what is drawn.
        out: the folder; runs/select-NAME-TIME unless given.
        json: print everything as JSON.
    """

    data: Path
    fraction: float | None = None
    budget: int | None = None
    cover: float | None = None
    per_class: bool = False
    labels: str | None = None
    method: Literal["lazy", "naive", "stochastic", "sparse", "streaming", "greedi"] = "lazy"
    neighbours: int = 32
    parts: int = 4
    seed: int = 0
    out: Path | None = None
    json: bool = False

    def __call__(self) -> int:
        """Select, write and show; returns 0."""
        import torch

        from thinwire.coreset import select
        from thinwire.coreset.matrices import read_matrix

        features, labels = read_matrix(self.data, self.labels)
        if self.per_class and labels is None:
            raise ConfigError(
                f"--per-class: {self.data} gives no labels; say where they are, such as --labels FILE.npy"
            )
        start = time.perf_counter()
        with _progress(f"select from {len(features):,} points") as told:
            chosen = select(
                features,
                fraction=0.1 if self.fraction is self.budget is self.cover is None else self.fraction,
                budget=self.budget,
                cover=self.cover,
                labels=labels if self.per_class else None,
                method=self.method,
                seed=self.seed,
                neighbours=self.neighbours,
                parts=self.parts,
                told=told,
            )
        seconds = time.perf_counter() - start
        rows = torch.from_numpy(features)
        summary = self._summary(rows, _codes(labels), chosen, seconds)
        folder = self.out or Path("runs") / f"select-{self.data.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        _write(folder, chosen, summary)
        report = _report(folder, rows, chosen, summary)
        if self.json:
            out.print(json_text.dumps(summary | {"folder": str(folder)}), markup=False)
        else:
            _show(summary, report)
        return 0

    def _summary(self, rows: Tensor, labels: Tensor | None, chosen: Coreset, seconds: float) -> Fields:
        from thinwire.coreset.quality import by_chance, quality

        own = quality(rows, chosen.indices, chosen.weights, labels=labels, seed=self.seed)
        classes = labels if self.per_class else None
        draws = [
            by_chance(chosen.n, len(chosen), labels=classes, like=chosen, seed=self.seed + 1 + draw)
            for draw in range(_RANDOM_DRAWS)
        ]
        others = [quality(rows, *draw, labels=labels, seed=self.seed) for draw in draws]
        return {
            "data": str(self.data),
            "points": chosen.n,
            "features": rows.shape[1],
            "chosen": len(chosen),
            "method": self.method,
            "per_class": self.per_class,
            "seconds": seconds,
            "cost": chosen.cost,
            "smallest_weight": float(chosen.weights.min()),
            "largest_weight": float(chosen.weights.max()),
            "coreset": asdict(own),
            "random": _mean(others),
            "random_draws": _RANDOM_DRAWS,
        }


@contextmanager
def _progress(label: str) -> Generator[Callable[[float], None] | None]:
    """A bar on a terminal, nothing elsewhere."""
    if not err.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(24), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, refresh_per_second=4) as live:
        bar = live.add_task(label, total=1.0)
        yield lambda share: live.update(bar, completed=share)


def _codes(labels: Any) -> Tensor | None:
    """Labels as classes from 0."""
    import numpy as np
    import torch

    return None if labels is None else torch.from_numpy(np.unique(labels, return_inverse=True)[1])


def _mean(measured: list[Quality]) -> Fields:
    every = [asdict(each) for each in measured]
    return {key: sum(each[key] for each in every) / len(every) for key in every[0]}


def _write(folder: Path, chosen: Coreset, summary: Fields) -> None:
    """The coreset for programs and for people, and what is known about it."""
    import numpy as np

    content = io.BytesIO()
    indices, weights, gains = chosen.indices.numpy(), chosen.weights.numpy(), chosen.gains.numpy()
    np.savez(content, indices=indices, weights=weights, gains=gains)
    rows = zip(indices.tolist(), weights.tolist(), gains.tolist(), strict=True)
    lines = ["index,weight,gain", *(f"{index},{weight:g},{gain!r}" for index, weight, gain in rows)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "coreset.npz", content.getvalue())
        write_atomically(folder / "coreset.csv", ("\n".join(lines) + "\n").encode())
        write_atomically(folder / "summary.json", json_text.dumps(summary, indent=2).encode())
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written to ({error.strerror}); use another --out") from None


def _report(folder: Path, rows: Tensor, chosen: Coreset, summary: Fields) -> Path | None:
    """The page with the picture; None where matplotlib is missing."""
    from thinwire.coreset.projection import projected

    try:
        from thinwire.report.coreset import write_coreset
    except ModuleNotFoundError:
        return None
    shown = projected(rows, chosen.indices)
    picture = (shown.others.numpy(), shown.chosen.numpy(), chosen.weights.numpy(), shown.share)
    return write_coreset(folder, *picture, title=_title(summary), rows=_rows(summary))


def _title(summary: Fields) -> str:
    return (
        f"{units.count(summary['chosen'])} of {units.count(summary['points'])} points of {Path(summary['data']).name}"
    )


def _rows(summary: Fields) -> list[tuple[str, str, str]]:
    """(what, the coreset's, random points') as people read them."""
    names = {
        "mean_distance": "mean distance to the nearest chosen",
        "far_distance": "95 % of the points are nearer than",
        "largest_distance": "every point is nearer than",
    }
    own, other = summary["coreset"], summary["random"]
    lines = [(words, units.score(own[key]), units.score(other[key])) for key, words in names.items()]
    errors = (units.share(own["gradient_error"]), units.share(other["gradient_error"]))
    weights = f"{summary['smallest_weight']:g} to {summary['largest_weight']:g}"
    return [
        *lines,
        ("relative gradient error", *errors),
        ("weights", weights, "equal"),
        ("time", units.seconds(summary["seconds"]), "none"),
    ]


def _show(summary: Fields, report: Path | None) -> None:
    from rich.table import Table

    table = Table(
        "", "coreset", f"random, mean of {summary['random_draws']}", title=_title(summary), title_justify="left"
    )
    for row in _rows(summary):
        table.add_row(*row)
    out.print(table)
    if report is None:
        err.print("no picture: it needs matplotlib; pip install 'thinwire[report]'", markup=False)
    else:
        out.print(str(report), markup=False)
