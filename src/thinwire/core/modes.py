# SPDX-License-Identifier: Apache-2.0
"""Training and evaluation mode of modules."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(*roots: nn.Module) -> Generator[None]:
    """Put models into evaluation mode; afterwards restore the mode of every module."""
    # Module by module: parts of a model may be in evaluation mode on purpose.
    modes = {module: module.training for root in roots for module in root.modules()}
    for root in roots:
        root.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
