"""Say a sketch of what is to be said, and then exactly what weighs most in it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.codecs.base import draw_key
from thinwire.errors import ConfigError
from thinwire.replica.displacement import check_momentum
from thinwire.replica.replica import Replica
from thinwire.strategies.base import Strategy
from thinwire.strategies.gradients.sketches import (
    Cut,
    Move,
    Table,
    check_plain,
    check_table,
    cut_of,
    finite,
    fresh_of,
    largest_of,
    move_,
    resize_unsent,
)
from thinwire.validation import check_kinds

_NUMBER_BYTES, _INDEX_BYTES = 4, 4


@dataclass(frozen=True)
class SketchedSGD(Strategy):
    r"""Sum count sketches of what workers have not said yet, and move only the coordinates that stand out in them.

    With $g_i$ worker $i$'s gradient, $v_i$ what it has not said, $u_i$ its momentum and $\gamma$ the learning rate,

    $$u_i \leftarrow \rho u_i + \tfrac{\gamma}{n} g_i, \qquad v_i \leftarrow v_i + u_i, \qquad
      S = \sum_i \mathrm{sketch}(v_i),$$

    $H$ are the $Pk$ coordinates with the largest estimates in $S$, and all workers agree on the exact sums there,

    $$w = \sum_i v_i[H], \qquad \Delta = \text{the } k \text{ largest of } w, \qquad x \leftarrow x - \Delta, \qquad
      u_i, v_i \leftarrow 0 \text{ where } \Delta \text{ moved}.$$

    Nothing is lost: what was moved and $\sum_i v_i$ add up to all momenta there ever were. Where $Pk$ is everything, or
    with one coordinate, this is SGD. Hashes are drawn anew at every step, so that coordinates which collide now part
    later. Tensors of fewer than `dense_below` elements travel whole beside the table, and keep their momentum.

    `momentum` takes the place of the optimizer's own, which must be plain SGD; its weight decay acts on all parameters
    at every step, and is not sent. A gradient that is not finite on any rank lets all of them pass over the step.
    Traffic, with $r$ rows of $c$ columns and $d$ elements in small tensors: $2\frac{n-1}{n} \cdot 4 (rc + Pk + d)$ per
    worker and step, whatever the number of workers. Where $(n-1) \cdot 8k$ and the small tensors are fewer bytes,
    which takes about $n \le rc/k + P$ workers, each says its own $k$ largest with their indices instead.
    State: `momentum` ($u$) and `unsent` ($v$), each like the parameters in fp32 at least.

    Ivkin et al., Communication-efficient Distributed SGD with Sketching, NeurIPS 2019, arXiv:1903.04488, Algorithm 1;
    momentum factor masking: Lin et al., Deep Gradient Compression, ICLR 2018, arXiv:1712.01887.

    Args:
        fraction: $k$ over the number of coordinates; less moves fewer of them at a step.
        columns: $c/k$; more finds the right coordinates more surely, in more bytes. Fewer than 32 miss some.
        rows: $r$, odd; more makes a wrong estimate less likely.
        second_round: $P$, candidates looked at exactly for each coordinate moved; 0 trusts the estimates, and what
            those are off by is then lost.
        momentum: $\rho$, in [0, 1).
        masking: forget the momentum of what has moved; without it, it goes on moving.
        lr_in_residual: what is unsaid keeps the learning rate of the step it comes from; False keeps it in units of
            the gradient, and moves it by the rate of the step that says it.
        dense_below: elements of the smallest tensor that is sketched.
        recovery: "sketch", "gather" (everyone's own largest), or "auto", whichever takes fewer bytes.
    """

    fraction: float = 0.0003
    columns: int = 32
    rows: int = 5
    second_round: int = 4
    momentum: float = 0.9
    masking: bool = True
    lr_in_residual: bool = True
    dense_below: int = 1024
    recovery: Literal["auto", "sketch", "gather"] = "auto"

    paper = "Ivkin et al., Communication-efficient Distributed SGD with Sketching, NeurIPS 2019, arXiv:1903.04488"
    waits = "every step, after the backward pass, all wait for the slowest worker and for two small sums"
    limits = "needs plain SGD; steps are sparse, so late gradients are stale; on few workers top-k says less"

    def __post_init__(self) -> None:
        """Check the kinds and the ranges."""
        check_kinds(self)
        check_table(self.fraction, self.columns, self.rows)
        if self.second_round < 0:
            raise ConfigError(f"second_round={self.second_round}: must be at least 0; 4 finds nearly all")
        check_momentum(self.momentum)
        if self.dense_below < 0:
            raise ConfigError(f"dense_below={self.dense_below}: must be at least 0 elements; 1024 is usual")

    @property
    def reads_gradient(self) -> bool:
        """Yes, and puts what is to be moved in its place."""
        return True

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse what does more than step along what it is given."""
        check_plain(type(self).__name__, optimizer)

    def start(self, r: Replica) -> None:
        """No momentum, and nothing unsaid."""
        for name in ("momentum", "unsent"):
            r.state[name] = torch.zeros_like(r.x, dtype=torch.promote_types(r.x.dtype, torch.float32))

    def before_step(self, r: Replica) -> None:
        """Agree on what is to be moved, and let it be the gradient."""
        momentum = fresh_of(r, self.lr_in_residual).add_(r.state["momentum"], alpha=self.momentum)
        unsent = r.state["unsent"] + momentum
        cut = cut_of(r, self.dense_below)
        gathers = self.gathers(r.comm.size, cut)
        move = self._gathered(r, unsent, cut) if gathers else self._recovered(r, unsent, cut)
        r.g.zero_()
        if move is None:
            r.metrics["skipped_steps"] = 1.0
            return
        gone = move_(r, move, inside=self.lr_in_residual)
        r.state["momentum"].copy_(momentum)
        if self.masking:
            r.state["momentum"][gone] = 0.0
        unsent[gone] = 0.0
        for part in cut.small:
            unsent[part] = 0.0
        r.state["unsent"] = unsent

    def average_(self, r: Replica) -> None:
        """Nothing to do: all ranks hold the same vector."""

    def consensus(self, r: Replica) -> Tensor:
        """The parameters themselves."""
        return r.x

    def resized(self, states: Sequence[Mapping[str, Tensor]], size: int) -> list[dict[str, Tensor]]:
        """The states of another number of workers, which together have as much unsaid."""
        return resize_unsent(states, size)

    # -- what is to be moved -------------------------------------------------------------------------------------

    def moved(self, cut: Cut) -> int:
        """$k$, of so many sketched coordinates."""
        return min(cut.length, max(1, round(self.fraction * cut.length)))

    def gathers(self, size: int, cut: Cut) -> bool:
        """Whether everyone's own largest are fewer bytes than a sketch, or are asked for."""
        if self.recovery != "auto":
            return self.recovery == "gather"
        k = self.moved(cut)
        table = 2 / size * _NUMBER_BYTES * (self.rows * self.columns * k + min(self.second_round * k, cut.length))
        return size > 1 and (_NUMBER_BYTES + _INDEX_BYTES) * k < table

    def _recovered(self, r: Replica, unsent: Tensor, cut: Cut) -> Move | None:
        """By a summed sketch, and the exact sums of the candidates in it; None if a gradient is not finite."""
        k, key = self.moved(cut), draw_key(r.seed, r.step)
        large = cut.large_of(unsent)
        mine = Table.of(large, (self.rows, self.columns * k), key)
        table, dense = mine.all_reduced(r, cut.small_of(unsent))
        if not table.finite or not finite(dense):
            return None
        r.metrics["unsent_norm"] = table.norm
        chosen = table.heaviest(self.second_round * k or k)
        if self.second_round:
            exact = r.comm.all_reduce_(large[chosen]).wait()
            largest = largest_of(exact, k)
            chosen, values = chosen[largest], exact[largest]
        else:
            values = table.estimates(chosen).to(unsent.dtype)
        places = cut.places(chosen)
        return Move([(places, values)], places, dense.to(unsent.dtype), cut.small)

    def _gathered(self, r: Replica, unsent: Tensor, cut: Cut) -> Move | None:
        """By everyone's own largest; None if a gradient is not finite."""
        k, large = self.moved(cut), cut.large_of(unsent)
        dense = r.comm.all_reduce_(cut.small_of(unsent)) if cut.small else None
        fine = finite(large)
        mine = largest_of(large, k) if fine else torch.arange(k, device=large.device)
        values = large[mine] if fine else torch.full_like(large[:k], torch.nan)
        message = torch.cat([values.view(torch.uint8), mine.to(torch.int32).view(torch.uint8)])
        rows = torch.stack(r.comm.all_gather(message).wait())
        what, where = (part.contiguous() for part in rows.tensor_split([rows.shape[1] - _INDEX_BYTES * k], dim=1))
        values, places = what.view(large.dtype).flatten(), cut.places(where.view(torch.int32).flatten().long())
        small = unsent[:0] if dense is None else dense.wait()
        if not finite(torch.cat([small, values])):
            return None
        # A CPU adds in order, whatever meets in one place; elsewhere each worker's own are a part.
        many = places.numel() if values.device.type == "cpu" else k
        parts = list(zip(places.split(many or 1), values.split(many or 1), strict=True))
        return Move(parts, cut.places(mine), small, cut.small)
