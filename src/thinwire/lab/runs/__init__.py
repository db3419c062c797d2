# SPDX-License-Identifier: Apache-2.0
"""Measured training runs of a recipe on a task: settings, workers and the run folder.

`resolve` completes settings, `launch` starts the workers on this machine, `compare` does so for several strategies.
Under `torchrun` each process calls `work` instead. Names are imported when they are first used, so that the command
line can read `Settings` without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thinwire.lab.runs.comparison import Comparison, compare
    from thinwire.lab.runs.defaults import resolve
    from thinwire.lab.runs.folder import RunFolder
    from thinwire.lab.runs.launcher import launch
    from thinwire.lab.runs.live import Status, status
    from thinwire.lab.runs.live_bucket import bucket_status
    from thinwire.lab.runs.recipes import Recipe, parse_recipe
    from thinwire.lab.runs.rows import Row, load
    from thinwire.lab.runs.settings import Settings
    from thinwire.lab.runs.worker import work

# No module here may have the name of a public function: importing the module would replace the function.
_MODULES = {
    "Comparison": "comparison",
    "Recipe": "recipes",
    "RunFolder": "folder",
    "Row": "rows",
    "Settings": "settings",
    "Status": "live",
    "bucket_status": "live_bucket",
    "compare": "comparison",
    "launch": "launcher",
    "load": "rows",
    "parse_recipe": "recipes",
    "resolve": "defaults",
    "status": "live",
    "work": "worker",
}

__all__ = [
    "Comparison",
    "Recipe",
    "Row",
    "RunFolder",
    "Settings",
    "Status",
    "bucket_status",
    "compare",
    "launch",
    "load",
    "parse_recipe",
    "resolve",
    "status",
    "work",
]


def __getattr__(name: str) -> object:
    """Import a public name from where it is defined, once."""
    if name not in _MODULES:
        raise AttributeError(f"module 'thinwire.lab.runs' has no attribute {name!r}")
    value: object = getattr(import_module(f"thinwire.lab.runs.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
