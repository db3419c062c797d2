# SPDX-License-Identifier: Apache-2.0
r"""Proxies of the gradients of single points, at the cost of one forward pass.

One point can represent another if their gradients are similar. For a convex loss of a linear model the distance between
gradients is bounded by that between features. For a deep network under softmax cross entropy the gradient of the last
layer is the usual proxy: with probabilities $p$, target $y$ and the layer's input $h$, its gradient is

$$g = (p - y) \otimes [h; 1],$$

an outer product. It is never stored: distances need $|p_i-p_j|$, $|h_i-h_j|$ and norms only.

Mirzasoleiman, Bilmes and Leskovec, Coresets for Data-efficient Training of Machine Learning Models, ICML 2020,
arXiv:1906.01827, sections 3.2 and 3.4.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, default_collate

from thinwire.core.modes import evaluation_mode
from thinwire.errors import ConfigError, NonFiniteError

IGNORED = -100
"""A target that is ignored, as in `torch.nn.functional.cross_entropy`."""

Read = Callable[[Tensor], tuple[Tensor, ...]]
"""From the numbers of points, int64 [m], to the model's inputs and, last, their classes [m].

It must return points without augmentation, in the order of the numbers.
"""


@dataclass(frozen=True, eq=False)
class LastLayer:
    """The gradient of every point's loss with respect to the last layer, as the two factors of an outer product.

    Args:
        residuals: float, [n, classes]; probabilities minus the target, the gradient with respect to the logits.
        labels: int64, [n].
        hidden: float, [n, width], the input of the layer; None for gradients with respect to the logits.
    """

    residuals: Tensor
    labels: Tensor
    hidden: Tensor | None = None

    def __len__(self) -> int:
        return len(self.residuals)

    def at(self, rows: Tensor) -> LastLayer:
        """Return the gradients of some of the points."""
        rows = rows.to(self.residuals.device)
        hidden = None if self.hidden is None else self.hidden[rows]
        return LastLayer(self.residuals[rows], self.labels[rows], hidden)

    def norms(self) -> Tensor:
        """Return the length of every point's gradient, [n]."""
        length = self.residuals.norm(dim=1)
        return length if self.hidden is None else length * (1 + self.hidden.square().sum(1)).sqrt()

    def total(self, weights: Tensor | None = None) -> Tensor:
        """Return the weighted sum of all gradients, float64 [classes] or [classes, width + 1]."""
        # In fp64, because the sum of all gradients is much smaller than its terms near an optimum.
        residuals = self.residuals.double()
        if weights is not None:
            residuals = residuals * weights.to(residuals)[:, None]
        if self.hidden is None:
            return residuals.sum(0)
        return torch.cat([residuals.T @ self.hidden.double(), residuals.sum(0)[:, None]], dim=1)

    def distances(self) -> OuterDistances:
        """Return the distances between gradients, for `thinwire.coreset.select`."""
        return OuterDistances(self.residuals, self.hidden)

    def preconditioned(self, moments: Tensor, eps: float = 1e-8) -> LastLayer:
        r"""The gradients as an adaptive optimizer scales them, divided by $\sqrt v$.

        The result is an outer product only if $v$ is one: with hidden values, $v$ is replaced by the product of its row
        and column means over its mean, as in Adafactor (Shazeer and Stern 2018, arXiv:1804.04235), which is exact for
        a $v$ of rank one. For the logits alone, the moments of the bias are the exact ones.

        Args:
            moments: Adam's second moments: of the layer's weight and bias side by side, [classes, width + 1]; for
                the logits alone of its bias, [classes].
            eps: added to the square root, as Adam does.

        Raises:
            ConfigError: the shape is another.
        """
        classes = self.residuals.shape[1]
        wanted = (classes,) if self.hidden is None else (classes, self.hidden.shape[1] + 1)
        if tuple(moments.shape) != wanted:
            raise ConfigError(f"moments of shape {tuple(moments.shape)}: this layer has {wanted}")
        if self.hidden is None:
            return replace(self, residuals=self.residuals / (moments.sqrt() + eps))
        rows, columns = moments.mean(1), moments.mean(0) / moments.mean().clamp_min(torch.finfo(moments.dtype).tiny)
        last = columns[-1].sqrt() + eps
        # The input of the bias must stay 1, so its scale moves to the residuals.
        residuals = self.residuals / (rows.sqrt() + eps) / last
        return replace(self, residuals=residuals, hidden=self.hidden / (columns[:-1].sqrt() + eps) * last)


