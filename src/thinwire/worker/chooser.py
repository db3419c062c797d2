# SPDX-License-Identifier: Apache-2.0
"""The strategy of `attach(..., "auto")`, chosen by a planner that is registered here.

To predict a strategy the planner attaches workers, so this package cannot import it. `thinwire/__init__.py` registers
it. This module imports neither torch nor the planner, because `import thinwire` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from thinwire.core.comm.base import Comm
    from thinwire.methods.strategies.base import Strategy

Watch = Callable[[Any], object]
"""Called with the attached `Worker`; it may measure the first steps and switch to another strategy."""
Chooser = Callable[["Optimizer", "Mapping[str, nn.Parameter]", "Comm"], "tuple[Strategy, Watch | None]"]
"""Every rank calls it with the optimizer, the trained parameters and the comm; all get the same strategy."""

_registered: list[Callable[[], Chooser]] = []


def register_chooser(load: Callable[[], Chooser]) -> None:
    """Register the function that chooses a strategy for "auto".

    Args:
        load: imports the planner and returns its chooser; called when a worker asks for it.
    """
    _registered[:] = [load]


def choose_strategy(
    optimizer: Optimizer, named: Mapping[str, nn.Parameter], comm: Comm
) -> tuple[Strategy, Watch | None]:
    """Choose a strategy for these ranks, which have agreed that all ask for one.

    Returns:
        The strategy, and what to call with the worker once it is attached; None for nothing.
    """
    (load,) = _registered
    return load()(optimizer, named, comm)
