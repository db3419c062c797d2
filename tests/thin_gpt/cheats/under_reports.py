# SPDX-License-Identifier: Apache-2.0
"""Claims a tenth of the bytes."""

from pathlib import Path

from thin_gpt.worker import load_racer

Honest = type(load_racer(str(Path(__file__).with_name("honest.py")), {}))


class Racer(Honest):
    def exchange(self):
        before = self.sent
        super().exchange()
        self.sent = before + (self.sent - before) / 10
