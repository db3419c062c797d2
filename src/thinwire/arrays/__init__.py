# SPDX-License-Identifier: Apache-2.0
"""Many models as one array, many adapters of one base as one array, and sweeps over hyperparameters that use them."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Import `adapters` when it is first used."""
    if name != "adapters":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from thinwire.arrays.finetuning import adapters

    return adapters
