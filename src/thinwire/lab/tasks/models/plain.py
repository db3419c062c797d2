# SPDX-License-Identifier: Apache-2.0
"""Plain models: logistic regression, a multilayer perceptron, a small convolutional network."""

from itertools import pairwise

from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.nn import init

from thinwire.lab.tasks.models.base import Network, kaiming_


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


class BinaryLogistic(Network):
    """Logistic regression for two classes with one weight for each feature, not two.

    Args:
        features: how many numbers an example has.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Numbers, float [batch, features] to logits [batch, 2], the first of them 0.

        The cross entropy of (0, z) is the binary logistic loss of z.
        """
        return F.pad(self.linear(x), (1, 0))

    def initialise_(self, generator: Generator) -> None:
        """Zero."""
        init.zeros_(self.linear.weight)
        init.zeros_(self.linear.bias)


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
