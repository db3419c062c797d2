"""One rank's part of one checkpoint: tensors as safetensors, everything else as JSON, both under checksums.

`rank-NNNN.json` is the part. It names the file of its tensors, which is named after its own content, so that writing
a part anew never touches the one that is there. Until the JSON has its name nothing has happened.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire._version import __version__
from thinwire.errors import CheckpointError
from thinwire.storage.files import put_in_place, write_aside, write_atomically
from thinwire.storage.tree import pack, unpack


@dataclass(frozen=True)
class RankFile:
    """Where one rank's part of a checkpoint lies.

    Attributes:
        home: the checkpoint's folder.
        rank: whose part.
    """

    home: Path
    rank: int

    @property
    def name(self) -> str:
        """What the names of all its files begin with."""
        return f"rank-{self.rank:04d}"

    @property
    def path(self) -> Path:
        """The file that makes it whole."""
        return self.home / f"{self.name}.json"

    def write_aside(self, value: Any) -> Path:
        """Write everything to disk, to be made the part by `commit`; the part that is there stays as it is.

        Raises:
            OSError: the disk refused.
            CheckpointError: there is something that is neither a tensor nor JSON.
        """
        from safetensors.torch import save as to_bytes

        tree, tensors = pack(value)
        content = to_bytes(tensors)
        checksum = hashlib.sha256(content).hexdigest()
        file = self.home / f"{self.name}-{checksum[:16]}.safetensors"
        self.home.mkdir(parents=True, exist_ok=True)
        write_atomically(file, content)
        body = {"thinwire": __version__, "rank": self.rank, "tensors": file.name, "checksum": checksum, "tree": tree}
        return write_aside(self.path, json.dumps({**body, "seal": _seal(body)}).encode())

    def commit(self, aside: Path) -> None:
        """Make it the part.

        Raises:
            OSError: the disk refused; the part is the old one or the new one, whole.
        """
        put_in_place(aside, self.path)

    def tidy(self) -> None:
        """Remove what earlier or unfinished writing has left of this rank's."""
        keep = {self.path.name}
        if self.path.exists():
            keep.add(str(json.loads(self.path.read_bytes())["tensors"]))
        for file in self._files():
            if file.name not in keep:
                file.unlink(missing_ok=True)

    def remove(self) -> None:
        """Forget this part, its JSON first; the last rank out removes the folder."""
        self.path.unlink(missing_ok=True)
        for file in self._files():
            file.unlink(missing_ok=True)
        if self.home.is_dir() and not any(self.home.iterdir()):
            self.home.rmdir()

    def _files(self) -> list[Path]:
        return list(self.home.glob(f"*{self.name}[.-]*"))

    def read(self) -> Any:
        """What was written, bit for bit.

        Raises:
            CheckpointError: naming the file and what is wrong with it.
        """
        try:
            return self._read()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{self.path}: cannot be read ({error}); {self._way_out()}") from error

    def _read(self) -> Any:
        from safetensors.torch import load as from_bytes

        body = json.loads(self.path.read_bytes())
        if body.pop("seal") != _seal(body):
            raise self._damaged(self.path)
        if body["rank"] != self.rank:
            raise CheckpointError(f"{self.path}: is the part of rank {body['rank']}; {self._way_out()}")
        file = self.home / Path(body["tensors"]).name
        content = file.read_bytes()
        if hashlib.sha256(content).hexdigest() != body["checksum"]:
            raise self._damaged(file)
        return unpack(body["tree"], from_bytes(content))

    def _damaged(self, file: Path) -> CheckpointError:
        return CheckpointError(f"{file}: is damaged, its checksum is not the one written; {self._way_out()}")

    def _way_out(self) -> str:
        return f"remove {self.home} to go on from the checkpoint before it"


def _seal(body: dict[str, Any]) -> str:
    """The checksum of the JSON itself, which reading and writing back does not change."""
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()
