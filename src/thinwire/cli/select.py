# SPDX-License-Identifier: Apache-2.0
"""`thinwire select`: a coreset, that is a small weighted subset, of the rows of a feature matrix."""

from __future__ import annotations

import io
import json as json_text
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from thinwire.cli.console import out, print_json
from thinwire.cli.progress import Bar
from thinwire.errors import ConfigError
from thinwire.lab.report.files import write_bytes, write_text
from thinwire.planning import units

if TYPE_CHECKING:
    from torch import Tensor

    from thinwire.coreset import Coreset

# How many random subsets the coreset is compared with.
_RANDOM_DRAWS = 5
# Files in the folders of runs, comparisons and sweeps.
_OF_OTHERS = ("settings.json", "config.json", "comparison.json", "trials.json")
Fields = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Select:
    """Choose a coreset: a small weighted subset of the rows of a feature matrix that represents all of them.

    Example: thinwire select --data features.npy --fraction 0.1

    Prints how far all points are from the chosen ones, how wrong the weighted gradient is and, where there are labels,
    how near to the optimum training on the chosen points alone can come, compared with random subsets of the same size:
    so it says beforehand whether random points are as good. Writes coreset.npz and coreset.csv (index, weight, gain; in
    greedy order) and summary.json.

    Args:
        data: the feature matrix, one row per point: .npy, .npz, .parquet, .libsvm, .svm or .svmlight.
        fraction: the fraction of the points to choose; 0.1 unless --budget or --cover is given.
        budget: how many points to choose, instead of a fraction.
        cover: choose as few points as bring the sum of all distances to the nearest chosen point down to this,
            instead of a fraction.
        per_class: choose within each class separately; every class gets its share of the budget.
        labels: the classes: a column of the file (by name, or by number in .npy), an array of the .npz, or another
            .npy file.
        method: the greedy algorithm; lazy and naive are exact, sparse is for millions of points.
        neighbours: for sparse, the neighbours kept of each point; more is slower and closer to exact.
        seed: random seed.
        out: the folder for results; runs/select-NAME-TIME unless given.
        json: print everything as JSON.
    """

    data: Path
    fraction: float | None = None
    budget: int | None = None
    cover: float | None = None
    per_class: bool = False
    labels: str | None = None
    method: Literal["lazy", "naive", "sparse"] = "lazy"
    neighbours: int = 32
    seed: int = 0
    out: Path | None = None
    json: bool = False

    def __call__(self) -> int:
        """Select, write and show; returns 0."""
        import torch

        from thinwire.coreset import select
        from thinwire.coreset.matrices import read_matrix
        from thinwire.coreset.selection import classes_of
        from thinwire.coreset.similarity import checked

        if self.out is not None:
            _check_out(self.out)
        features, labels = read_matrix(self.data, self.labels)
        rows = checked(features)
        classes = None if labels is None else torch.from_numpy(classes_of(labels, len(rows)))
        if self.per_class and labels is None:
            raise ConfigError(
                f"--per-class: {self.data} gives no labels. Name where they are, such as --labels FILE.npy"
            )
        start = time.perf_counter()
        with Bar(f"select from {len(rows):,} points") as bar:
            chosen = select(
                rows,
                fraction=0.1 if self.fraction is self.budget is self.cover is None else self.fraction,
                budget=self.budget,
                cover=self.cover,
                labels=classes if self.per_class else None,
                method=self.method,
                seed=self.seed,
                neighbours=self.neighbours,
                on_progress=lambda share: bar.show(completed=share, total=1.0),
            )
        seconds = time.perf_counter() - start
        summary = self._summary(rows, classes, chosen, seconds)
        folder = self.out or Path("runs") / f"select-{self.data.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        _write(folder, chosen, summary)
        if self.json:
            print_json(summary | {"folder": folder})
        else:
            headings = ("", "coreset", f"random, mean of {_RANDOM_DRAWS}")
            out.table(_title(summary), headings, _rows(summary))
            out.print(_advice(summary))
            out.print(str(folder))
        return 0

    def _summary(self, rows: Tensor, labels: Tensor | None, chosen: Coreset, seconds: float) -> Fields:
        from thinwire.coreset.quality import optimum_gaps, quality, random_subset

        own = quality(rows, chosen.indices, chosen.weights, labels=labels, seed=self.seed)
        classes = labels if self.per_class else None
        draws = [random_subset(chosen, labels=classes, seed=self.seed + 1 + draw) for draw in range(_RANDOM_DRAWS)]
        others = [asdict(quality(rows, *draw, labels=labels, seed=self.seed)) for draw in draws]
        gaps = None
        if labels is not None and len(labels.unique()) > 1:
            gaps = optimum_gaps(rows, labels, [(chosen.indices, chosen.weights), *draws], seed=self.seed)
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
            "random": {key: sum(each[key] for each in others) / len(others) for key in others[0]},
            "random_draws": _RANDOM_DRAWS,
            "optimum_gap": None if gaps is None else {"coreset": gaps[0], "random": gaps[1:]},
        }


