# SPDX-License-Identifier: Apache-2.0
"""LAMB on a mesh, with trust ratios from the norms of whole tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import ConfigError
from thinwire.methods.optimizers.lamb import Lamb, norms_of
from thinwire.tensor2d.mesh import Mesh2D
from thinwire.tensor2d.module import placed


class Lamb2D(Lamb):
    r"""Run `Lamb` with the serial model's trust ratios, from $|x|$ and $|u|$ of whole tensors.

    Each rank updates its block. One message for each batch of tensors all-reduces the squared norms of all blocks, two
    numbers per tensor; replicated parameters are counted in the first row only. Without a mesh this is `Lamb`, bit for
    bit.

    You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 Minutes, ICLR 2020, arXiv:1904.00962,
    Algorithm 2.

    Args:
        params: the parameters of `model`.
        lr: learning rate, as in `Lamb`.
        model: the model on the mesh.
        mesh: the ranks.
        settings: the other settings of `Lamb`, by name.

    Raises:
        ConfigError: a value is out of its range, or only one of model and mesh is given.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        *,
        model: nn.Module | None = None,
        mesh: Mesh2D | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(params, lr, **settings)
        if (model is None) != (mesh is None):
            raise ConfigError("Lamb2D: model and mesh belong together. Pass both, or neither for Lamb")
        self.mesh = mesh
        self.needs_whole_tensors = mesh is None
        parameters = {} if model is None else placed(model)
        self._replicated = {id(parameter) for parameter, placement in parameters.values() if placement.replicated}

    def _ratios(
        self, group: dict[str, Any], parameters: Sequence[Tensor], exact: list[Tensor], directions: list[Tensor]
    ) -> Tensor:
        if self.mesh is None:
            return super()._ratios(group, parameters, exact, directions)
        squares = torch.stack([norms_of(exact), norms_of(directions)]).square()
        if self.mesh.row > 0:
            # The first row counts replicated parameters; other rows send zeros, so that shapes are equal.
            counted_elsewhere = torch.tensor(
                [id(p) in self._replicated for p in parameters], dtype=torch.bool, device=squares.device
            )
            squares.masked_fill_(counted_elsewhere, 0)
        norms, update_norms = self.mesh.whole.all_reduce_(squares).wait().sqrt()
        bounded = (norms / update_norms).clamp(group["least_trust"], group["most_trust"])
        return torch.where((norms > 0) & (update_norms > 0), bounded, torch.ones_like(bounded))
