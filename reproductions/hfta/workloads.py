# SPDX-License-Identifier: Apache-2.0
"""What networks are trained on: small, and at the sizes of the paper's own code."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reproductions.hfta.networks import (
    SHAPES,
    AdversarialPair,
    PointClassifier,
    PointSegmenter,
    Transformer,
    adversarial_loss,
    mobilenet,
    mobilenet_v3_large,
    resnet18,
    word_loss,
)
from thinwire.lab.tasks import Task, load

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Workload:
    """A network, its data and its loss.

    Args:
        title: for readers.
        data: where the data come from.
        make: a new network, from torch's own generator.
        batch: a step's inputs, and what the loss is given beside the outputs.
        loss: of one model.
    """

    title: str
    data: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Batch, Batch]]
    loss: Callable[..., Tensor]

    def to(self, device: str) -> Workload:
        """The same on a device."""
        if device == "cpu":
            return self

        def batch(number: int) -> tuple[Batch, Batch]:
            inputs, targets = self.batch(number)
            return tuple(each.to(device) for each in inputs), tuple(each.to(device) for each in targets)

        return replace(self, make=lambda: self.make().to(device), batch=batch)


def every(device: str) -> dict[str, Workload]:
    """Small ones and those of the paper's sizes, whose batches are an eighth as large on a processor."""
    return workloads() | paper_workloads(1.0 if device == "cuda" else 0.125)


def workloads() -> dict[str, Workload]:
    """All six, small, by a short name; images are CIFAR-10's where THINWIRE_DATA has them, else handwritten digits."""
    shapes, cross = "made-up clouds of four shapes", F.cross_entropy
    return {
        "pointnet-cls": Workload("PointNet, shapes", shapes, PointClassifier, partial(clouds, parts=False), cross),
        "pointnet-seg": Workload("PointNet, parts", shapes, PointSegmenter, partial(clouds, parts=True), cross),
        "dcgan": Workload("DCGAN", f"{_source()}, 16 x 16", AdversarialPair, _noisy_images, adversarial_loss),
        "resnet18": Workload("ResNet-18, width 8", f"{_source()}, 16 x 16", resnet18, _images, cross),
        "mobilenet": Workload("MobileNetV2-style", f"{_source()}, 16 x 16", mobilenet, _images, cross),
        "transformer": Workload("Transformer, 2 layers of 64", "text", Transformer, _text, word_loss),
    }


# The vocabulary of the paper's text, WikiText-2.
_WORDS = 33278


def paper_workloads(share: float = 1.0) -> dict[str, Workload]:
    """All six at the sizes of the paper's code, by short names that begin with "paper-".

    Args:
        share: of its batches, which are 32 clouds of 2,500 points, 128 images of 64 x 64 (DCGAN), 128 (ResNet-18) and
            1,024 (MobileNetV3) of 32 x 32, and 32 sequences of 32 words; that of ResNet-18 is ours, since the paper's
            code leaves it to a default.
    """

    def few(samples: int) -> int:
        return max(2, round(share * samples))

    near, far, cross = (64,), (64, 128, 1024), F.cross_entropy
    classifier = partial(PointClassifier, near, far, (512, 256), kinds=16, aligned=True)
    segmenter = partial(PointSegmenter, near, far, (512, 256, 128), parts=2 * SHAPES, aligned=True)
    pair = partial(AdversarialPair, (512, 256, 128, 64), 100)
    transformer = partial(Transformer, 128, 128, 2, _WORDS, 32)
    points = "made-up clouds of four shapes, 2,500 points"
    cloud = partial(clouds, samples=few(32), points=2500)
    gan = partial(_noisy_images, samples=few(128), size=64, noise=100)
    images = [partial(_images, samples=few(samples), size=32) for samples in (128, 1024)]
    words = partial(_words, samples=few(32))
    return {
        "paper-pointnet-cls": Workload(
            f"PointNet, shapes, {few(32)}", points, classifier, partial(cloud, parts=False), cross
        ),
        "paper-pointnet-seg": Workload(
            f"PointNet, parts, {few(32)}", points, segmenter, partial(cloud, parts=True), cross
        ),
        "paper-dcgan": Workload(f"DCGAN, {few(128)}", f"{_source()}, 64 x 64", pair, gan, adversarial_loss),
        "paper-resnet18": Workload(
            f"ResNet-18, {few(128)}", f"{_source()}, 32 x 32", partial(resnet18, 64), images[0], cross
        ),
        "paper-mobilenet": Workload(
            f"MobileNetV3-Large, {few(1024)}", f"{_source()}, 32 x 32", mobilenet_v3_large, images[1], cross
        ),
        "paper-transformer": Workload(
            f"Transformer, {few(32)}", f"text, pairs of bytes as {_WORDS:,} words", transformer, words, word_loss
        ),
    }


