# SPDX-License-Identifier: Apache-2.0
"""Measured training runs of a recipe on a task: settings, workers and the run folder.

`resolve` completes settings, `launch` starts the workers on this machine, `compare` does so for several strategies.
Under `torchrun` each process calls `work` instead. Names are imported when they are first used, so that the command
line can read `Settings` without importing torch.
"""

from typing import TYPE_CHECKING

from thinwire.core.lazy import importer, public_names

# No module here may have the name of a public function: importing the module would replace the function.
if TYPE_CHECKING:
    from thinwire.lab.runs.comparison import Comparison as Comparison
    from thinwire.lab.runs.comparison import compare as compare
    from thinwire.lab.runs.defaults import resolve as resolve
    from thinwire.lab.runs.folder import RunFolder as RunFolder
    from thinwire.lab.runs.launcher import launch as launch
    from thinwire.lab.runs.live import Status as Status
    from thinwire.lab.runs.live import status as status
    from thinwire.lab.runs.live_bucket import bucket_status as bucket_status
    from thinwire.lab.runs.recipes import Recipe as Recipe
    from thinwire.lab.runs.recipes import parse_recipe as parse_recipe
    from thinwire.lab.runs.rows import Row as Row
    from thinwire.lab.runs.rows import load as load
    from thinwire.lab.runs.settings import Settings as Settings
    from thinwire.lab.runs.worker import work as work

__getattr__ = importer(__name__, public_names(__file__))
