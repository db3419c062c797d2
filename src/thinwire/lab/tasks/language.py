# SPDX-License-Identifier: Apache-2.0
"""Language models of bytes: Python's own standard library, Shakespeare, Wikipedia."""

import hashlib
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from thinwire.errors import ConfigError
from thinwire.lab.tasks.base import BITS_PER_BYTE, Defaults, Task
from thinwire.lab.tasks.data.files import Folder, read
from thinwire.lab.tasks.data.passages import Document, passages
from thinwire.lab.tasks.models.gpt import GPT, GPT_SIZES

_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"}
# Tables of numbers and generated text: half the bytes of some Python versions, and no language to learn.
_TABLES = {"encodings", "pydoc_data"}
_SPEAKER = re.compile(rb"^([A-Z][^\n:]{0,40}):\n", re.MULTILINE)
_ARTICLE = re.compile(rb"^ = ([^=\n]+) = $", re.MULTILINE)
# For the sizes up to 1m; with AdamW, 6m and larger learn faster at 1e-3.
_SETTINGS = (
    Defaults("adamw", lr=3e-3, batch_size=16, weight_decay=0.1),
    Defaults("sgd", lr=0.1, batch_size=16, momentum=0.9),
)


def text(folder: Folder | None = None, *, context: int = 128, nbytes: int = 4_000_000) -> Task:
    """Source text of the running interpreter's standard library; the group of a file is its top-level package.

    Tests and tables are left out. A tenth of the packages, chosen by a hash of their names, is held out. Files are read
    in the order of a hash of their paths, until `nbytes` is reached.

    Args:
        folder: not used, because nothing is read from it.
        context: bytes in a window.
        nbytes: bytes to read, with the held-out ones, at least 1,000,000; 12,000,000 is the whole library.

    Raises:
        ConfigError: if the interpreter carries no sources, or `nbytes` is too small.
    """
    if nbytes < 1_000_000:
        raise ConfigError(f"nbytes={nbytes}: must be at least 1,000,000, to hold packages to train on and others out")
    root = Path(sysconfig.get_path("stdlib"))
    # By hashes rather than in order, so that a shorter text is a sample of the whole library.
    documents = _library(root, nbytes)
    if sum(len(document.text) for document in documents) < 1_000_000:
        raise ConfigError(f"{root} holds no library sources, and task 'text' learns from them. Use task 'shakespeare'")
    train = [document for document in documents if _hash(document.group) % 10]
    held = [document for document in documents if not _hash(document.group) % 10]
    return _task("text", "Python standard library sources", train, held, context=context)


def shakespeare(folder: Folder, *, context: int = 128) -> Task:
    """Plays of Shakespeare, from text/tinyshakespeare.txt; the group of a passage is its speaker.

    The last tenth is held out.
    """
    path = folder.file("text/tinyshakespeare.txt")
    plays = read(path, Path.read_bytes)
    end = plays.find(b"\n\n", len(plays) * 9 // 10) + 2
    speeches = _sections(plays[:end], _SPEAKER, f"{path} holds no speeches (lines such as 'KING LEAR:')")
    return _task("shakespeare", "Tiny Shakespeare", speeches, [Document("held out", plays[end:])], context=context)


def wikitext2(folder: Folder, *, context: int = 128) -> Task:
    """Wikipedia articles, from text/wikitext2.{train,valid,test}.txt; the group of a passage is its article.

    The test split is held out. If there is no train split, the validation split is for training.
    """
    whole = folder.has("text/wikitext2.train.txt")
    source = folder.file(f"text/wikitext2.{'train' if whole else 'valid'}.txt")
    articles = f"{source} holds no articles (lines such as ' = Homarus gammarus = ')"
    train = _sections(read(source, Path.read_bytes), _ARTICLE, articles)
    held = Document("held out", read(folder.file("text/wikitext2.test.txt"), Path.read_bytes))
    title = "WikiText-2" if whole else "WikiText-2 (trained on its validation split)"
    return _task("wikitext2", title, train, [held], context=context)


def _task(name: str, title: str, train: Sequence[Document], held: Sequence[Document], *, context: int) -> Task:
    data = passages(train, held, context=context, nbytes=4096)
    networks = {named: partial(GPT, size, context=context) for named, size in GPT_SIZES.items()}
    return Task(name, title, BITS_PER_BYTE, networks, data, _SETTINGS)


def _library(root: Path, nbytes: int) -> list[Document]:
    chosen: list[tuple[str, bytes]] = []
    total = 0
    for path in sorted(_sources(root), key=lambda path: _hash(path.as_posix())):
        if total >= nbytes:
            break
        source = (root / path).read_bytes()[: nbytes - total]
        chosen.append((path.as_posix(), source))
        total += len(source)
    return [Document(path.split("/")[0].removesuffix(".py"), source) for path, source in sorted(chosen)]


def _sources(root: Path) -> Iterator[Path]:
    """Library sources, relative to the root."""
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if name not in _SKIPPED | _TABLES and not name.startswith("config-")]
        for name in files:
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                yield (Path(folder) / name).relative_to(root)


def _sections(whole: bytes, heading: re.Pattern[bytes], missing: str) -> list[Document]:
    """Cut before each heading; text before the first heading belongs to the first section."""
    found = list(heading.finditer(whole))
    if not found:
        raise ConfigError(f"{missing}. Copy it again")
    ends = [*(match.start() for match in found[1:]), len(whole)]
    return [
        Document(match[1].strip().decode("utf-8", "replace"), whole[begin:end])
        for match, begin, end in zip(found, [0, *ends], ends, strict=False)
    ]


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
