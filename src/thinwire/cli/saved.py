# SPDX-License-Identifier: Apache-2.0
"""Folders of runs that are named to go on from: what to say where there is none, or where nothing was saved."""

from __future__ import annotations

from pathlib import Path

from thinwire.errors import ConfigError


def check_folder(folder: Path, argument: str, fix: str) -> None:
    """Refuse a folder that is not there.

    Args:
        folder: that should be there.
        argument: what was given, for the error.
        fix: what to give instead, for the error.

    Raises:
        ConfigError: there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"{argument}: {'is a file, and no folder' if folder.exists() else 'no such folder'}. {fix}")


def check_saved(folder: Path, argument: str) -> None:
    """Refuse the folder of a run that has saved nothing.

    Raises:
        ConfigError: with the option that would have saved it.
    """
    from thinwire.lab.runs import RunFolder

    if not (folder / "settings.json").exists() or any(RunFolder(folder).checkpoints.glob("*")):
        return
    every = RunFolder(folder).settings().save_every
    if every is None:
        raise ConfigError(f"{argument}: this run was not saved. Train with --save-every N")
    raise ConfigError(f"{argument}: this run has saved nothing yet (--save-every {every}). Wait for it, or train again")
