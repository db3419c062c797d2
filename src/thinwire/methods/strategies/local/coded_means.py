# SPDX-License-Identifier: Apache-2.0
"""Coded means of parameters, for methods whose workers do not all return to the mean."""

from typing import TypeGuard

import torch
from torch import Tensor

from thinwire.core.comm.work import Work
from thinwire.core.replica.replica import Replica
from thinwire.errors import ConfigError
from thinwire.methods.codecs.base import Codec, check_differences, draw_key
from thinwire.methods.reduce.compressed_all_reduce import at_once, compressed_mean_, mean_, mean_from_residual


def check_tracked(codec: Codec | None) -> None:
    """Check that the codec can compress differences, and keeps a tracked mean correct.

    Raises:
        ConfigError: with the fix.
    """
    check_differences(codec)
    if codec is not None and codec.forgets:
        raise ConfigError(
            f"codec={codec}: workers do not return to the mean here, so that it would lack for good what is forgotten; "
            "use decay=1"
        )


def tracks(codec: Codec | None) -> TypeGuard[Codec]:
    """Whether `tracked_mean` keeps a mean that follows all workers."""
    return codec is not None and codec.keeps_residual


def common_point(r: Replica, codec: Codec | None) -> Tensor:
    """The mean of the workers' first parameters, equal on all of them; with a codec in fp32 at least.

    Allocates what `tracked_mean` keeps.
    """
    point = r.x.clone() if r.equal_start else mean_(r.comm, r.x.clone()).wait()
    if codec is None:
        return point
    # In half precision small differences would be lost.
    point = point.to(torch.promote_types(r.x.dtype, torch.float32))
    if tracks(codec):
        track(r, codec, point, pulled=False)
    return point


def track(r: Replica, codec: Codec, point: Tensor, *, pulled: bool) -> None:
    """Allocate what `tracked_mean` keeps, at the first parameters.

    Args:
        r: the worker.
        codec: with error feedback.
        point: the mean of the first parameters.
        pulled: whether `pull_mean_` will be called.
    """
    r.state["mean"] = point.to(r.x.device, copy=True)
    # Residuals are in fp32: of parameters in fp64 they would keep too few digits.
    if pulled or not at_once(codec) or r.x.dtype == torch.float64:
        r.state["sent"] = r.x.clone()
    else:
        r.state["error"] = r.x.to(torch.float32, copy=True).neg_()


def mean_from(r: Replica, x: Tensor, point: Tensor, codec: Codec, share: float = 1.0) -> Work[Tensor]:
    """Return `point` plus the mean of the workers' compressed differences from it, equal on all ranks.

    Args:
        r: the worker.
        x: its vector, which may change before the wait.
        point: a vector that is the same on all ranks; must not change before the wait.
        codec: compresses the differences.
        share: the worker's weight, as a multiple of the mean of all.
    """
    delta = x.to(point.dtype) - point
    return _coded_mean(r, delta if share == 1 else delta.mul_(share), codec).then(lambda delta: delta.add_(point))


def tracked_mean(r: Replica, x: Tensor, point: Tensor, codec: Codec | None) -> Work[Tensor]:
    r"""The mean over workers of `x`, as exactly as the codec sends it, the same on all ranks.

    An unbiased codec $C$ encodes differences from a common point $z$: $m = z + \frac1n \sum_j C(x_j - z)$. With error
    feedback differences are taken from the worker's own vector in its last message, $s_i$:

    $$m \leftarrow m + \tfrac1n \sum_j C(x_j - s_j), \qquad s_i \leftarrow x_i ,$$

    so that $m$ is the mean of all $x_i$ but for what the residuals $e_i$ hold at this time. A codec in two stages sends
    $C(x_i + (e_i - s_i))$, and $e_i - s_i$ is kept as one vector where nothing pulls $s_i$.

    Differences from $z$ must not be fed back where $x_i$ keeps them: what a message leaves out is in the next
    difference once more, and residuals that add it again carry $z$ further beyond the workers the longer a codec holds
    an element back. A mean that is tracked is `mean` itself, which must not be changed.

    Args:
        r: the worker; with error feedback it keeps `mean` ($m$), and `error` ($e_i - s_i$) or `sent` ($s_i$).
        x: its vector, which may change before the wait.
        point: $z$, the same on all ranks; must not change before the wait.
        codec: compresses the differences; None sends them uncompressed.
    """
    if codec is None:
        return mean_(r.comm, x.clone())
    if not codec.keeps_residual:
        return mean_from(r, x, point, codec)
    mean, sent = r.state["mean"], r.state.get("sent")
    if sent is None:
        delta = x
    else:
        delta = x.to(mean.dtype) - sent
        sent.copy_(x)
    if at_once(codec):
        # Once sent it cannot be taken back, as `sent` has changed; so nothing of a vector's size is kept in flight.
        found = mean_from_residual(r.comm, delta, codec, r.state, key=draw_key(r.seed, r.step))
        if sent is None:
            r.state["error"].sub_(x)
    else:
        found = _coded_mean(r, delta, codec)
    return found.then(mean.add_)


def pull_mean_(r: Replica, codec: Codec | None, point: Tensor, weight: float) -> None:
    r"""Let `tracked_mean` know that all workers have been pulled to a common point: $x_i \leftarrow (1-w) x_i + w z$.

    Values that all ranks know are not sent: $m \leftarrow (1-w) m + w z$, $s_i \leftarrow (1-w) s_i + w z$. The
    residuals stay unchanged, since the pull has taken a part of them out of $x_i$. With $w = 1$ this is plain error
    feedback of differences from $z$.

    Args:
        r: the worker; nothing may be in flight.
        codec: of the means.
        point: $z$, the same on all ranks.
        weight: $w$.
    """
    if tracks(codec):
        for name in ("mean", "sent"):
            r.state[name].lerp_(point.to(r.state[name]), weight)


def restart_mean(r: Replica, codec: Codec | None, *, pulled: bool = False) -> None:
    r"""Restart `tracked_mean` at the parameters, which are equal on all ranks; nothing may be in flight.

    Where `pull_mean_` is called, residuals hold what a pull has taken out of the workers, too: this part of them,
    $m + \tfrac1n \sum_i (e_i - s_i)$, stays.

    Args:
        r: the worker.
        codec: of the means.
        pulled: whether `pull_mean_` is called.
    """
    if not tracks(codec):
        return
    if not pulled:
        # The residuals are missing from the mean. This mean is exact, so adding them would make it wrong.
        forget_residuals(r)
    elif "error" in r.state:
        r.state["error"].add_(r.state["mean"] - r.state["sent"])
    r.state["mean"].copy_(r.x)
    if "sent" in r.state:
        r.state["sent"].copy_(r.x)
    else:
        r.state["error"].copy_(r.x).neg_()


def forget_residuals(r: Replica) -> None:
    """Let residuals be zero."""
    for name, residual in r.state.items():
        if name.partition("/")[0] in ("error", "server_error"):
            residual.zero_()


def _coded_mean(r: Replica, x: Tensor, codec: Codec) -> Work[Tensor]:
    # The key is the same on all ranks, so that random codecs draw alike, and a new one at every step.
    return compressed_mean_(r.comm, x, codec, r.state, key=draw_key(r.seed, r.step), segments=r.segments)
