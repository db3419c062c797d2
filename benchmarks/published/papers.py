# SPDX-License-Identifier: Apache-2.0
"""The speed results of the papers behind the strategies: what is predicted, what was published, and the difference.

python -m benchmarks.published.papers

counts the bytes that the strategies' own code sends, and simulates gossip and backup workers, in some minutes. Other
times come from the committed predictions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from math import comb, log
from statistics import NormalDist

import torch

from benchmarks.published.results import HERE, RESULTS, load, predictions
from thinwire import parse
from thinwire.lab.runs.simulated_training import Training, summarise
from thinwire.planning.plan.predict import ModelTime, Simulated
from thinwire.planning.plan.published import Cell, Predicted, Source, load_source, set_number
from thinwire.planning.simulate import Duration, Network, simulate

_WARM_UP = 0.15  # of 1-bit Adam's whole run, as its authors report
_SIXTH = 1 / 6  # of 1-bit LAMB's first phase
_GOSSIP_EPOCH = 83.0  # seconds, BERT-Large on 128 GPUs at 100 Gbit/s, from Bagua's figure
_GOSSIP = {"one peer a step": "Gossip(topology=OnePeerExponential())", "two neighbors": "Gossip(topology=Ring())"}
_BACKUPS, _BACKUP_WORKERS = (0, 2, 4), 100
# Of the 98th and of the last of 100 gradients, the share that came within 2 s (Chen et al., arXiv:1604.00981).
_WITHIN = {98: 0.8, 100: 0.3}
_ONE_WITHIN = _WITHIN[100] ** (1 / 100)  # of all gradients, if each comes independently of the others
_SPREAD = log(2.0) / NormalDist().inv_cdf(_ONE_WITHIN)


def count() -> None:
    """Count bytes of a step and write them."""
    bert, transformer = 336_000_000, 90_000_000
    half, single = torch.float16, torch.float32
    found = {
        "bert-dense": _sent("AllReduce()", 256, bert, half),
        "bert-compressed": _sent("CompressedMomentum(warmup_steps=1)", 256, bert, half),
        "sketch-dense": _sent("AllReduce()", 256, transformer, single),
        "sketch-256": _sent(_SKETCH, 256, transformer, single),
        "gossip": {name: _gossip_epoch(recipe) for name, recipe in _GOSSIP.items()},
        "backups": {str(backups): _backup_step(backups) for backups in _BACKUPS},
    }
    (RESULTS / "papers.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(found)


_SKETCH = 'SketchedSGD(columns=16, recovery="sketch")'


def _sent(recipe: str, workers: int, elements: int, dtype: torch.dtype) -> float:
    times = ModelTime(0.1, 0.2)
    given = Simulated(parse(recipe), workers, [(elements,)], dtype, [(0, 1.0)], times, [0.0], None, 1 << 60)
    return given.run(Network(bits_per_second=1e10), meta=True, alike=True).payload_bytes


def _gossip_epoch(recipe: str) -> float:
    """Seconds of an epoch on the link whose rate DDP's step of VGG16 has given."""
    source = load_source(HERE / "sources" / "bagua")
    fitted = Source(source.name, source.cells, deepcopy(dict(source.table)))
    for path, value in load("bagua")["fitted"].items():
        set_number(fitted.table, path, value)
    return float(f"{fitted.seconds(Cell('BERT-Large', 16, '100G', '', recipe, '', 1, _GOSSIP_EPOCH, '', '')):.4g}")


def _backup_step(backups: int) -> float:
    """Seconds of a step whose computation has a median of 1 s, with so many of the workers as backups."""
    strategy = parse(f"BackupWorkers(backups={backups})" if backups else "AllReduce()")
    ended = simulate(
        _BACKUP_WORKERS,
        Training(strategy, steps=16, parameters=1000),
        network=Network(bits_per_second=1e10, latency=1e-4),
        compute_time=Duration("lognormal", 1.0, _SPREAD),
        seed=1,
    )
    assert not ended.failures, ended.failures
    return float(f"{summarise(ended).seconds_per_step:.4g}")


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
    for name, title, step in (
        ("ft-diloco", "DiLoCo (ft-diloco)", 0.811),
        ("streaming-diloco", "Streaming DiLoCo", 0.1),
    ):
        for each in predictions(name):
            if not each.calibrates:
                used = step * each.cell.steps
                yield _line(
                    title,
                    f"utilization, {each.cell.method}, {each.cell.link}bit/s",
                    100 * used / each.cell.seconds,
                    100 * used / each.seconds,
                    "%",
                )
    for name, seconds in counted["gossip"].items():
        yield _line("Gossip (Bagua)", f"epoch of BERT-Large, 128 GPUs, {name}", _GOSSIP_EPOCH, seconds, "s")
    ratio = counted["sketch-dense"] / counted["sketch-256"]
    yield (
        f"| Sketched SGD | bytes at 256 workers, 90 M parameters | up to 40x less | {ratio:.1f}x less with `{_SKETCH}` "
        "| set by the size of the sketch |"
    )


def backups() -> str:
    """The illustration of backup workers, in words."""
    found = json.loads((RESULTS / "papers.json").read_text(encoding="utf-8"))["backups"]
    rest = ", ".join(f"{seconds:.2f} s with {count}" for count, seconds in found.items() if count != "0")
    then = sum(comb(100, late) * (1 - _ONE_WITHIN) ** late * _ONE_WITHIN ** (100 - late) for late in range(3))
    return (
        f"In the paper {_WITHIN[100]:.0%} of the last of 100 gradients come within 2 s, and {_WITHIN[98]:.0%} of the "
        f"98th. Lognormal times with a deviation of the logarithm of {_SPREAD:.2f} give the first number, and "
        f"{then:.0%} for the second; their median of 1 s is assumed. 100 such workers take {found['0']:.2f} s a step "
        f"without backups, {rest}"
    )


def _whole_run(dense: Predicted, compressed: Predicted) -> float:
    return dense.seconds / (_WARM_UP * dense.seconds + (1 - _WARM_UP) * compressed.seconds)


def _line(paper: str, result: str, published: float, predicted: float, unit: str) -> str:
    return (
        f"| {paper} | {result} | {published:.4g} {unit} | {predicted:.4g} {unit} | {predicted / published - 1:+.0%} |"
    )


if __name__ == "__main__":
    count()
