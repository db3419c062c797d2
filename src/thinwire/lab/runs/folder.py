# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: settings, metrics, results and checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError
from thinwire.lab.report.files import json_lines, json_object, write_text
from thinwire.lab.report.folder import step_of
from thinwire.lab.report.runs import Step
from thinwire.lab.runs.settings import CONFIG_FILE, Settings, read_settings, settings_as_toml

Fields = dict[str, Any]


class RunFolder:
    """One run's files.

    `settings.json` is enough to start the run again, `run.toml` holds the same as options of the command line;
    `config.json` is for readers; `metrics.jsonl`, `workers.jsonl` and `timeline.jsonl` grow line by line; `links.json`
    and `summary.json` are written at the end; `--resume` reads `checkpoints/`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    def create(self) -> None:
        """Create the folder, empty.

        Raises:
            ConfigError: it cannot be created, or it holds a run already.
        """
        # No settings tell of a simulated run, so its own files do.
        if any((self.path / name).exists() for name in ("settings.json", "config.json", "comparison.json")):
            raise ConfigError(
                f"{self.path} holds a run already. Name another folder with --out, or resume a run with --resume"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be created ({error.strerror}). Name a folder you may write to"
            ) from None

    def write_settings(self, settings: Settings) -> None:
        """Write the settings, for the workers and for resuming, and as options of `thinwire train --config`."""
        write_text(self.path / CONFIG_FILE, settings_as_toml(settings))
        self.write("settings.json", settings.to_json())

    def settings(self) -> Settings:
        """Read the settings.

        Raises:
            CheckpointError: there are none.
        """
        return read_settings(self.path / "settings.json")

    def write(self, name: str, content: Any) -> None:
        """Write one JSON file, atomically.

        Raises:
            ConfigError: it cannot be written.
        """
        write_text(self.path / name, json.dumps(content, indent=2) + "\n")

    def append(self, name: str, lines: Iterable[Fields]) -> None:
        """Add lines to a JSON-lines file and flush them."""
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def lines(self, name: str) -> list[Fields]:
        """Return the lines of a JSON-lines file; see `json_lines`."""
        return [dict(line) for line in json_lines(self.path / name)[0] or ()]

    def records(self) -> list[Step]:
        """Return the steps that were written."""
        return list(filter(None, map(step_of, self.lines("metrics.jsonl"))))

    def rewind(self, step: int) -> list[Step]:
        """Drop what was written after a step, to resume from it; return the steps up to it.

        The step's own evaluation is dropped too, as the resumed run begins with it.
        """
        kept = [
            line
            for line in self.lines("metrics.jsonl")
            if line["step"] <= step and ("loss" in line or line["step"] < step)
        ]
        write_text(self.path / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in kept))
        for name in ("workers.jsonl", "timeline.jsonl", "summary.json"):
            (self.path / name).unlink(missing_ok=True)
        return list(filter(None, map(step_of, kept)))

    def summary(self) -> Fields | None:
        """Return the result of the run; None while it has not ended."""
        found = json_object(self.path / "summary.json")
        return None if found is None else dict(found)
