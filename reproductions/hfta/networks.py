# SPDX-License-Identifier: Apache-2.0
"""Networks like those that were first trained as arrays, at widths that a processor bears, and data for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.tasks import Task, load

Batch = tuple[Tensor, ...]
_SHAPES = 4
_POINTS = 256
_IMAGE = 16
_NOISE = 32
_LENGTH = 32
_TOKENS = 256


def _points(*widths: int) -> nn.Sequential:
    """The same small network at every point."""
    pairs = pairwise(widths)
    return nn.Sequential(*(nn.Sequential(nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU()) for a, b in pairs))


class PointClassifier(nn.Module):
    """Points one by one, the greatest of every feature, and dense layers: PointNet without its alignment nets."""

    def __init__(self) -> None:
        super().__init__()
        self.body = _points(3, 32, 64, 128)
        self.head = nn.Sequential(nn.Linear(128, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, _SHAPES))

    def forward(self, points: Tensor) -> Tensor:
        """[n, 3, points] to [n, shapes]."""
        return self.head(self.body(points).amax(2))


class PointSegmenter(nn.Module):
    """Every point's own features beside those of the whole cloud."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = _points(3, 32, 64), _points(64, 128)
        self.head = nn.Sequential(_points(192, 64), nn.Conv1d(64, 2 * _SHAPES, 1))

    def forward(self, points: Tensor) -> Tensor:
        """[n, 3, points] to [n, parts, points]."""
        near = self.near(points)
        whole = self.far(near).amax(2, keepdim=True).expand(-1, -1, points.shape[2])
        return self.head(torch.cat([near, whole], 1))


