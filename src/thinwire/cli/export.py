# SPDX-License-Identifier: Apache-2.0
"""`thinwire export`: the weights of a run as one safetensors file."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from thinwire.cli.console import out, print_json
from thinwire.cli.options import check_folder, check_saved
from thinwire.errors import ConfigError
from thinwire.planning.units import workers


@dataclass(frozen=True)
class Export:
    """Write the model that a run's workers agreed on, as its newest checkpoint has it, to one safetensors file.

    Example: thinwire export runs/long model.safetensors

    The file holds what the model's state_dict() held, by the same names, and needs no thinwire:
    model.load_state_dict(safetensors.torch.load_file("model.safetensors")). All workers' parts of the checkpoint must
    be there.

    Args:
        source: the folder of a run that was saved, of checkpoints, or one checkpoint.
        target: the file; one that is there is replaced.
        json: print what was exported as JSON.
    """

    source: Path
    target: Path
    _: KW_ONLY
    json: bool = False

    def __call__(self) -> int:
        """Export; returns 0.

        Raises:
            ConfigError: the file's name is not that of a safetensors file, or nothing was saved.
        """
        from thinwire.lab.runs.exporting import export_checkpoint

        if self.target.suffix != ".safetensors":
            raise ConfigError(
                f"{self.target}: must end in .safetensors, such as {self.target.with_suffix('.safetensors')}"
            )
        check_folder(self.source, f"{self.source}", "Give that of a run that was trained with --save-every")
        check_saved(self.source, f"{self.source}")
        found = export_checkpoint(self.source, self.target)
        if self.json:
            print_json(found)
            return 0
        out.print(
            f"{found.path}: step {found.step} of {workers(found.workers)} under {found.strategy}, "
            f"{found.elements:,} numbers in {found.tensors} tensors"
        )
        return 0
