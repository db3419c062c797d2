# SPDX-License-Identifier: Apache-2.0
"""Sketched SGD: sum count sketches of the residuals, then the exact values of the largest entries."""

from typing import Annotated, Literal

import torch
from torch import Tensor

from thinwire.core.kernels import both, is_finite, read_flags, top_k
from thinwire.core.replica.displacement import Momentum
from thinwire.core.replica.replica import Replica
from thinwire.core.validation import Range
from thinwire.methods.codecs.base import draw_key
from thinwire.methods.codecs.header import Header, codec_number, seal, unseal_all
from thinwire.methods.strategies.base import Traits
from thinwire.methods.strategies.gradients.sketches import SketchedUpdates, Split, Table, Update, largest_of, split_of
from thinwire.registry import registered

_VALUE_BYTES, _INDEX_BYTES = 4, 4


@registered
class SketchedSGD(SketchedUpdates):
    r"""Sum count sketches of the workers' residuals, and update only the coordinates that are largest in the sum.

    With $g_i$ worker $i$'s gradient, $v_i$ its residual, $u_i$ its momentum and $\gamma$ the learning rate,

    $$u_i \leftarrow \rho u_i + \tfrac{\gamma}{n} g_i, \qquad v_i \leftarrow v_i + u_i, \qquad
      S = \sum_i \mathrm{sketch}(v_i),$$

    $H$ are the $Pk$ coordinates with the largest estimates in $S$; a second all-reduce gives the exact sums there,

    $$w = \sum_i v_i[H], \qquad \Delta = \text{the } k \text{ largest of } w, \qquad x \leftarrow x - \Delta, \qquad
      u_i, v_i \leftarrow 0 \text{ where } \Delta \text{ was applied}.$$

    Nothing is lost: applied updates and $\sum_i v_i$ sum to all momenta. If $Pk$ covers all coordinates, this is SGD.
    Hashes change at every step, so that coordinates do not always collide with the same others. Tensors of fewer than
    `dense_below` elements are sent uncompressed, and keep their momentum.

    The optimizer must be SGD without momentum; `momentum` replaces it. Its weight decay acts on all parameters at every
    step, and is not sent. If a gradient is not finite on any rank, all ranks skip the step.

    Traffic per worker and step, with $r$ rows of $c$ columns and $d$ elements in small tensors:
    $2\frac{n-1}{n} \cdot 4 (rc + Pk + d)$ bytes. With fewer than about $n = rc/k + P$ workers, each sends its own $k$
    largest entries with their indices, $(n-1) \cdot 8k$ bytes and a header of 16 bytes, and the small tensors, because
    this takes fewer bytes.
    State: `momentum` ($u$) and `unsent` ($v$, the residual), each like the parameters in fp32 at least.

    Ivkin et al., Communication-efficient Distributed SGD with Sketching, NeurIPS 2019, arXiv:1903.04488, Algorithm 1;
    momentum factor masking: Lin et al., Deep Gradient Compression, ICLR 2018, arXiv:1712.01887.

    Example:
        >>> import torch, thinwire
        >>> def train(comm):
        ...     model = torch.nn.Linear(200, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     strategy = SketchedSGD(fraction=0.005, momentum=0.0, dense_below=0, recovery="sketch")  # 1 a step
        ...     worker = thinwire.attach(model, torch.optim.SGD(model.parameters(), lr=1.0), strategy, comm=comm)
        ...     x = torch.zeros(1, 200)
        ...     x[0, 7], x[0, 70] = 3.0, 5.0
        ...     model(x).sum().backward()
        ...     worker.optimizer.step()
        ...     residual = worker.replicas[0].state["unsent"]
        ...     return model.weight[0, [7, 70]].tolist(), residual[[7, 70]].tolist()
        >>> thinwire.run_threads(2, train)[0]  # the larger one is applied; half of the other stays in each residual
        ([0.0, -5.0], [1.5, 0.0])

    Args:
        fraction: $k$ divided by the number of coordinates; less updates fewer of them per step.
        columns: $c/k$; more finds the largest coordinates more reliably, and sends more bytes. Fewer than 32 miss some.
        rows: $r$, odd; more makes a wrong estimate less likely.
        second_round: $P$, candidates for each updated coordinate whose exact values are summed; 0 applies the
            estimates, and loses their errors.
        momentum: $\rho$, in [0, 1).
        masking: set the momentum of updated coordinates to zero; otherwise it continues to act.
        lr_in_residual: True multiplies gradients by the learning rate before they enter the residual; False multiplies
            each update by the learning rate of the step that applies it.
        dense_below: elements of the smallest tensor that is sketched.
        recovery: "sketch", "gather" (each worker's own largest entries), or "auto" for the one with fewer bytes.
    """

    second_round: Annotated[int, Range("0..", "4 finds nearly all coordinates")] = 4
    momentum: Momentum = 0.9
    masking: bool = True
    lr_in_residual: bool = True
    dense_below: Annotated[int, Range("0..", "1024 is usual")] = 1024
    recovery: Literal["auto", "sketch", "gather"] = "auto"

    paper = "Ivkin et al., Communication-efficient Distributed SGD with Sketching, NeurIPS 2019, arXiv:1903.04488"
    waits = "every step, after the backward pass, all wait for the slowest worker and for two small sums"
    limits = "needs plain SGD; updates are sparse, so residuals become stale; on few workers top-k sends less"

    def make_traits(self) -> Traits:
        """See `Traits`."""
        return Traits(
            reads_gradient=True,
            equal_replicas=True,
            lr_factor=self._lr_factor(),
        )

    def _lr_factor(self) -> float | None:
        """Return the momentum's factor if no momentum is lost; the effect of masking depends on the gradients."""
        exact = self.second_round > 0 or self.recovery == "gather"
        return 1 / (1 - self.momentum) if exact and not (self.masking and self.momentum) else None

    def start(self, r: Replica) -> None:
        """Allocate momentum and residual."""
        for name in ("momentum", "unsent"):
            r.state[name] = self.zeros(r)

    def before_step(self, r: Replica) -> None:
        """Compute the common update, and write it into the gradient."""
        momentum = self.share(r).add_(r.state["momentum"], alpha=self.momentum)
        unsent = r.state["unsent"] + momentum
        split = split_of(r, self.dense_below)
        gathers = self.gathers(r.comm.size, split)
        update = self._gathered(r, unsent, split) if gathers else self._recovered(r, unsent, split)
        # From here on the gradient is the update. A skipped step does not change the state.
        r.g.zero_()
        if update is None:
            r.count("skipped_steps")
            return
        applied = self.write_(r, update)
        r.state["momentum"].copy_(momentum)
        if self.masking:
            r.state["momentum"].index_fill_(0, applied, 0.0)
        unsent.index_fill_(0, applied, 0.0)
        # Small tensors were sent completely; masking must not change their momentum.
        for part in split.small:
            unsent[part] = 0.0
        r.state["unsent"] = unsent

    # -- the common update ---------------------------------------------------------------------------------------

    def num_updated(self, split: Split) -> int:
        """Return $k$, the number of sketched coordinates that a step updates."""
        return min(split.length, max(1, round(self.fraction * split.length)))

    def gathers(self, size: int, split: Split) -> bool:
        """Return True if each worker sends its own largest entries instead of a sketch."""
        k = self.num_updated(split)
        if not k:
            # All tensors are small, and are sent uncompressed.
            return False
        if self.recovery != "auto":
            return self.recovery == "gather"
        # Bytes divided by n-1: a ring all-reduce sends 2 (n-1)/n of the table, an all-gather n-1 messages.
        table = 2 / size * _VALUE_BYTES * (self.rows * self.columns * k + min(self.second_round * k, split.length))
        return size > 1 and (_VALUE_BYTES + _INDEX_BYTES) * k < table

    def _recovered(self, r: Replica, unsent: Tensor, split: Split) -> Update | None:
        """Return the update from a summed sketch and exact sums; None if any gradient is not finite."""
        # A new key for each step is possible because the residual is a vector, and the table only a message.
        k, key = self.num_updated(split), draw_key(r.seed, r.step)
        large = split.large_of(unsent)
        mine = Table.of(large, (self.rows, self.columns * k), key)
        table, dense = mine.all_reduced(r, split.small_of(unsent))
        if not all(read_flags([table.finite, is_finite(dense)])):
            return None
        r.metrics["unsent_norm"] = table.norm
        chosen = table.largest(self.second_round * k or k)
        if self.second_round:
            exact = r.comm.all_reduce_(large[chosen]).wait()
            largest = largest_of(exact, k)
            chosen, values = chosen[largest], exact[largest]
        else:
            values = table.estimates(chosen).to(unsent.dtype)
        positions = split.positions(chosen)
        return Update([(positions, values)], positions, dense.to(unsent.dtype), split.small)

    def _gathered(self, r: Replica, unsent: Tensor, split: Split) -> Update | None:
        """Return the update from each worker's own largest entries; None if any gradient is not finite."""
        k, large = self.num_updated(split), split.large_of(unsent)
        dense = r.comm.all_reduce_(split.small_of(unsent)) if split.small else None
        # A rank reports a non-finite gradient, and all ranks skip the step together.
        finite = is_finite(large)
        mine = torch.arange(k, device=large.device) if finite is False else top_k(large, k)
        header = Header(codec_number(repr(self), large.numel()), r.comm.step)
        # Values and indices in one message, which takes one latency.
        message = torch.cat([large[mine].view(torch.uint8), mine.to(torch.int32).view(torch.uint8)])
        gathered = r.comm.all_gather(seal(message, header._replace(finite=finite))).wait()
        received = unseal_all(gathered, header, torch.uint8, r.comm.name)
        small = unsent[:0] if dense is None else dense.wait()
        valid, usable = read_flags([received.valid, both(received.usable, is_finite(small))])
        if not valid:
            received.refuse(f"{r.comm.name(r.comm.rank)}, step {r.comm.step}, largest entries")
        rows = torch.stack(received.payloads)
        sent, where = (part.contiguous() for part in rows.tensor_split([rows.shape[1] - _INDEX_BYTES * k], dim=1))
        values, positions = sent.view(large.dtype).flatten(), split.positions(where.view(torch.int32).flatten().long())
        if not usable:
            return None
        # On a CPU index_add_ adds repeated positions in order. Elsewhere the order varies, so each worker's entries,
        # whose positions differ, are added separately.
        width = positions.numel() if values.device.type == "cpu" else k
        parts = list(zip(positions.split(width or 1), values.split(width or 1), strict=True))
        return Update(parts, split.positions(mine), small, split.small)
