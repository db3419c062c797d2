# SPDX-License-Identifier: Apache-2.0
"""Puts the weights of another run into the model at the end."""

from pathlib import Path

import torch

from thin_gpt.worker import load_racer

Honest = type(load_racer(str(Path(__file__).with_name("honest.py")), {}))


class Racer(Honest):
    def __init__(self, weights):
        self.weights = weights

    def finish(self):
        torch.nn.utils.vector_to_parameters(torch.load(self.weights), self.model.parameters())
