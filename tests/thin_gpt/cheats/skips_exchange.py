# SPDX-License-Identifier: Apache-2.0
"""Sends nothing."""

from pathlib import Path

from thin_gpt.worker import load_racer

Honest = type(load_racer(str(Path(__file__).with_name("honest.py")), {}))


class Racer(Honest):
    def exchange(self):
        pass
