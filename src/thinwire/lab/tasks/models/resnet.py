# SPDX-License-Identifier: Apache-2.0
"""Small residual networks for images of 32 x 32 (He et al. 2016, section 4.2), with BatchNorm."""

from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.nn import init

from thinwire.lab.tasks.models.base import Network, kaiming_

WIDTHS = (16, 32, 64)


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
