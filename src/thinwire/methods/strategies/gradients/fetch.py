# SPDX-License-Identifier: Apache-2.0
"""FetchSGD: momentum and residual in count sketches that are equal on all workers."""

import math
import warnings
from typing import Annotated

import torch
from torch import Tensor

from thinwire.core.kernels.decisions import holds
from thinwire.core.replica.displacement import Momentum
from thinwire.core.replica.replica import Replica
from thinwire.core.validation import Range
from thinwire.errors import NonFiniteError
from thinwire.methods.codecs.base import draw_key
from thinwire.methods.strategies.base import Traits
from thinwire.methods.strategies.gradients.sketches import SketchedUpdates, Table, Update, largest_of
from thinwire.registry import registered

# A perceptron of 4,810 elements diverged with k = 2, did not train with 14, and trained like AllReduce() with 48.
_FEW, _SMALL_FRACTION = 48, 0.01


@registered
class FetchSGD(SketchedUpdates):
    r"""Keep momentum and residual in count sketches, equal on all workers, and apply the residual's largest elements.

    A count sketch is a table of $r$ rows and $c$ columns. In each row a hash assigns every element of the vector to a
    cell and a sign, and the cell holds the signed sum; an element's estimate is the median over the rows. The residual
    is the sum of updates that have not been applied yet. With $\gamma$ the learning rate, $\rho$ the momentum, and
    $S_u$ and $S_e$ the sketches of momentum and residual,

    $$S_u \leftarrow \rho S_u + \mathrm{sketch}\big(\tfrac{\gamma}{n} \sum_i g_i\big), \quad S_e \leftarrow S_e + S_u,$$

    $$\Delta = \text{the } k \text{ largest estimates in } S_e, \qquad x \leftarrow x - \Delta ,$$

    and then, as published, the cells of $S_u$ and $S_e$ that hold $\Delta$ are set to zero. The parts of other elements
    in these cells are lost. Workers have no own state, so the workers may differ from step to step.

    With `conserving` every worker also keeps its own momentum and residual exactly, as vectors. The $Pk$ elements with
    the largest estimates are then the candidates: the workers all-reduce the exact residuals of these, apply the $k$
    largest sums, and subtract the sketch of this update from $S_e$. $S_e$ remains the sketch of the sum of all
    residuals, and nothing is lost. The errors of subtracted estimates would instead stay in the sketch forever, because
    its hashes cannot change.

    Every tensor is sketched, small ones too. If a gradient is not finite on any rank, all ranks skip the step.

    Traffic: $2\frac{n-1}{n} \cdot 4 (rc + Pk)$ bytes per worker and step, for $n$ workers; $P = 0$ as published.
    State: `momentum_sketch` and `error_sketch`, $rc$ numbers each; with `conserving`, `momentum` and `unsent` (the
    residual) too, each with the size of the parameters.

    Rothchild et al., FetchSGD: Communication-Efficient Federated Learning with Sketching, ICML 2020, arXiv:2007.07682,
    Algorithm 1.

    Example:
        >>> import torch, thinwire
        >>> def train(comm):
        ...     model = torch.nn.Linear(200, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     strategy = FetchSGD(fraction=0.01, columns=8, rows=3, momentum=0.0)  # 2 coordinates a step
        ...     worker = thinwire.attach(model, torch.optim.SGD(model.parameters(), lr=1.0), strategy, comm=comm)
        ...     x = torch.zeros(1, 200)
        ...     x[0, 7] = x[0, 70] = 3.0
        ...     model(x).sum().backward()
        ...     worker.optimizer.step()
        ...     return model.weight[0, [7, 70]].tolist()
        >>> thinwire.run_threads(2, train)[0]
        [-3.0, -3.0]

    Args:
        fraction: $k$ divided by the number of parameters; less updates fewer parameters per step. The default is for
            models of a million parameters and more; on a small model a warning names one that fits.
        columns: $c/k$; more finds the largest elements more reliably, and sends more bytes.
        rows: $r$, odd; more makes a wrong estimate less likely.
        momentum: $\rho$, in [0, 1).
        conserving: whether to keep exact residuals, so that nothing is lost; costs a second all-reduce per step, and
            memory for two vectors on every worker.
        second_round: $P$, candidates for each updated element, with `conserving` only.
        lr_in_residual: True, as in the paper, multiplies gradients by the learning rate before they enter the sketch;
            False multiplies each update by the learning rate of the step that applies it.
    """

    momentum: Momentum = 0.9
    conserving: bool = False
    second_round: Annotated[int, Range("1..", "4 is usual")] = 4
    lr_in_residual: bool = True

    paper = "Rothchild et al., FetchSGD, ICML 2020, arXiv:2007.07682"
    waits = "every step, after the backward pass, all workers wait for the slowest one and for the transfer of a sketch"
    limits = "needs plain SGD; as published it loses gradients that share cells of the sketch with an applied update"

    def make_traits(self) -> Traits:
        """See `Traits`."""
        return Traits(
            reads_gradient=True,
            equal_replicas=True,
            # As published, how much is lost in shared cells depends on the gradients.
            lr_factor=1 / (1 - self.momentum) if self.conserving else None,
        )

    def start(self, r: Replica) -> None:
        """Allocate the sketches, and with `conserving` the vectors, all zero."""
        n = r.x.numel()
        k = self.num_updated(n)
        fits = min(1.0, max(_SMALL_FRACTION, math.ceil(1000 * _FEW / max(n, 1)) / 1000))
        if k < min(_FEW, n) and self.fraction < _SMALL_FRACTION and r.comm.rank == 0 and not r.x.is_meta:
            warnings.warn(
                f"FetchSGD updates k={k} of {n:,} elements per step (fraction={self.fraction}). With fewer than {_FEW} "
                "its sketch is too small to tell large elements from noise, and training may diverge. Use "
                f"fraction={fits} or more for a model of this size.",
                UserWarning,
                stacklevel=2,
            )
        for name in ("momentum_sketch", "error_sketch"):
            r.state[name] = torch.zeros(self.rows, self.columns * k, dtype=torch.float32, device=r.x.device)
        for name in ("momentum", "unsent") if self.conserving else ():
            r.state[name] = self.zeros(r)

    def num_updated(self, n: int) -> int:
        """Return $k$, the number of elements that a step updates, for n parameters."""
        return min(n, max(1, round(self.fraction * n)))

    def before_step(self, r: Replica) -> None:
        """Compute the common update, and write it into the gradient."""
        # One key for all steps: tables only add up while their hashes stay the same.
        fresh, k, key = self.share(r), self.num_updated(r.x.numel()), draw_key(r.seed, 0)
        fresh_table, _ = Table.of(fresh, (self.rows, self.columns * k), key).all_reduced(r, fresh[:0])
        r.g.zero_()
        if not holds(fresh_table.finite):
            r.count("skipped_steps")
            return
        velocity, error = r.state["momentum_sketch"], Table(r.state["error_sketch"], fresh.numel(), key)
        error.cells.add_(velocity.mul_(self.momentum).add_(fresh_table.cells))
        if not holds(error.finite):
            raise NonFiniteError(
                f"step {r.step}: the sketch of unsent gradients is NaN or infinite. Lower the learning rate, or clip "
                "gradients"
            )
        r.metrics["unsent_norm"] = error.norm
        if self.conserving:
            self._update_exactly(r, fresh, error)
            return
        # As published: estimates are applied, and their cells are cleared.
        chosen = error.largest(k)
        update = Update([(chosen, error.estimates(chosen).to(fresh.dtype))], chosen, fresh[:0], ())
        applied = self.write_(r, update)
        occupied = error.cells_of(applied)
        error.cells.masked_fill_(occupied, 0.0)
        velocity.masked_fill_(occupied, 0.0)

    def _update_exactly(self, r: Replica, fresh: Tensor, error: Table) -> None:
        """Apply the largest of the candidates' exact sums, and subtract exactly those from the table."""
        momentum, unsent, k = r.state["momentum"], r.state["unsent"], self.num_updated(r.x.numel())
        unsent.add_(momentum.mul_(self.momentum).add_(fresh))
        candidates = error.largest(self.second_round * k)
        exact = r.comm.all_reduce_(unsent[candidates]).wait()
        largest = largest_of(exact, k)
        where = candidates[largest]
        update = Update([(where, exact[largest])], where, fresh[:0], ())
        applied = self.write_(r, update)
        # Elements with a learning rate of zero were not applied, and stay in the table.
        error.subtract_(applied, exact[largest][torch.searchsorted(where, applied)])
        unsent.index_fill_(0, applied, 0.0)

    def regroup(self, r: Replica, before: int) -> None:
        """With `conserving`, clear the residual and momentum of a joining worker, and sketch the sums again."""
        super().regroup(r, before)
        # A lost worker's part would stay in the sketches forever, since no worker could apply it.
        pairs = (("momentum", "momentum_sketch"), ("unsent", "error_sketch")) if self.conserving else ()
        for name, sketch in pairs:
            table = Table.of(r.state[name], r.state[sketch].shape, draw_key(r.seed, 0))
            r.state[sketch].copy_(table.all_reduced(r, r.state[name][:0])[0].cells)
