# SPDX-License-Identifier: Apache-2.0
"""PEFT's adapters: the workers exchange them alone, and PEFT saves them as always."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import thinwire

peft = pytest.importorskip("peft", reason="needs peft")
pytestmark = pytest.mark.slow


def test_adapters_alone_are_sent_and_saved(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    def train(comm: thinwire.Comm) -> tuple[int, bool]:
        torch.manual_seed(0)
        base = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0", "2"]))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
        worker = thinwire.attach(model, optimizer, "LocalSGD(period=2)", comm=comm)
        for _ in range(4):
            model(torch.full((3, 8), 1.0 + comm.rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with worker.consensus() as agreed:
            if comm.rank == 0:
                agreed.save_pretrained(tmp_path)
            state = peft.get_peft_model_state_dict(agreed)
            found = {name: x.detach().clone() for name, x in state.items()}
        saved = load_file(tmp_path / "adapter_model.safetensors") if comm.rank == 0 else found
        same = saved.keys() == found.keys() and all(torch.equal(x, saved[name]) for name, x in found.items())
        return sum(len(replica.x) for replica in worker.replicas), same

    adapters = 2 * (8 + 8) + 2 * (8 + 2)
    assert thinwire.run_threads(2, train) == [(adapters, True)] * 2
