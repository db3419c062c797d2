# SPDX-License-Identifier: Apache-2.0
"""The frozen task: sizes, text, batches, schedule, tracks. A change of any value here is a new version.

Everything is a function of the version, the size, the seed and the text. Results with different text fingerprints are
never compared.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Size:
    """A model and its budget.

    Args:
        layers: number of blocks.
        width: of the residual stream.
        heads: of each attention.
        context: bytes in a window.
        trunk: steps of warm-up and constant learning rate.
        decay: steps after the trunk, in which the rate falls linearly to a tenth.
        every: steps between two snapshots.
        tuning: steps of a tuning run, the last fifth with decay.
        windows: held-out windows of an evaluation.
        memory: resident bytes that a worker may use.
    """

    layers: int
    width: int
    heads: int
    context: int
    trunk: int
    decay: int
    every: int
    tuning: int
    windows: int
    memory: int


SIZES = {
    "toy": Size(1, 32, 2, 32, 24, 8, 8, 8, 8, 2 << 30),
    "400k": Size(3, 96, 4, 64, 512, 128, 32, 256, 64, 2 << 30),
    "6m": Size(8, 256, 4, 128, 2000, 500, 100, 1000, 128, 2 << 30),
    "30m": Size(10, 496, 8, 128, 2000, 500, 100, 1000, 128, 4 << 30),
}
WORKERS, BATCH, WARM_UP, LAST_RATE = 4, 2, 100, 0.1
START_RATE, START_OUTER = 1e-3, 0.7
TUNING_SEED, SEEDS = 100, (0, 1, 2)
TEXT_BYTES, REPLAYED = 4_000_000, 20


@dataclass(frozen=True)
class Link:
    """Each worker's link, both directions; `delay` is one way, in seconds. A rate of 0 is no limit."""

    rate: float
    delay: float = 0.0


@dataclass(frozen=True)
class Fleet:
    """The worker that is slower by a factor, and the one that is killed once, at a fraction of the budget."""

    slow: tuple[int, float] | None = None
    killed: tuple[int, float] | None = None


