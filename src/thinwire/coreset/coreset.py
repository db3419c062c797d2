"""A weighted subset that stands for all points."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.storage.files import write_atomically

_KEYS = ("indices", "weights", "gains")


@dataclass(frozen=True, eq=False)
class Coreset:
    r"""Chosen points with weights.

    Args:
        indices: int64, [k]; numbers of the points in greedy order, so that every beginning of it is a coreset of its
            own budget. With labels the classes' orders are interleaved in the ratio of their budgets.
        weights: float64, [k]; how many points each speaks for, itself among them. They sum to n, and per class to
            the points of the class.
        gains: float64, [k]; by how much each lowered the cost when it was chosen; a class's first from that of a
            phantom which is farther from all points than any two are from each other.
        cost: $L(S)=\sum_i\min_{j\in S}d_{ij}$.
        n: points there were to choose from.
        method: how it was selected.
    """

    indices: Tensor
    weights: Tensor
    gains: Tensor
    cost: float
    n: int
    method: str = "lazy"

    def __len__(self) -> int:
        return len(self.indices)

    def save(self, path: str | Path) -> None:
        """Write a safetensors file.

        Raises:
            OSError: the disk refused; whatever was there before is still there.
        """
        from safetensors.torch import save

        tensors = {key: getattr(self, key).contiguous().cpu() for key in _KEYS}
        facts = {"cost": self.cost.hex(), "n": str(self.n), "method": self.method}
        write_atomically(Path(path), save(tensors, metadata=facts))

    @classmethod
    def load(cls, path: str | Path) -> Coreset:
        """Read what `save` wrote.

        Raises:
            ConfigError: the file cannot be read or holds no coreset.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), "pt") as file:
                facts = file.metadata() or {}
                tensors: dict[str, Tensor] = {key: file.get_tensor(key) for key in _KEYS}
            cost, n = float.fromhex(facts["cost"]), int(facts["n"])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise ConfigError(f"{path}: holds no coreset ({error}); give a file that Coreset.save wrote") from None
        return cls(**tensors, cost=cost, n=n, method=facts.get("method", "lazy"))
