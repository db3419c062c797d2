# SPDX-License-Identifier: Apache-2.0
"""Compressed means of parameters, for methods whose workers do not return to the mean."""

from typing import TypeGuard

import torch
from torch import Tensor

from thinwire.core.comm.work import Work
from thinwire.core.replica.replica import Replica
from thinwire.errors import ConfigError
from thinwire.methods.codecs.base import Codec, check_differences, draw_key
from thinwire.methods.codecs.feedback import ErrorFeedback
from thinwire.methods.reduce.compressed_all_reduce import at_once, compressed_mean_, mean_, mean_from_residual


def check_tracked(codec: Codec | None) -> None:
    """Check that the codec can compress differences, and loses nothing.

    Raises:
        ConfigError: it cannot, or its residual decays or is in the dtype of the model.
    """
    check_differences(codec)
    if codec is not None and codec.traits.forgets:
        raise ConfigError(
            f"codec={codec}: workers do not return to the mean here, so the mean would never get what a decaying "
            "residual drops. Use decay=1"
        )
    if isinstance(codec, ErrorFeedback) and codec.residual == "model":
        raise ConfigError(
            f"codec={codec}: the residual contains parameters here, whose small differences need fp32. Use "
            "residual='fp32'"
        )


def tracks(codec: Codec | None) -> TypeGuard[Codec]:
    """Return True if `tracked_mean` keeps a mean that follows all workers."""
    return codec is not None and codec.traits.keeps_residual


def common_point(r: Replica, codec: Codec | None) -> Tensor:
    """Return the mean of the workers' initial parameters, with a codec in fp32 at least, and allocate `tracked_mean`.

    The mean is equal on all workers.
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
    """Allocate the state of `tracked_mean`, for the initial parameters.

    Args:
        r: the replica.
        codec: a codec with error feedback.
        point: the mean of the initial parameters.
        pulled: whether `pull_mean_` will be called.
    """
    r.state["mean"] = point.to(r.x.device, copy=True)
    # Residuals are in fp32, which has too few digits for parameters in fp64.
    if pulled or not at_once(codec) or r.x.dtype == torch.float64:
        r.state["sent"] = r.x.clone()
    else:
        r.state["error"] = r.x.to(torch.float32, copy=True).neg_()


def mean_from(r: Replica, x: Tensor, point: Tensor, codec: Codec, share: float = 1.0) -> Work[Tensor]:
    """Return `point` plus the mean of the workers' compressed differences from it, equal on all ranks.

    Args:
        r: the replica.
        x: its vector, which may change before the wait.
        point: a vector that is equal on all ranks; must not change before the wait.
        codec: compresses the differences.
        share: the worker's weight, divided by the mean of all weights.
    """
    delta = x.to(point.dtype) - point
    return _coded_mean(r, delta if share == 1 else delta.mul_(share), codec).then(lambda delta: delta.add_(point))


def tracked_mean(r: Replica, x: Tensor, point: Tensor, codec: Codec | None) -> Work[Tensor]:
    r"""Return the mean over workers of `x`, up to the codec's error, equal on all ranks.

    An unbiased codec $C$ encodes differences from a common point $z$: $m = z + \frac1n \sum_j C(x_j - z)$. With error
    feedback the differences are those from the worker's own vector in its last message, $s_i$:

    $$m \leftarrow m + \tfrac1n \sum_j C(x_j - s_j), \qquad s_i \leftarrow x_i ,$$

    so that $m$ is the mean of all $x_i$ minus the mean of the residuals $e_i$. A codec in two stages sends
    $C(x_i + (e_i - s_i))$, and without `pull_mean_`, $e_i - s_i$ is stored as one vector.

    Error feedback must not be used for differences from $z$ if $x_i$ keeps its own part of them: the next difference
    would contain the unsent part again, and adding the residual would count it twice.

    Args:
        r: the replica; with error feedback its state has `mean` ($m$), and `error` ($e_i - s_i$) or `sent` ($s_i$).
        x: its vector, which may change before the wait.
        point: $z$, equal on all ranks; must not change before the wait.
        codec: compresses the differences; None sends them uncompressed.

    Returns:
        The work of the mean. With error feedback its result is `mean` itself; do not change it.
    """
    if codec is None:
        return mean_(r.comm, x.clone())
    if not codec.traits.keeps_residual:
        return mean_from(r, x, point, codec)
    mean, sent = r.state["mean"], r.state.get("sent")
    if sent is None:
        delta = x
    else:
        delta = x.to(mean.dtype) - sent
        sent.copy_(x)
    if at_once(codec):
        # The message cannot be undone, since `sent` has changed, so no vector is kept for that while it is in flight.
        key = draw_key(r.seed, r.step)
        found = mean_from_residual(r.comm, delta, codec, r.state, key=key, into=mean)
        if sent is None:
            r.state["error"].sub_(x)
        return found
    return _coded_mean(r, delta, codec).then(mean.add_)


def pull_mean_(r: Replica, codec: Codec | None, point: Tensor, weight: float) -> None:
    r"""Update `tracked_mean` after all workers were pulled to a common point: $x_i \leftarrow (1-w) x_i + w z$.

    All ranks know the point, so nothing is sent: $m \leftarrow (1-w) m + w z$, $s_i \leftarrow (1-w) s_i + w z$. The
    residuals are unchanged. With $w = 1$ this is error feedback of differences from $z$.

    Args:
        r: the replica; no mean may be in flight.
        codec: the codec of the means.
        point: $z$, equal on all ranks.
        weight: $w$.
    """
    if tracks(codec):
        for name in ("mean", "sent"):
            r.state[name].lerp_(point.to(r.state[name]), weight)


def restart_mean(r: Replica, codec: Codec | None, *, pulled: bool = False) -> None:
    r"""Restart `tracked_mean` at the parameters, which are equal on all ranks; no mean may be in flight.

    With `pull_mean_`, residuals also contain the part that pulls have removed from the workers,
    $m + \tfrac1n \sum_i (e_i - s_i)$, which is kept.

    Args:
        r: the replica.
        codec: the codec of the means.
        pulled: whether `pull_mean_` is called.
    """
    if not tracks(codec):
        return
    if not pulled:
        # The tracked mean lacks the residuals, but the new one is exact.
        forget_residuals(r)
    elif "error" in r.state:
        r.state["error"].add_(r.state["mean"] - r.state["sent"])
    r.state["mean"].copy_(r.x)
    if "sent" in r.state:
        r.state["sent"].copy_(r.x)
    else:
        r.state["error"].copy_(r.x).neg_()


def forget_residuals(r: Replica) -> None:
    """Set all residuals to zero."""
    for name, residual in r.state.items():
        if name.partition("/")[0] in ("error", "server_error"):
            residual.zero_()


def _coded_mean(r: Replica, x: Tensor, codec: Codec) -> Work[Tensor]:
    # A new key for each step, equal on all ranks, so that random codecs draw the same numbers.
    key = draw_key(r.seed, r.step)
    return compressed_mean_(r.comm, x, codec, r.state, key=key, segments=r.segments, like=r.x)
