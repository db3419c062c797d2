# SPDX-License-Identifier: Apache-2.0
"""Classifiers: logistic regression, a multilayer perceptron, convolutional networks, and the mean of a text's words."""

from itertools import pairwise

from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.nn import init

from thinwire.lab.tasks.models.base import Network, kaiming_

WIDTHS = (16, 32, 64)


class Logistic(Network):
    """Multinomial logistic regression, a convex problem.

    Args:
        features: how many numbers an example has.
        classes: how many.
    """

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Numbers, float [batch, ...] to logits [batch, classes]."""
        return self.linear(x.flatten(1))

    def initialise_(self, generator: Generator) -> None:
        """Zero, where every class is equally likely."""
        init.zeros_(self.linear.weight)
        init.zeros_(self.linear.bias)


class BinaryLogistic(Logistic):
    """Logistic regression for two classes with one weight for each feature, not two.

    Args:
        features: how many numbers an example has.
    """

    def __init__(self, features: int) -> None:
        super().__init__(features, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Numbers, float [batch, features] to logits [batch, 2], the first of them 0.

        The cross entropy of (0, z) is the binary logistic loss of z.
        """
        return F.pad(super().forward(x), (1, 0))


class Perceptron(Network):
    """Linear layers with ReLUs between them.

    Args:
        widths: features, hidden widths, classes.
    """

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        """Numbers, float [batch, ...] to logits [batch, classes]."""
        *hidden, last = self.layers
        x = x.flatten(1)
        for layer in hidden:
            x = F.relu(layer(x))
        return last(x)

    def initialise_(self, generator: Generator) -> None:
        """See `kaiming_`."""
        kaiming_(self, generator)


class Convolutional(Network):
    """Two convolutions, each followed by pooling that halves the image, and two linear layers.

    Args:
        channels: of an image.
        side: of an image, a multiple of 4.
        width: channels of the first convolution; the second has twice as many.
        classes: how many.
    """

    def __init__(self, *, channels: int, side: int, width: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        self.second = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.hidden = nn.Linear(2 * width * (side // 4) ** 2, 4 * width)
        self.head = nn.Linear(4 * width, classes)

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels, float [batch, channels, side, side] to logits [batch, classes]."""
        x = F.max_pool2d(F.relu(self.first(pixels)), 2)
        x = F.max_pool2d(F.relu(self.second(x)), 2)
        return self.head(F.relu(self.hidden(x.flatten(1))))

    def initialise_(self, generator: Generator) -> None:
        """See `kaiming_`."""
        kaiming_(self, generator)


# -- residual networks -------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut, which is a 1 x 1 convolution where the shape changes.

    Args:
        channels: in.
        width: channels out.
        stride: of the first convolution.
    """

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)
        same = channels == width and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels, height, width] to [batch, width, height / stride, width / stride]."""
        hidden = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(hidden)) + self.shortcut(x))


class ResNet(Network):
    """A convolution, three stages of residual blocks at 16, 32 and 64 channels, a mean, a linear layer.

    Args:
        depth: layers with weights on the longest path: 8, 14, 20 and so on.
        channels: of an image.
        classes: how many.
    """

    def __init__(self, depth: int, *, channels: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, WIDTHS[0], 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(WIDTHS[0])
        blocks: list[Residual] = []
        width_in = WIDTHS[0]
        for width in WIDTHS:
            # A block has two layers, there are three stages, and two layers lie outside the blocks.
            for _ in range((depth - 2) // 6):
                blocks.append(Residual(width_in, width, stride=1 if width == width_in else 2))
                width_in = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(WIDTHS[-1], classes)

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels, float [batch, channels, height, width] to logits [batch, classes]."""
        hidden = self.blocks(F.relu(self.stem_norm(self.stem(pixels))))
        return self.head(hidden.mean((2, 3)))

    def initialise_(self, generator: Generator) -> None:
        """See `kaiming_`; every residual block starts as its shortcut, because its last norm is zero."""
        kaiming_(self, generator)
        for block in self.blocks:
            assert isinstance(block, Residual)
            init.zeros_(block.second_norm.weight)


class WordBag(Network):
    """The mean of a text's word vectors, and a linear layer; word 0 is padding.

    Args:
        vocabulary: how many words.
        width: of a word vector.
        classes: how many.
    """

    def __init__(self, vocabulary: int, width: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, classes)

    def forward(self, words: Tensor) -> Tensor:
        """int64 [batch, length] to logits [batch, classes]."""
        weights = (words != 0).unsqueeze(-1).float()
        return self.head((self.embedding(words) * weights).sum(1) / weights.sum(1).clamp(min=1))

    def initialise_(self, generator: Generator) -> None:
        """Normal, of deviation 0.1 for the words and 1 / sqrt(width) for the head."""
        init.normal_(self.embedding.weight, std=0.1, generator=generator)
        init.normal_(self.head.weight, std=self.head.in_features**-0.5, generator=generator)
        init.zeros_(self.head.bias)