def _check_out(folder: Path) -> None:
    """Refuse, before anything is selected, a file, and a folder whose summary is that of something else.

    Raises:
        ConfigError: with the folder and the fix.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {folder}: is a file, not a folder. Use another --out")
    found = next((name for name in _OF_OTHERS if (folder / name).exists()), None)
    if found is not None:
        raise ConfigError(
            f"--out {folder}: holds other results ({found}), whose summary would be lost. Use another --out"
        )


def _write(folder: Path, chosen: Coreset, summary: Fields) -> None:
    """Write the coreset, for programs and for people, and the summary.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    import numpy as np

    content = io.BytesIO()
    indices, weights, gains = chosen.indices.numpy(), chosen.weights.numpy(), chosen.gains.numpy()
    np.savez(content, indices=indices, weights=weights, gains=gains)
    rows = zip(indices.tolist(), weights.tolist(), gains.tolist(), strict=True)
    # Weights are numbers of points.
    lines = ["index,weight,gain", *(f"{index},{round(weight)},{gain!r}" for index, weight, gain in rows)]
    write_bytes(folder / "coreset.npz", content.getvalue())
    write_text(folder / "coreset.csv", "\n".join(lines) + "\n")
    write_text(folder / "summary.json", json_text.dumps(summary, indent=2))


def _title(summary: Fields) -> str:
    return (
        f"{units.count(summary['chosen'])} of {units.count(summary['points'])} points of {Path(summary['data']).name}"
    )


def _rows(summary: Fields) -> list[tuple[str, str, str]]:
    """Return the table's rows: a figure's name, its value for the coreset, its mean for random subsets."""
    names = {
        "mean_distance": "mean distance to the nearest chosen point",
        "far_distance": "95th percentile of that distance",
        "largest_distance": "largest of these distances",
    }
    own, other = summary["coreset"], summary["random"]
    lines = [(words, units.score(own[key]), units.score(other[key])) for key, words in names.items()]
    errors = (units.share(own["gradient_error"]), units.share(other["gradient_error"]))
    gaps = summary["optimum_gap"]
    if gaps is not None:
        random = sum(gaps["random"]) / len(gaps["random"])
        lines.append(
            ("own optimum's distance from that of all points", units.share(gaps["coreset"]), units.share(random))
        )
    weights = f"{units.count(summary['smallest_weight'])} to {units.count(summary['largest_weight'])}"
    return [
        *lines,
        ("relative gradient error", *errors),
        ("weights", weights, "equal"),
        ("time", units.seconds(summary["seconds"]), "none"),
    ]


def _advice(summary: Fields) -> str:
    """Return what training on the coreset can be expected to bring, in words."""
    gaps = summary["optimum_gap"]
    if gaps is None:
        return "whether random points would do as well cannot be told without labels of two classes: give --labels"
    floor, nearer = gaps["coreset"], sum(each <= gaps["coreset"] for each in gaps["random"])
    told = (
        f"a linear classifier trained on the coreset alone stays {units.share(floor)} of the way from start to optimum "
        "short of the optimum"
    )
    draws = len(gaps["random"])
    if nearer == 0:
        return f"{told}; as many random points stay further from it in all {draws} draws"
    return (
        f"{told}; as many random points come nearer in {nearer} of {draws} draws: "
        "they are as good here, and cost nothing"
    )
