# SPDX-License-Identifier: Apache-2.0
"""`thinwire bucket`: the key of a run over an object store, and the removal of what a run has left there."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal

from thinwire.cli.console import err, out, print_json
from thinwire.errors import ConfigError


@dataclass(frozen=True)
class Bucket:
    """Draw the key of a run over an object store or a shared folder, or delete the objects of a run that has ended.

    Example: thinwire bucket clean s3://bucket/run

    Args:
        action: key prints a new run key, which all machines of the run need as THINWIRE_KEY; clean deletes all objects
            of the run at URL. It needs the key of the run, and refuses a run to which a worker still writes.
        url: of the run, such as s3://bucket/run.
        quiet: seconds for which no worker may write before clean deletes anything.
        json: print the key, or the number of deleted objects, as JSON.
    """

    action: Literal["key", "clean"]
    url: str | None = None
    _: KW_ONLY
    quiet: float = 12.0
    json: bool = False

    def __call__(self) -> int:
        """Print the key, or delete the objects; returns 0."""
        from thinwire.core.storage import bucket

        if self.action == "key":
            if self.url is not None:
                raise ConfigError(f"{self.url}: a key belongs to no URL yet. Leave it out")
            key = bucket.new_key()
            print_json({"key": key}) if self.json else out.print(key)
            return 0
        if self.url is None:
            raise ConfigError("URL is missing: it names the run to delete. Give it, as in s3://bucket/run")
        if not self.quiet >= 0:
            raise ConfigError(f"--quiet {self.quiet:g}: must be at least 0 seconds")
        run = bucket.Bucket.open(self.url, reads_only=True)
        err.print(f"looking for workers for {self.quiet:g} s")
        deleted = run.clean(self.quiet)
        if self.json:
            print_json({"url": self.url, "deleted": deleted})
        else:
            out.print(f"deleted {deleted} objects of {self.url}")
        return 0
