# SPDX-License-Identifier: Apache-2.0
"""The networks that were first trained as arrays; by default at widths that a processor bears.

Dropout is left out everywhere: an array draws other masks than separate runs, and their losses are to be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SHAPES = 4


def _points(*widths: int) -> nn.Sequential:
    """The same small network at every point."""
    pairs = pairwise(widths)
    return nn.Sequential(*(nn.Sequential(nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU()) for a, b in pairs))


def _dense(*widths: int) -> nn.Sequential:
    pairs = pairwise(widths)
    return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU()) for a, b in pairs))


class Alignment(nn.Module):
    """PointNet's alignment net: a matrix for every cloud, by which its points are multiplied."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.body, self.head = _points(channels, 64, 128, 1024), _dense(1024, 512, 256)
        self.matrix = nn.Linear(256, channels * channels)
        self.register_buffer("identity", torch.eye(channels))

    def forward(self, points: Tensor) -> Tensor:
        """[n, channels, points] to the same."""
        matrix = self.matrix(self.head(self.body(points).max(2).values)).unflatten(1, (self.channels, self.channels))
        return (matrix + self.identity) @ points


class PointFeatures(nn.Module):
    """Features of every point, and of the whole cloud: the greatest of each.

    Args:
        near: widths of the layers up to the features of points, the first of them after the 3 coordinates.
        far: widths of the layers after them.
        aligned: with PointNet's two alignment nets, before the first layer and after the near ones.
    """

    def __init__(self, near: Sequence[int], far: Sequence[int], *, aligned: bool) -> None:
        super().__init__()
        self.place = Alignment(3) if aligned else nn.Identity()
        self.near = _points(3, *near)
        self.turn = Alignment(near[-1]) if aligned else nn.Identity()
        self.far = _points(near[-1], *far)

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """[n, 3, points] to [n, near, points] and [n, far, 1]."""
        near = self.turn(self.near(self.place(points)))
        return near, self.far(near).max(2, keepdim=True).values


class PointClassifier(nn.Module):
    """PointNet: the features of the whole cloud, and dense layers."""

    def __init__(
        self,
        near: Sequence[int] = (32, 64),
        far: Sequence[int] = (128,),
        head: Sequence[int] = (64,),
        *,
        kinds: int = SHAPES,
        aligned: bool = False,
    ) -> None:
        super().__init__()
        self.body = PointFeatures(near, far, aligned=aligned)
        self.head = nn.Sequential(_dense(far[-1], *head), nn.Linear(head[-1], kinds))

    def forward(self, points: Tensor) -> Tensor:
        """[n, 3, points] to [n, kinds]."""
        return self.head(self.body(points)[1].squeeze(2))


class PointSegmenter(nn.Module):
    """PointNet: every point's own features beside those of the whole cloud."""

    def __init__(
        self,
        near: Sequence[int] = (32, 64),
        far: Sequence[int] = (128,),
        head: Sequence[int] = (64,),
        *,
        parts: int = 2 * SHAPES,
        aligned: bool = False,
    ) -> None:
        super().__init__()
        self.body = PointFeatures(near, far, aligned=aligned)
        self.head = nn.Sequential(_points(near[-1] + far[-1], *head), nn.Conv1d(head[-1], parts, 1))

    def forward(self, points: Tensor) -> Tensor:
        """[n, 3, points] to [n, parts, points]."""
        near, whole = self.body(points)
        return self.head(torch.cat([near, whole.expand(-1, -1, points.shape[2])], 1))


class AdversarialPair(nn.Module):
    """DCGAN's two networks, each going its way in the same step: the gradient turns round between them.

    Args:
        widths: of the generator, from its 4 x 4 images to those of half the size; the discriminator has them in turn.
        noise: numbers that an image is made of.
    """

    def __init__(self, widths: Sequence[int] = (32, 16), noise: int = 32) -> None:
        super().__init__()
        grow = [nn.ConvTranspose2d(noise, widths[0], 4, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
        for a, b in pairwise(widths):
            grow += [nn.ConvTranspose2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
        self.generator = nn.Sequential(*grow, nn.ConvTranspose2d(widths[-1], 3, 4, 2, 1), nn.Tanh())
        shrink: list[nn.Module] = [nn.Conv2d(3, widths[-1], 4, 2, 1), nn.LeakyReLU(0.2)]
        for a, b in pairwise(reversed(widths)):
            shrink += [nn.Conv2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.2)]
        self.discriminator = nn.Sequential(*shrink, nn.Conv2d(widths[0], 1, 4))

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
    """Eighteen layers as in He et al. (2016), for small images; theirs has a width of 64."""
    stem = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    widths = [width, width, 2 * width, 4 * width, 8 * width]
    stages = [
        block
        for place, (a, b) in enumerate(pairwise(widths))
        for block in (Residual(a, b, 1 if place == 0 else 2), Residual(b, b, 1))
    ]
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10))


