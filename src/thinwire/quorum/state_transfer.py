"""The state that a late rank is given: cut into pieces by the one who has it, and put together by the other."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.quorum.adding import Piece

_MOST_PIECES = 24


def cut_up(step: int, data: Tensor, nbytes: int) -> list[Piece]:
    """A packed state as pieces; `attempt` of each is their number.

    Args:
        step: whose state it is.
        data: from `pack`.
        nbytes: the most in a piece.

    Raises:
        ConfigError: there are more than messages have room for.
    """
    parts = data.split(nbytes)
    if len(parts) > _MOST_PIECES:
        raise ConfigError(
            f"a late worker needs a state {len(parts)} times the size of the parameters; must be at most "
            f"{_MOST_PIECES} times; use an optimizer that remembers less"
        )
    return [Piece(step, len(parts), place, data.numel(), content) for place, content in enumerate(parts)]


class Given:
    """What others have sent of their states, while it is asked for; under the mailbox's lock."""

    def __init__(self) -> None:
        self._wanted = -1
        self._pieces: dict[tuple[int, int], dict[int, Piece]] = {}

    def want(self, step: int) -> None:
        """Take states of this step and later ones from now on, or none where it is -1."""
        self._wanted = step
        self._pieces.clear()

    def take(self, src: int, piece: Piece) -> None:
        """A piece has come."""
        if 0 <= self._wanted <= piece.step:
            self._pieces.setdefault((src, piece.step), {})[piece.place] = piece

    @property
    def whole(self) -> tuple[int, Tensor] | None:
        """A state of which all pieces are here, and its step."""
        for (_, step), pieces in self._pieces.items():
            if len(pieces) == pieces[min(pieces)].attempt:
                data = torch.cat([pieces[place].content for place in sorted(pieces)])
                return step, data[: pieces[0].whole]
        return None