class AdversarialPair(nn.Module):
    """DCGAN's two networks, each going its way in the same step: the gradient turns round between them."""

    def __init__(self) -> None:
        super().__init__()
        grow = [nn.ConvTranspose2d(_NOISE, 32, 4, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
        grow += [nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
        self.generator = nn.Sequential(*grow, nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh())
        shrink = [nn.Conv2d(3, 16, 4, 2, 1), nn.LeakyReLU(0.2)]
        shrink += [nn.Conv2d(16, 32, 4, 2, 1, bias=False), nn.BatchNorm2d(32), nn.LeakyReLU(0.2)]
        self.discriminator = nn.Sequential(*shrink, nn.Conv2d(32, 1, 4))

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        """Logits of [real, made] images, [2, n]; the generator climbs where the discriminator descends."""
        made = self.generator(noise)
        turned = 2 * made.detach() - made
        return torch.stack([self.discriminator(images).flatten(), self.discriminator(turned).flatten()])


def adversarial_loss(logits: Tensor) -> Tensor:
    """The discriminator's cross-entropy on both halves: the game of Goodfellow et al. (2014), equation 1."""
    real, made = logits
    return F.softplus(-real).mean() + F.softplus(made).mean()


class Residual(nn.Module):
    """Two convolutions and a way round them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        first = [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        self.body = nn.Sequential(*first, nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs))
        self.round = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.round = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Both ways added."""
        return torch.relu(self.body(x) + self.round(x))


def resnet18(width: int = 8) -> nn.Module:
    """Eighteen layers as in He et al. (2016), for small images, an eighth as wide."""
    stem = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    widths = [width, width, 2 * width, 4 * width, 8 * width]
    stages = [
        block
        for place, (a, b) in enumerate(pairwise(widths))
        for block in (Residual(a, b, 1 if place == 0 else 2), Residual(b, b, 1))
    ]
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10))


class Inverted(nn.Module):
    """Widen, convolve every channel by itself, narrow again: MobileNetV2's block."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide, self.keeps = 4 * inputs, stride == 1 and inputs == outputs
        widen = [nn.Conv2d(inputs, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()]
        alone = [nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()]
        self.body = nn.Sequential(*widen, *alone, nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """With the input added where the shape stays."""
        return x + self.body(x) if self.keeps else self.body(x)


def mobilenet() -> nn.Module:
    """Inverted residuals as in MobileNetV2, narrow and few."""
    stem = [nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6()]
    blocks = [Inverted(8, 8, 1), Inverted(8, 16, 2), Inverted(16, 16, 1), Inverted(16, 32, 2), Inverted(32, 32, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


class Transformer(nn.Module):
    """Two layers that look back, over bytes."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(_TOKENS, width), nn.Embedding(_LENGTH, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(width, _TOKENS)
        self.register_buffer("later", torch.ones(_LENGTH, _LENGTH, dtype=torch.bool).triu(1))

    def forward(self, tokens: Tensor) -> Tensor:
        """[n, length] to logits [n, tokens, length]."""
        x = self.tokens(tokens) + self.places.weight
        for layer in self.layers:
            x = layer(x, self.later)
        return self.head(x).transpose(1, 2)


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


def workloads() -> dict[str, Workload]:
    """All six, by a short name; images are CIFAR-10's where THINWIRE_DATA has them, else handwritten digits."""
    source = "CIFAR-10 at half its resolution" if os.environ.get("THINWIRE_DATA") else "digits, enlarged"
    shapes, cross = "made-up clouds of four shapes", F.cross_entropy
    return {
        "pointnet-cls": Workload("PointNet, shapes", shapes, PointClassifier, partial(clouds, parts=False), cross),
        "pointnet-seg": Workload("PointNet, parts", shapes, PointSegmenter, partial(clouds, parts=True), cross),
        "dcgan": Workload("DCGAN", source, AdversarialPair, _noisy_images, adversarial_loss),
        "resnet18": Workload("ResNet-18, width 8", source, resnet18, _images, cross),
        "mobilenet": Workload("MobileNetV2-style", source, mobilenet, _images, cross),
        "transformer": Workload("Transformer, 2 layers of 64", "text", Transformer, _text, cross),
    }


def clouds(step: int, *, parts: bool, samples: int = 8) -> tuple[Batch, Batch]:
    """Points on spheres, cubes, cylinders and rings; the label is the shape, or each point's half of it."""
    draw = torch.Generator().manual_seed(step)
    kinds = torch.arange(samples) % _SHAPES
    x = torch.stack([_surface(int(kind), draw) for kind in kinds])
    x = x * (0.8 + 0.4 * torch.rand(samples, 1, 1, generator=draw))
    labels = 2 * kinds.unsqueeze(1) + (x[:, 2] > 0) if parts else kinds
    return (x,), (labels,)


def _surface(kind: int, draw: torch.Generator) -> Tensor:
    """[3, points] on one surface about the origin."""
    normal = torch.randn(3, _POINTS, generator=draw)
    sphere = normal / normal.norm(dim=0)
    if kind == 0:
        return sphere
    if kind == 1:
        return normal / normal.abs().amax(0)
    around = normal[:2] / normal[:2].norm(dim=0)
    if kind == 2:
        return torch.cat([around, 2 * torch.rand(1, _POINTS, generator=draw) - 1])
    turn = 6.283185 * torch.rand(_POINTS, generator=draw)
    return torch.cat([around * (1 + 0.3 * turn.cos()), 0.3 * turn.sin().unsqueeze(0)])


@cache
def _task(name: str) -> Task:
    return load(name)


def _from_task(name: str, step: int, samples: int) -> Sequence[Tensor]:
    task = _task(name)
    (shard,) = task.shards(1, seed=0)
    return task.batch(shard, step, batch_size=samples, seed=0, rank=0)


def _images(step: int, samples: int = 8) -> tuple[Batch, Batch]:
    images, labels = _from_task("cifar10" if os.environ.get("THINWIRE_DATA") else "digits", step, samples)
    return (F.interpolate(images, (_IMAGE, _IMAGE)).expand(-1, 3, -1, -1).contiguous(),), (labels,)


def _noisy_images(step: int) -> tuple[Batch, Batch]:
    (images,), _ = _images(step)
    noise = torch.randn(len(images), _NOISE, 1, 1, generator=torch.Generator().manual_seed(step))
    return (images.tanh(), noise), ()


def _text(step: int) -> tuple[Batch, Batch]:
    tokens, following = _from_task("text", step, 8)
    return (tokens[:, :_LENGTH].contiguous(),), (following[:, :_LENGTH].contiguous(),)
