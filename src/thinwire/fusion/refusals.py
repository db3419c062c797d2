"""What cannot be done for all models at once, said so that it can be mended."""

from __future__ import annotations

import re
from types import TracebackType

from torch import nn

from thinwire.errors import ConfigError

_CAUSES = (
    (
        re.compile(r"\.item\(\)"),
        "it reads one number for all models out of a tensor (`.item()`, `float()`)",
    ),
    (re.compile(r"data-dependent control flow"), "its path depends on a tensor's values, which differ between models"),
    (re.compile(r"inplace|in-place|broadcast shape", re.I), "it writes each model's own values into what all share"),
    (
        re.compile(r"dynamic shape|data-dependent shape|nonzero|masked_select", re.I),
        "its shapes depend on values",
    ),
    (
        re.compile(r"generate_vmap_rule|vmap staticmethod|does not have vmap"),
        "an autograd Function has no vmap",
    ),
)


def refusal(error: Exception, model: nn.Module) -> ConfigError | None:
    """A clear error for what vmap refused, naming the layer; None where the error is the user's own.

    Args:
        error: as it came out of the forward pass.
        model: the one that ran.
    """
    text = str(error)
    if not re.search(r"vmap|functorch|BatchedTensor|Batching rule|match the broadcast shape", text):
        return None
    path = _innermost(error.__traceback__, model)
    layer = f"layer {path!r}" if path else "the model's own forward"
    cause = next((words for pattern, words in _CAUSES if pattern.search(text)), "torch.vmap cannot do this")
    loop = f'loop=["{path}"] to fuse(), which runs that layer model after model' if path else "loop=True to fuse()"
    first = text.strip().splitlines()[0]
    made = ConfigError(f"{layer} cannot run for all models at once: {cause} ({first}). Pass {loop}")
    made.__cause__ = error
    return made


def _innermost(trace: TracebackType | None, model: nn.Module) -> str:
    """The path of the innermost module whose forward was under way."""
    paths = {id(module): path for path, module in model.named_modules()}
    found = ""
    while trace is not None:
        found = paths.get(id(trace.tb_frame.f_locals.get("self")), found)
        trace = trace.tb_next
    return found
