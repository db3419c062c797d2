# SPDX-License-Identifier: Apache-2.0
"""One rank's part of a checkpoint: tensors as safetensors, everything else as JSON, both with checksums.

`rank-NNNN.json` names the file of its tensors, whose name contains a hash of its content. A new write therefore never
changes the files of an existing part; renaming the JSON file replaces it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from thinwire._version import __version__
from thinwire.core.storage.files import rename_into_place, write_atomically, write_temporary
from thinwire.core.storage.tree import FORMAT, check_format, pack, unpack
from thinwire.errors import CheckpointError

T = TypeVar("T")
_CHECKSUM = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class RankFile:
    """The files of one rank's part of a checkpoint.

    Attributes:
        home: the folder of the checkpoint.
        rank: the rank.
    """

    home: Path
    rank: int

    @property
    def name(self) -> str:
        """Return the prefix of the names of all files of the part."""
        return f"rank-{self.rank:04d}"

    @property
    def path(self) -> Path:
        """Return the path of the JSON file; the part is complete if it exists."""
        return self.home / f"{self.name}.json"

    def stage(self, value: Any) -> Path:
        """Write the part under temporary names, for `commit`; an existing part is unchanged.

        Raises:
            OSError: writing failed.
            CheckpointError: a value is neither a tensor nor JSON.
        """
        from safetensors.torch import save as to_bytes  # optional dependency, needed for checkpoints only

        tree, tensors = pack(value)
        content = to_bytes(tensors)
        checksum = hashlib.sha256(content).hexdigest()
        file = self.home / self._tensors_name(checksum)
        self.home.mkdir(parents=True, exist_ok=True)
        write_atomically(file, content)
        body = {
            "thinwire": __version__,
            "format": FORMAT,
            "rank": self.rank,
            "tensors": file.name,
            "checksum": checksum,
            "tree": tree,
        }
        return write_temporary(self.path, json.dumps({**body, "seal": _seal(body)}).encode())

    def commit(self, aside: Path) -> None:
        """Replace the part with the one that `stage` wrote.

        Raises:
            OSError: renaming failed; the part is the complete old one or the complete new one.
        """
        rename_into_place(aside, self.path)

    def remove_stale(self) -> None:
        """Remove this rank's files of earlier or unfinished writes."""
        keep = {self.path.name}
        if self.path.exists():
            keep.add(str(json.loads(self.path.read_bytes())["tensors"]))
        for file in self._files():
            if file.name not in keep:
                file.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove this part, and the folder if it is empty afterwards."""
        # The JSON goes first: without it the part does not exist, so it is never incomplete.
        self.path.unlink(missing_ok=True)
        for file in self._files():
            file.unlink(missing_ok=True)
        if self.home.is_dir() and not any(self.home.iterdir()):
            self.home.rmdir()

    def _files(self) -> list[Path]:
        return list(self.home.glob(f"*{self.name}[.-]*"))

    def outline(self) -> Any:
        """Return the content as JSON with the names of tensors, without reading the tensors.

        Raises:
            CheckpointError: with the file and the problem.
        """
        return self._checked(lambda: self._body()["tree"])

    def read(self) -> Any:
        """Return the content, bit for bit.

        Raises:
            CheckpointError: with the file and the problem.
        """
        return self._checked(self._content)

    def _checked(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except CheckpointError:
            raise
        except Exception as error:
            # A parser of damaged or forged bytes may raise anything, even a RecursionError.
            reason = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{self.path}: cannot be read ({reason[:200]}). {self._fix}") from error

    @property
    def _fix(self) -> str:
        return f"Remove {self.home} to continue from an earlier checkpoint"

    def _body(self) -> dict[str, Any]:
        body = json.loads(_bytes_of(self.path))
        # Checked before the seal, which a later format may compute differently.
        check_format(str(self.path), body)
        if body.pop("seal") != _seal(body):
            raise CheckpointError(f"{self.path}: is damaged, its checksum does not match. {self._fix}")
        if body["rank"] != self.rank:
            raise CheckpointError(f"{self.path}: is the part of rank {body['rank']}. {self._fix}")
        return body

    def _content(self) -> Any:
        from safetensors.torch import load as from_bytes

        body = self._body()
        # A path in the JSON must not lead out of the folder.
        file = self.home / self._tensors_name(body["checksum"])
        if body["tensors"] != file.name:
            raise CheckpointError(f"{self.path}: names tensors {body['tensors']!r} of another part. {self._fix}")
        content = _bytes_of(file)
        if hashlib.sha256(content).hexdigest() != body["checksum"]:
            raise CheckpointError(f"{file}: is damaged, its checksum is not the one written. {self._fix}")
        # Safetensors creates empty tensors on the default device.
        with torch.device("cpu"):
            tensors = from_bytes(content)
        return unpack(body["tree"], tensors)

    def _tensors_name(self, checksum: str) -> str:
        if not _CHECKSUM.fullmatch(checksum):
            raise CheckpointError(f"{self.path}: holds no checksum of its tensors. {self._fix}")
        return f"{self.name}-{checksum[:16]}.safetensors"


def _bytes_of(path: Path) -> bytes:
    # A pipe or a device in a file's place would be read forever.
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path}: is not a file")
    return path.read_bytes()


def _seal(body: dict[str, Any]) -> str:
    """Return the checksum of the JSON text; parsing and writing it again gives the same text."""
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()
