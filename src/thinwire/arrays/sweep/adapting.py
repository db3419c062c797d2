# SPDX-License-Identifier: Apache-2.0
"""Sweeps over adapters of one base: their targets, and each trial's adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from thinwire.arrays.finetuning.array import AdapterArray
from thinwire.arrays.finetuning.peft_members import peft
from thinwire.arrays.sweep.setting import Setting
from thinwire.arrays.sweep.trials import Trial
from thinwire.errors import ConfigError

ADAPTED = ("rank", "lora_alpha", "lora_dropout", "adapter_seed")
"""The hyperparameters of adapters; members of one array may differ in all of them."""


@dataclass(frozen=True)
class Adapting:
    """Train adapters of LoRA around the task's model, which stays frozen.

    Args:
        targets: names of the adapted layers, as in `LoraConfig.target_modules`; empty takes PEFT's for the model.
        folder: where each trial that was not stopped is saved, as a folder of PEFT `trial-N`; None saves none.
    """

    targets: tuple[str, ...] = ()
    folder: Path | None = None

    def array(self, base: nn.Module, settings: Sequence[Setting]) -> AdapterArray:
        """Make the array of the trials with these settings.

        Raises:
            ConfigError: the model has no layer with these names, or another reason of `thinwire.adapters`.
        """
        configs = [self._config(each) for each in settings]
        try:
            return AdapterArray(base, configs, seeds=[int(each.adapter_seed) for each in settings])
        except ConfigError as error:
            if error.__cause__ is None:
                raise
            # PEFT's own, such as an unknown name of a layer.
            raise ConfigError(
                f"--targets {','.join(self.targets)}: {error.__cause__}. Name layers of the model"
            ) from error

    def _config(self, setting: Setting) -> Any:
        return peft().LoraConfig(
            r=int(setting.rank),
            lora_alpha=setting.lora_alpha if setting.lora_alpha is not None else 2 * setting.rank,
            lora_dropout=setting.lora_dropout,
            target_modules=list(self.targets) or None,
        )

    def save(self, array: AdapterArray, trials: Sequence[Trial]) -> None:
        """Save the members of an array, one per trial."""
        for slot, trial in enumerate(trials if self.folder is not None else ()):
            assert self.folder is not None
            array.save_pretrained(self.folder / f"trial-{trial.number}", slot)