class OuterDistances:
    r"""Euclidean distances between outer products $a_i \otimes [h_i; 1]$ that are never stored.

    With $d=a_i-a_j$, $\delta=h_i-h_j$ and $m$, $\mu$ the means of the two, the difference is
    $d\otimes\mu + m\otimes\delta$, so that its square is
    $|d|^2|\mu|^2 + |m|^2|\delta|^2 + \tfrac12(|a_i|^2-|a_j|^2)(|h_i|^2-|h_j|^2)$, where all terms vanish for equal
    points. Differences are taken between centred factors, so that common offsets cost no digits.

    Args:
        left: float, [n, classes]; the $a_i$.
        right: float, [n, width]; the $h_i$, without the 1; None for distances between the $a_i$ alone.
    """

    def __init__(self, left: Tensor, right: Tensor | None = None) -> None:
        self.n = len(left)
        self._given = left, right
        self._left = left - left.mean(0)
        self._left_size = left.square().sum(1)
        self._right = None if right is None else right - right.mean(0)
        self._right_size = None if right is None else 1 + right.square().sum(1)

    def at(self, members: Tensor) -> OuterDistances:
        """Return the distances among some of the points, int64 [m], renumbered in their order."""
        left, right = self._given
        rows = members.to(left.device)
        return OuterDistances(left[rows], None if right is None else right[rows])

    def between(self, candidates: Tensor) -> Tensor:
        """Return the distance of every point to each of the candidates, [n, m]; to itself exactly 0.

        Args:
            candidates: int64, [m]; numbers of points.
        """
        chosen = candidates.to(self._left.device)
        squares = _squared_gaps(self._left, chosen)
        if self._right is not None and self._right_size is not None:
            across = _squared_gaps(self._right, chosen)
            a, b = self._left_size[:, None], self._left_size[chosen]
            h, k = self._right_size[:, None], self._right_size[chosen]
            # |mu|^2 and |m|^2 follow from the parallelogram law, so that the means are not computed.
            squares = (
                squares * (2 * (h + k) - across) / 4 + across * (2 * (a + b) - squares) / 4 + (a - b) * (h - k) / 2
            )
        # Rounding may make squares of near points negative, or that of a point to itself positive.
        squares = squares.clamp_min_(0)
        squares[chosen, torch.arange(len(chosen), device=chosen.device)] = 0
        return squares.sqrt_()


def _squared_gaps(x: Tensor, chosen: Tensor) -> Tensor:
    """Squared distances of rows to the chosen ones, [n, m]."""
    # One matrix product; the differences themselves would take n times m times d numbers.
    size = x.square().sum(1)
    return torch.addmm(size[:, None] + size[chosen], x, x[chosen].T, alpha=-2).clamp_min_(0)


def last_layer(
    model: nn.Module,
    read: Read,
    rows: Tensor,
    *,
    hidden: bool = False,
    head: nn.Module | None = None,
    batch_size: int = 512,
) -> LastLayer:
    """Return the last-layer gradients of these points under the current model, in the order of `rows`.

    The model runs in evaluation mode and without gradients; modes are restored, and neither running statistics nor
    parameters change.

    Args:
        model: from inputs to logits [batch, classes].
        read: returns points without augmentation.
        rows: int64, [m]; numbers of points.
        hidden: whether to store the input of the last layer too.
        head: the last layer; None is the last `nn.Linear` of the model.
        batch_size: points read at a time.

    Raises:
        ConfigError: the model has no linear layer, or does not return one row of logits for each point.
        NonFiniteError: a logit is NaN or infinite.
    """
    pieces: list[LastLayer] = []
    seen_by = _inputs_of(head or (head_of(model) if hidden else None))
    with evaluation_mode(model), torch.no_grad(), seen_by as seen:
        for part in rows.split(batch_size):
            seen.clear()
            pieces.append(_piece(model, read(part), len(part), seen if hidden else None))
    kept = [piece.hidden for piece in pieces if piece.hidden is not None]
    return LastLayer(
        torch.cat([piece.residuals for piece in pieces]),
        torch.cat([piece.labels for piece in pieces]),
        torch.cat(kept) if kept else None,
    )


def head_of(model: nn.Module) -> nn.Linear:
    """Return the last `nn.Linear` of a model.

    Raises:
        ConfigError: it has none.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not layers:
        raise ConfigError(f"{type(model).__name__} has no nn.Linear. Name its last layer with head=, or use logits")
    return layers[-1]


def reader(dataset: Dataset[tuple[Tensor | int, ...]]) -> Read:
    """Read points of a map-style data set, one by one and collated; the data set must not augment them."""
    return lambda rows: tuple(default_collate([dataset[row] for row in rows.tolist()]))


def features(read: Read, rows: Tensor, *, batch_size: int = 4096) -> tuple[Tensor, Tensor]:
    """The points themselves, float [m, d], and their classes [m]: the proxy of a convex loss of a linear model."""
    pieces = [read(part) for part in rows.split(batch_size)]
    return torch.cat([piece[0].flatten(1).float() for piece in pieces]), torch.cat([piece[-1] for piece in pieces])


def _piece(model: nn.Module, batch: tuple[Tensor, ...], count: int, seen: list[Tensor] | None) -> LastLayer:
    device = next(model.parameters()).device
    *inputs, targets = (tensor.to(device) for tensor in batch)
    logits: Tensor = model(*inputs)
    if logits.ndim != 2 or len(logits) != count or targets.shape != (count,):
        raise ConfigError(
            f"logits {list(logits.shape)} and targets {list(targets.shape)} for {count} points: "
            "a coreset needs one row of logits and one class a point"
        )
    if not bool(torch.isfinite(logits).all()):
        raise NonFiniteError("a logit is NaN or infinite, so gradients cannot be compared. Lower the learning rate")
    if seen is not None and (len(seen) != 1 or seen[0].ndim != 2 or len(seen[0]) != count):
        shapes = [list(x.shape) for x in seen]
        raise ConfigError(f"the last layer was given {shapes} for {count} points: it must run once for each point")
    counted = targets != IGNORED
    # one_hot refuses negative classes; the points of ignored targets are masked below.
    residuals = logits.float().softmax(1) - F.one_hot(targets.clamp_min(0), logits.shape[1])
    return LastLayer(residuals * counted[:, None], targets, None if seen is None else seen[0].float())


@contextmanager
def _inputs_of(head: nn.Module | None) -> Generator[list[Tensor]]:
    """Collect the inputs of a layer."""
    seen: list[Tensor] = []
    if head is None:
        yield seen
        return

    def record(_: nn.Module, inputs: Iterable[Tensor]) -> None:
        seen.extend(inputs)

    handle = head.register_forward_pre_hook(record)
    try:
        yield seen
    finally:
        handle.remove()
