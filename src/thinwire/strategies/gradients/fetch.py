"""Keep momentum and error in a sketch that all workers share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.codecs.base import draw_key
from thinwire.errors import ConfigError
from thinwire.replica.displacement import check_momentum
from thinwire.replica.replica import Replica
from thinwire.strategies.base import Strategy
from thinwire.strategies.gradients.sketches import (
    Move,
    Table,
    check_plain,
    check_table,
    fresh_of,
    largest_of,
    move_,
    resize_unsent,
)
from thinwire.validation import check_kinds


@dataclass(frozen=True)
class FetchSGD(Strategy):
    r"""Keep momentum and error in a count sketch that all workers share, and move what stands out in it.

    With $\gamma$ the learning rate,

    $$S_u \leftarrow \rho S_u + \mathrm{sketch}\big(\tfrac{\gamma}{n} \sum_i g_i\big), \quad S_e \leftarrow S_e + S_u,$$

    $$\Delta = \text{the } k \text{ largest estimates in } S_e, \qquad x \leftarrow x - \Delta ,$$

    and then, as published, the cells of $S_u$ and $S_e$ that $\Delta$ touches are emptied. What other coordinates had
    there is lost with them. Workers remember nothing between steps, so that any worker may take any step.

    With `conserving` every worker keeps its own sum of momenta too, like the parameters: it then says the exact values
    of $Pk$ candidates, the $k$ largest of which are moved and their sketch is subtracted from $S_e$. That remains the
    sketch of what is unsaid, and nothing is lost. Estimates subtracted in their place would leave in every row what
    they were wrong by, to be found again for ever: hashes cannot be drawn anew where the sketch is what is remembered.

    Every tensor is sketched, small ones too. A gradient that is not finite on any rank lets all of them pass over the
    step. Traffic: $2\frac{n-1}{n} \cdot 4 (rc + Pk)$ per worker and step; $P = 0$ as published.
    State: `momentum_sketch` and `error_sketch`, $rc$ numbers each; with `conserving`, `momentum` and `unsent` too, like
    the parameters.

    Rothchild et al., FetchSGD: Communication-Efficient Federated Learning with Sketching, ICML 2020, arXiv:2007.07682,
    Algorithm 1.

    Args:
        fraction: $k$ over the number of parameters; less moves fewer of them at a step.
        columns: $c/k$; more finds the right coordinates more surely, in more bytes.
        rows: $r$, odd; more makes a wrong estimate less likely.
        momentum: $\rho$, in [0, 1).
        conserving: lose nothing, for a second message and memory on every worker.
        second_round: $P$, candidates for each coordinate moved, where conserving.
        lr_in_residual: as the paper; False multiplies by the learning rate of the step that moves.
    """

    fraction: float = 0.0003
    columns: int = 32
    rows: int = 5
    momentum: float = 0.9
    conserving: bool = False
    second_round: int = 4
    lr_in_residual: bool = True

    paper = "Rothchild et al., FetchSGD, ICML 2020, arXiv:2007.07682"
    waits = "every step, after the backward pass, all wait for the slowest worker and for a table to travel"
    limits = "needs plain SGD; as published it forgets what shares cells with what was moved"

    def __post_init__(self) -> None:
        """Check the kinds and the ranges."""
        check_kinds(self)
        check_table(self.fraction, self.columns, self.rows)
        check_momentum(self.momentum)
        if self.second_round < 1:
            raise ConfigError(f"second_round={self.second_round}: at least 1 candidate for each coordinate; 4 is usual")

    @property
    def reads_gradient(self) -> bool:
        """Yes, and puts what is to be moved in its place."""
        return True

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse what does more than step along what it is given."""
        check_plain(type(self).__name__, optimizer)

    def start(self, r: Replica) -> None:
        """Empty tables."""
        k = self.moved(r.x.numel())
        for name in ("momentum_sketch", "error_sketch"):
            r.state[name] = torch.zeros(self.rows, self.columns * k, dtype=torch.float32, device=r.x.device)
        for name in ("momentum", "unsent") if self.conserving else ():
            r.state[name] = torch.zeros_like(r.x, dtype=torch.promote_types(r.x.dtype, torch.float32))

    def moved(self, n: int) -> int:
        """$k$, of so many parameters."""
        return min(n, max(1, round(self.fraction * n)))

    def before_step(self, r: Replica) -> None:
        """Agree on what is to be moved, and let it be the gradient."""
        # One key for all steps: the tables that are kept must go on adding up.
        fresh, k, key = fresh_of(r, self.lr_in_residual), self.moved(r.x.numel()), draw_key(r.seed, 0)
        fresh_table, _ = Table.of(fresh, (self.rows, self.columns * k), key).all_reduced(r, fresh[:0])
        r.g.zero_()
        if not fresh_table.finite:
            r.metrics["skipped_steps"] = 1.0
            return
        velocity, error = r.state["momentum_sketch"], Table(r.state["error_sketch"], fresh.numel(), key)
        error.cells.add_(velocity.mul_(self.momentum).add_(fresh_table.cells))
        r.metrics["unsent_norm"] = error.norm
        if self.conserving:
            self._move_exactly_(r, fresh, error)
            return
        chosen = error.heaviest(k)
        move = Move([(chosen, error.estimates(chosen).to(fresh.dtype))], chosen, fresh[:0], ())
        gone = move_(r, move, inside=self.lr_in_residual)
        touched = error.touched_by(gone)
        error.cells[touched] = 0.0
        velocity[touched] = 0.0

    def _move_exactly_(self, r: Replica, fresh: Tensor, error: Table) -> None:
        """Move the largest of the candidates' exact sums, and take just those out of the table."""
        momentum, unsent, k = r.state["momentum"], r.state["unsent"], self.moved(r.x.numel())
        unsent.add_(momentum.mul_(self.momentum).add_(fresh))
        candidates = error.heaviest(self.second_round * k)
        exact = r.comm.all_reduce_(unsent[candidates]).wait()
        largest = largest_of(exact, k)
        where = candidates[largest]
        gone = move_(r, Move([(where, exact[largest])], where, fresh[:0], ()), inside=self.lr_in_residual)
        chosen = torch.zeros_like(fresh).index_put_((where,), exact[largest])
        # Where the learning rate is zero nothing has moved, and the table keeps it.
        moved = torch.zeros_like(fresh).index_put_((gone,), chosen[gone])
        error.cells.sub_(Table.of(moved, error.cells.shape, error.key).cells)
        unsent[gone] = 0.0

    def resized(self, states: Sequence[Mapping[str, Tensor]], size: int) -> list[dict[str, Tensor]]:
        """The states of another number of workers, which together have as much unsaid."""
        return resize_unsent(states, size)

    def average_(self, r: Replica) -> None:
        """Nothing to do: all ranks hold the same vector."""

    def consensus(self, r: Replica) -> Tensor:
        """The parameters themselves."""
        return r.x
