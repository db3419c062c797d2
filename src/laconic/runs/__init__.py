"""A training run of a recipe on a task, measured: its settings, its workers, its folder.

`resolve` fills in what was left open, `launch` starts the workers on this machine, `compare` does so for several
strategies. Under `torchrun` each process calls `work` instead.
"""

from laconic.runs.comparison import Comparison, compare
from laconic.runs.driver import launch
from laconic.runs.folder import RunFolder
from laconic.runs.recipes import Recipe, parse_recipe
from laconic.runs.resolve import resolve
from laconic.runs.settings import Settings
from laconic.runs.worker import work

__all__ = ["Comparison", "Recipe", "RunFolder", "Settings", "compare", "launch", "parse_recipe", "resolve", "work"]
