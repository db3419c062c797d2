# SPDX-License-Identifier: Apache-2.0
"""A transformer on a mesh of workers that share a GPU has the serial model's loss, gradients and training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from tests.oracles.tensor2d import tokens
from tests.tensor2d.helpers import gpt, parallelized
from thinwire.tensor2d import Mesh2D, Panels, clip_gradient_norm_, cross_entropy_2d, run_mesh_threads, whole_state

STEPS = 3
# On a machine without a GPU the same is asked of the CPU, so that these tests are known to run.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu


def serial() -> tuple[list[float], dict[str, Tensor]]:
    model, losses = gpt(), list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    for step in range(STEPS):
        ids, targets = tokens(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("panels", [Panels(), Panels(2)], ids=repr)
@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (1, 3)])
@pytest.mark.slow
def test_a_mesh_trains_as_the_serial_model(rows: int, columns: int, panels: Panels) -> None:
    def work(mesh: Mesh2D) -> tuple[list[float], dict[str, Any]]:
        model, losses = parallelized(mesh).to(DEVICE), list[float]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
        for step in range(STEPS):
            ids, targets = (mesh.rows_of(x).to(DEVICE) for x in tokens(step))
            optimizer.zero_grad()
            loss = cross_entropy_2d(model(ids), targets, mesh)
            loss.backward()
            clip_gradient_norm_(model, 0.5, mesh)
            optimizer.step()
            losses.append(loss.item())
        return losses, whole_state(model, mesh)

    losses, parameters = serial()
    for found, state in run_mesh_threads(rows, columns, work, panels=panels, timeout=60):
        assert found == pytest.approx(losses, rel=1e-9)
        for name, expected in parameters.items():
            torch.testing.assert_close(state[name].cpu(), expected, rtol=1e-7, atol=1e-9)