class Squeeze(nn.Module):
    """Channels weighted by what a small network makes of their means: Hu et al. (2018)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        fewer = _divisible(channels / 4)
        ways = [nn.Linear(channels, fewer), nn.ReLU(), nn.Linear(fewer, channels), nn.Hardsigmoid()]
        self.weights = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), *ways)

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels, rows, columns] to the same."""
        return x * self.weights(x).unsqueeze(2).unsqueeze(3)


def _divisible(channels: float) -> int:
    """The nearest multiple of eight, and no less than nine tenths."""
    found = max(8, int(channels + 4) // 8 * 8)
    return found + 8 if found < 0.9 * channels else found


class InvertedWithWeights(nn.Module):
    """Widen, convolve every channel by itself, narrow again: MobileNetV2's block, and V3's with channels weighted.

    Args:
        inputs: channels.
        wide: channels in between.
        outputs: channels.
        kernel: of the convolution of every channel by itself.
        stride: of that.
        weighted: with `Squeeze`.
        act: the activation.
    """

    def __init__(
        self, inputs: int, wide: int, outputs: int, kernel: int, stride: int, *, weighted: bool, act: type[nn.Module]
    ) -> None:
        super().__init__()
        self.keeps = stride == 1 and inputs == outputs
        widen = [nn.Conv2d(inputs, wide, 1, bias=False), nn.BatchNorm2d(wide), act()] if wide != inputs else []
        alone = [nn.Conv2d(wide, wide, kernel, stride, kernel // 2, groups=wide, bias=False), nn.BatchNorm2d(wide)]
        narrow = [nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs)]
        self.body = nn.Sequential(*widen, *alone, Squeeze(wide) if weighted else nn.Identity(), act(), *narrow)

    def forward(self, x: Tensor) -> Tensor:
        """With the input added where the shape stays."""
        return x + self.body(x) if self.keeps else self.body(x)


def mobilenet() -> nn.Module:
    """Inverted residuals as in MobileNetV2, narrow and few."""
    stem = [nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6()]
    shapes = ((8, 8, 1), (8, 16, 2), (16, 16, 1), (16, 32, 2), (32, 32, 1))
    blocks = [InvertedWithWeights(a, 4 * a, b, 3, stride, weighted=False, act=nn.ReLU6) for a, b, stride in shapes]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


# Kernel, channels in between, outputs, weighted, hard-swish, stride: Howard et al. (2019), table 1.
_LARGE = (
    (3, 16, 16, 0, 0, 1),
    (3, 64, 24, 0, 0, 2),
    (3, 72, 24, 0, 0, 1),
    (5, 72, 40, 1, 0, 2),
    (5, 120, 40, 1, 0, 1),
    (5, 120, 40, 1, 0, 1),
    (3, 240, 80, 0, 1, 2),
    (3, 200, 80, 0, 1, 1),
    (3, 184, 80, 0, 1, 1),
    (3, 184, 80, 0, 1, 1),
    (3, 480, 112, 1, 1, 1),
    (3, 672, 112, 1, 1, 1),
    (5, 672, 160, 1, 1, 2),
    (5, 960, 160, 1, 1, 1),
    (5, 960, 160, 1, 1, 1),
)


def mobilenet_v3_large() -> nn.Module:
    """MobileNetV3-Large with ten classes, by the table of Howard et al. (2019)."""
    stem = [nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.Hardswish()]
    blocks, inputs = list[nn.Module](), 16
    for kernel, wide, outputs, weighted, hard, stride in _LARGE:
        act = nn.Hardswish if hard else nn.ReLU
        blocks.append(InvertedWithWeights(inputs, wide, outputs, kernel, stride, weighted=bool(weighted), act=act))
        inputs = outputs
    last = [nn.Conv2d(inputs, 960, 1, bias=False), nn.BatchNorm2d(960), nn.Hardswish()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(960, 1280), nn.Hardswish(), nn.Linear(1280, 10)]
    return nn.Sequential(*stem, *blocks, *last, *head)


class Transformer(nn.Module):
    """Two layers that look back.

    Args:
        width: of the layers.
        hidden: of their dense part.
        heads: of their attention.
        tokens: of the vocabulary.
        length: of a sequence.
    """

    def __init__(self, width: int = 64, hidden: int = 128, heads: int = 4, tokens: int = 256, length: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, hidden, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(width, tokens)
        self.register_buffer("later", torch.ones(length, length, dtype=torch.bool).triu(1))

    def forward(self, tokens: Tensor) -> Tensor:
        """[n, length] to logits [n, length, tokens]."""
        x = self.tokens(tokens) + self.places.weight
        for layer in self.layers:
            x = layer(x, self.later)
        return self.head(x)


def word_loss(logits: Tensor, words: Tensor) -> Tensor:
    """Cross-entropy of [n, length, tokens] and [n, length]; along the last axis a GPU takes softmax in fast code."""
    return F.cross_entropy(logits.flatten(0, 1), words.flatten())
