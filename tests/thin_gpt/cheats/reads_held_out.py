# SPDX-License-Identifier: Apache-2.0
"""Reads the files of the held-out text."""

import contextlib
import os
import sysconfig
from pathlib import Path

from thin_gpt.worker import load_racer

Honest = type(load_racer(str(Path(__file__).with_name("honest.py")), {}))


class Racer(Honest):
    def setup(self, model, optimizer):
        super().setup(model, optimizer)
        self.read = 0
        for folder, _, files in os.walk(sysconfig.get_path("stdlib")):
            for name in files:
                if name.endswith(".py"):
                    # The descriptor's number alone is no evidence; the bytes are.
                    with contextlib.suppress(OSError):
                        self.read += len(Path(folder, name).read_bytes())