def _source() -> str:
    return "CIFAR-10" if os.environ.get("THINWIRE_DATA") else "digits"


def clouds(step: int, *, parts: bool, samples: int = 8, points: int = 256) -> tuple[Batch, Batch]:
    """Points on spheres, cubes, cylinders and rings; the label is the shape, or each point's half of it."""
    draw = torch.Generator().manual_seed(step)
    kinds = torch.arange(samples) % SHAPES
    x = torch.stack([_surface(int(kind), draw, points) for kind in kinds])
    x = x * (0.8 + 0.4 * torch.rand(samples, 1, 1, generator=draw))
    labels = 2 * kinds.unsqueeze(1) + (x[:, 2] > 0) if parts else kinds
    return (x,), (labels,)


def _surface(kind: int, draw: torch.Generator, points: int) -> Tensor:
    """[3, points] on one surface about the origin."""
    normal = torch.randn(3, points, generator=draw)
    sphere = normal / normal.norm(dim=0)
    if kind == 0:
        return sphere
    if kind == 1:
        return normal / normal.abs().amax(0)
    around = normal[:2] / normal[:2].norm(dim=0)
    if kind == 2:
        return torch.cat([around, 2 * torch.rand(1, points, generator=draw) - 1])
    turn = 6.283185 * torch.rand(points, generator=draw)
    return torch.cat([around * (1 + 0.3 * turn.cos()), 0.3 * turn.sin().unsqueeze(0)])


@cache
def _task(name: str) -> Task:
    return load(name)


def _from_task(name: str, step: int, samples: int) -> Sequence[Tensor]:
    task = _task(name)
    (shard,) = task.shards(1, seed=0)
    return task.batch(shard, step, batch_size=samples, seed=0, rank=0)


def _images(step: int, *, samples: int = 8, size: int = 16) -> tuple[Batch, Batch]:
    images, labels = _from_task("cifar10" if os.environ.get("THINWIRE_DATA") else "digits", step, samples)
    return (F.interpolate(images, (size, size)).expand(-1, 3, -1, -1).contiguous(),), (labels,)


def _noisy_images(step: int, *, samples: int = 8, size: int = 16, noise: int = 32) -> tuple[Batch, Batch]:
    (images,), _ = _images(step, samples=samples, size=size)
    drawn = torch.randn(len(images), noise, 1, 1, generator=torch.Generator().manual_seed(step))
    return (images.tanh(), drawn), ()


def _text(step: int) -> tuple[Batch, Batch]:
    tokens, following = _from_task("text", step, 8)
    return (tokens[:, :32].contiguous(),), (following[:, :32].contiguous(),)


def _words(step: int, *, samples: int) -> tuple[Batch, Batch]:
    """Two bytes that follow each other are a word, of as many as the paper's text has."""
    tokens, following = _from_task("text", step, samples)
    words = (256 * tokens + following) % _WORDS
    return (words[:, :64:2].contiguous(),), (words[:, 2:66:2].contiguous(),)
