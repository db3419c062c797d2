# SPDX-License-Identifier: Apache-2.0
"""A recipe of thinwire, with its outer rate in the place of `{outer}`."""

import os

import torch
from torch.distributed import TCPStore
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import thinwire


class Racer:
    """The strategy of a recipe.

    With `muon`, Muon updates the matrices of the blocks, and AdamW everything else. With `elastic`, workers may be lost
    and join again; the store is with rank 0.
    """

    joined_step = 0

    def __init__(self, recipe, outer=None, muon=False, elastic=False):
        self.elastic = elastic
        self.recipe = recipe if outer is None else recipe.replace("{outer}", f"{outer:g}")
        self.worker = None
        if muon:
            self.optimizer = self.muon_and_adamw

    @property
    def sent(self):
        """The payload of the strategy."""
        return self.worker.stats().payload_bytes + self.worker.stats().evaluation_bytes

    def muon_and_adamw(self, model, rate):
        """Muon with AdamW's rate, by the scale that makes their updates alike."""
        matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
        held = {id(p) for p in matrices}
        others = [p for p in model.parameters() if id(p) not in held]
        muon = torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
        return thinwire.CombinedOptimizer(muon, adamw)

    def setup(self, model, optimizer):
        """Attach the strategy."""
        self.model, self.adamw = model, optimizer
        if self.elastic:
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            os.environ["THINWIRE_STORE"] = f"{address}:{port}"
            if os.environ["RANK"] == "0":
                self.store = TCPStore(address, port, is_master=True, wait_for_workers=False)
        self.worker = thinwire.attach(model, optimizer, self.recipe, timeout=900.0, elastic=self.elastic)
        self.joined_step = self.worker.step

    def step(self, loss):
        """A step as in any loop."""
        loss.backward()
        self.adamw.step()

    def finish(self):
        """Take the average that all workers agree on."""
        with self.worker.consensus() as model, torch.no_grad():
            mean = parameters_to_vector(model.parameters()).clone()
        with torch.no_grad():
            vector_to_parameters(mean, self.model.parameters())
