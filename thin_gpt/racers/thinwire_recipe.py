# SPDX-License-Identifier: Apache-2.0
"""A recipe of thinwire, with its outer rate in the place of `{outer}`."""

import os

import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import thinwire


class Racer:
    """The strategy of a recipe.

    With `muon`, Muon updates the matrices of the blocks, and AdamW everything else. With `elastic`, workers may be lost
    and join again; the store is with rank 0. With `late`, rounds also close without late workers. A dict has recipes by
    the step from which they are used.
    """

    progress = 0

    def __init__(self, recipe, outer=None, muon=False, elastic=False, late=False):
        codec = thinwire.ErrorFeedback(thinwire.Nearest(bits=4))
        self.elastic, self.late = thinwire.LateMerging(quorum=0.5, codec=codec) if late else elastic, late
        self.size = int(os.environ["WORLD_SIZE"])
        recipes = recipe if isinstance(recipe, dict) else {0: recipe}
        # `outer` is None if no recipe has the field.
        self.recipes = {step: each.replace("{outer}", f"{outer}") for step, each in recipes.items()}
        self.worker = None
        if muon:
            self.optimizer = self.muon_and_adamw

    @property
    def sent(self):
        """The payload of the strategy. The others each read a late round's messages from the store."""
        stats = self.worker.stats()
        return stats.payload_bytes * (self.size - 1 if self.late else 1) + stats.evaluation_bytes

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
            self.store = TCPStore(address, port, is_master=os.environ["RANK"] == "0", wait_for_workers=False)
        self.worker = thinwire.attach(model, optimizer, self.recipes[0], timeout=900.0, elastic=self.elastic)
        self.progress = self.worker.step

    def step(self, loss):
        """A step as in any loop."""
        loss.backward()
        self.adamw.step()
        self.progress = self.worker.step
        if self.progress in self.recipes:
            self.worker.switch(self.recipes[self.progress])

    def finish(self):
        """Take the average that all workers agree on."""
        with self.worker.consensus() as model, torch.no_grad():
            mean = parameters_to_vector(model.parameters()).clone()
        if self.late:
            self.worker.detach()
            dist.init_process_group("gloo", store=self.store, rank=int(os.environ["RANK"]), world_size=self.size)
            # Rank 0 is not late.
            dist.broadcast(mean, 0)
        with torch.no_grad():
            vector_to_parameters(mean, self.model.parameters())