LINKS = {"none": Link(0), "20mbit": Link(20e6), "100mbit-50ms": Link(100e6, 0.05), "1gbit": Link(1e9)}
FLEETS = {"equal": Fleet(), "uneven": Fleet(slow=(1, 3.0), killed=(2, 0.4))}
TRACKS = {f"{link}/{fleet}": (LINKS[link], FLEETS[fleet]) for link in LINKS for fleet in FLEETS}
RANKED = ("20mbit/equal", "100mbit-50ms/equal", "1gbit/equal", "100mbit-50ms/uneven")
"""The tracks with a table. Any other may be run."""


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, stream: Tensor) -> Tensor:
        """[batch, length, width] to the same."""
        parts = self.qkv(self.before(stream)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        stream = stream + self.out(seen.transpose(1, 2).flatten(2))
        return stream + self.down(F.gelu(self.up(self.between(stream))))


class GPT(nn.Module):
    """A language model of bytes with learned positions and an untied head; without dropout."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, size.width)
        self.positions = nn.Parameter(torch.empty(size.context, size.width, device="cpu"))
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, 256)

    def forward(self, symbols: Tensor) -> Tensor:
        """int64 [batch, length] to logits [batch, length, 256]."""
        stream = self.embedding(symbols) + self.positions[: symbols.shape[1]]
        for block in self.blocks:
            stream = block(stream)
        return self.head(self.norm(stream))


def model_of(size: Size, seed: int) -> GPT:
    """The model with its initial parameters, a function of the seed alone."""
    generator = torch.Generator("cpu").manual_seed(seed)
    with torch.device("meta"):
        model = GPT(size)
    model.to_empty(device="cpu")
    for name, part in model.named_modules():
        if isinstance(part, nn.Linear):
            scale = (2 * size.layers) ** -0.5 if name.endswith((".out", ".down")) else 1.0
            deviation = 0.02 if name == "head" else scale * part.in_features**-0.5
            nn.init.normal_(part.weight, std=deviation, generator=generator)
            nn.init.zeros_(part.bias)
        elif isinstance(part, nn.Embedding):
            nn.init.normal_(part.weight, generator=generator)
        elif isinstance(part, nn.LayerNorm):
            part.reset_parameters()
    nn.init.normal_(model.positions, std=0.1, generator=generator)
    return model


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Cross-entropy in nats per byte; int64 [batch, context + 1]."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def rate_factor(step: int, trunk: int, decay: int) -> float:
    """The learning rate of a step as a multiple of the base rate: warm-up, constant, linear decay to `LAST_RATE`."""
    warm = min(WARM_UP, max(1, trunk // 10))
    if step < trunk:
        return min(1.0, (step + 1) / warm)
    return 1 - (1 - LAST_RATE) * min(1.0, (step - trunk + 1) / max(1, decay))


@dataclass(frozen=True)
class Text:
    """Bytes to train on and held-out ones, with the files that hold the latter."""

    train: bytes
    held: bytes
    held_files: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """Of both parts."""
        return hashlib.sha256(self.train + b"\0" + self.held).hexdigest()[:16]

    def batch(self, size: Size, seed: int, rank: int, step: int) -> bytes:
        """The windows that worker `rank` reads in its own `step`: [BATCH, context + 1] bytes."""
        span, parts = len(self.train) - size.context - 1, list[bytes]()
        for row in range(BATCH):
            digest = hashlib.blake2b(f"{seed} {rank} {step} {row}".encode(), digest_size=8).digest()
            start = int.from_bytes(digest, "big") % span
            parts.append(self.train[start : start + size.context + 1])
        return b"".join(parts)

    def held_out(self, size: Size) -> Tensor:
        """The windows of every evaluation, spread evenly over the held-out text: int64 [windows, context + 1]."""
        gap = (len(self.held) - size.context - 1) // size.windows
        rows = [self.held[i * gap : i * gap + size.context + 1] for i in range(size.windows)]
        return tokens_of(b"".join(rows), size)


def tokens_of(data: bytes, size: Size) -> Tensor:
    """Bytes to int64 [windows, context + 1]."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long().view(-1, size.context + 1)


def load_text(path: str | None = None) -> Text:
    """The text of a file, whose last tenth is held out; by default sources of Python's standard library.

    Of the library, a tenth of the top-level packages is held out, chosen by a hash of their names.

    Raises:
        ValueError: there is too little text.
    """
    if path is not None:
        whole = Path(path).read_bytes()
        cut = len(whole) * 9 // 10
        text = Text(whole[:cut], whole[cut:], (str(Path(path).resolve()),))
    else:
        root = Path(sysconfig.get_path("stdlib")).resolve()
        files = sorted(_sources(root), key=lambda name: _hash(name))
        total, parts, held_files = 0, {True: list[bytes](), False: list[bytes]()}, list[str]()
        for name in files:
            held = _hash(name.split("/")[0].removesuffix(".py")) % 10 == 0
            if held:
                held_files.append(str(root / name))
            if total < TEXT_BYTES:
                source = (root / name).read_bytes()[: TEXT_BYTES - total]
                total += len(source)
                parts[held].append(source)
        text = Text(b"".join(parts[False]), b"".join(parts[True]), tuple(held_files))
    if min(len(text.train), 9 * len(text.held)) < 100_000:
        raise ValueError(
            f"text has {len(text.train) + len(text.held)} bytes. It must have at least 112,000. "
            "Use --text FILE, such as tiny Shakespeare"
        )
    return text


_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"}
_SKIPPED |= {"encodings", "pydoc_data"}  # tables of numbers, and no language to learn


def _sources(root: Path) -> list[str]:
    found = list[str]()
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if name not in _SKIPPED and not name.startswith("config-")]
        names = [name for name in files if name.endswith(".py") and not name.startswith("_sysconfigdata")]
        found += [(Path(folder) / name).relative_to(root).as_posix() for name in names]
    return found


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
