# SPDX-License-Identifier: Apache-2.0
"""The speed results of the papers behind the strategies: what is predicted, what was published, and the difference.

python -m benchmarks.published.papers

counts the bytes that the strategies' own code sends; times come from the committed predictions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import torch

from benchmarks.published.results import RESULTS, predictions
from thinwire import parse
from thinwire.planning.plan.predict import ModelTime, Simulated
from thinwire.planning.plan.published import Predicted
from thinwire.planning.simulate import Network

_WARM_UP = 0.15  # of 1-bit Adam's whole run, as its authors report
_SIXTH = 1 / 6  # of 1-bit LAMB's first phase


def count() -> None:
    """Count bytes of a step and write them."""
    bert, transformer = 336_000_000, 90_000_000
    half, single = torch.float16, torch.float32
    found = {
        "bert-dense": _sent("AllReduce()", 256, bert, half),
        "bert-compressed": _sent("CompressedMomentum(warmup_steps=1)", 256, bert, half),
        "sketch-dense": _sent("AllReduce()", 256, transformer, single),
        "sketch-256": _sent(_SKETCH, 256, transformer, single),
    }
    (RESULTS / "papers.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(found)


_SKETCH = 'SketchedSGD(columns=16, recovery="sketch")'


def _sent(recipe: str, workers: int, elements: int, dtype: torch.dtype) -> float:
    times = ModelTime(0.1, 0.2)
    given = Simulated(parse(recipe), workers, [(elements,)], dtype, [(0, 1.0)], times, [0.0], None, 1 << 60)
    return given.run(Network(bits_per_second=1e10), meta=True, alike=True).payload_bytes


def papers() -> Iterator[str]:
    """One line per result."""
    yield "| Paper | Result | Published | Predicted | Difference |"
    yield "|---|---|---|---|---|"
    for name, title in (("slowmo", "SlowMo, ImageNet"), ("slowmo-wmt", "SlowMo, WMT16")):
        for each in predictions(name):
            if not each.calibrates and "first version" not in each.cell.method:
                yield _line(title, each.cell.method, each.cell.seconds * 1e3, each.seconds * 1e3, "ms")
    first = {each.cell.method: each for each in predictions("slowmo")}
    for method in ("SGP, first version", "AR-SGD, first version of SGP"):
        each = first[method]
        yield _line("SGP, arXiv v1", method.split(",")[0], each.cell.seconds * 1e3, each.seconds * 1e3, "ms")
    adam = {(each.cell.model, each.cell.workers, each.cell.link): each for each in predictions("one-bit-adam")}
    for workers in (8, 16, 32):
        each = adam["BERT-Large pretraining, compressed", workers, "Ethernet 4.1G"]
        yield _line(
            "1-bit Adam", f"compressed stage, {workers} GPUs", each.cell.seconds * 1e3, each.seconds * 1e3, "ms"
        )
    dense = adam["BERT-Large pretraining, dense", 32, "Ethernet 4.1G"]
    compressed = adam["BERT-Large pretraining, compressed", 32, "Ethernet 4.1G"]
    yield _line("1-bit Adam", "whole run, 32 GPUs, warm-up 15 %", 3.5, _whole_run(dense, compressed), "x")
    counted = json.loads((RESULTS / "papers.json").read_text(encoding="utf-8"))
    ratio = counted["bert-dense"] / counted["bert-compressed"]
    yield _line(
        "1-bit LAMB", "volume, with a sixth of the run uncompressed", 4.6, 1 / (_SIXTH + (1 - _SIXTH) / ratio), "x"
    )
    for each in predictions("ft-diloco"):
        if not each.calibrates:
            used = 0.811 * each.cell.steps
            yield _line(
                "DiLoCo (ft-diloco)",
                f"utilization, {each.cell.method}, {each.cell.link}bit/s",
                100 * used / each.cell.seconds,
                100 * used / each.seconds,
                "%",
            )
    ratio = counted["sketch-dense"] / counted["sketch-256"]
    yield (
        f"| Sketched SGD | bytes at 256 workers, 90 M parameters | up to 40x less | {ratio:.1f}x less with `{_SKETCH}` "
        "| set by the size of the sketch |"
    )


def _whole_run(dense: Predicted, compressed: Predicted) -> float:
    return dense.seconds / (_WARM_UP * dense.seconds + (1 - _WARM_UP) * compressed.seconds)


def _line(paper: str, result: str, published: float, predicted: float, unit: str) -> str:
    return (
        f"| {paper} | {result} | {published:.4g} {unit} | {predicted:.4g} {unit} | {predicted / published - 1:+.0%} |"
    )


if __name__ == "__main__":
    count()
