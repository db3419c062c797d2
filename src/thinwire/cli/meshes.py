# SPDX-License-Identifier: Apache-2.0
"""The meshes over which a model can be split, as a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.cli.console import out, print_json
from thinwire.core.units import nbytes, rate, seconds
from thinwire.errors import ConfigError

if TYPE_CHECKING:
    from thinwire.tensor2d.advisor import Advice

_LINK = "1gbit+50us"
_MOST_RANKS = 1 << 16


def explain_meshes(
    ranks: int, *, task: str | None, size: str | None, batch_size: int, link: str | None, data: Path | None, json: bool
) -> None:
    """Show every mesh of `ranks` ranks for a task's model, and mark the best one.

    Args:
        ranks: number of ranks.
        task: a language task; default text.
        size: size of its model.
        batch_size: samples of the whole batch.
        link: links of the ranks, [RANK:]RATE[+DELAY], of which the least rate and the longest delay count; default
            1gbit+50us.
        data: folder of data files.
        json: whether to print the advice as JSON.

    Raises:
        ConfigError: a model that the advisor does not know, or a link without a rate.
    """
    import torch

    from thinwire.lab import tasks
    from thinwire.lab.emulate import parse_links
    from thinwire.tensor2d.advisor import advise, describe_transformer, measure_flops
    from thinwire.tensor2d.panels import Pace

    found = tasks.load(task or "text", data=data)
    with torch.device("meta"):
        model = found.model(size or found.default_size, seed=0)
    length = found.batch(found.shards(1)[0], 0, batch_size=1, seed=0, rank=0)[0].shape[-1]
    described = describe_transformer(model, samples=batch_size, length=length)
    # Numbers of ranks that cannot be are refused with the advice.
    links = parse_links(link or _LINK, min(max(ranks, 1), _MOST_RANKS))
    rates = [each.bits_per_second for each in links if each.bits_per_second is not None]
    if not rates:
        raise ConfigError(f"--link {link}: the best mesh depends on the rate. Give one, such as {_LINK}")
    pace = Pace(max(each.delay_seconds for each in links), min(rates), measure_flops())
    advice = advise(described, ranks, pace)
    if json:
        print_json(advice)
        return
    out.print(f"{found.name} ({size or found.default_size}), {batch_size} samples of {length} tokens")
    _show(advice)


def _show(advice: Advice) -> None:
    from rich.table import Table

    pace = advice.pace
    out.print(
        f"links of {rate(pace.bits_per_second)} and {seconds(pace.seconds_per_message)}, "
        f"{pace.flops_per_second / 1e9:.3g} GFLOP/s measured here\n"
    )
    table = Table("mesh", "kind", "sent per step", "messages", "memory", "communication", "compute")
    for cost in advice.costs:
        name = f"{cost.rows}x{cost.columns}" + " *" * (cost is advice.best)
        if cost.refusal and not cost.memory_bytes:
            table.add_row(name, cost.refusal)
            continue
        table.add_row(
            name,
            cost.refusal or cost.kind,
            nbytes(cost.sent_bytes),
            str(cost.messages),
            nbytes(cost.memory_bytes),
            seconds(cost.communication_seconds),
            seconds(cost.compute_seconds),
        )
    out.print(table)
    out.print(advice.reason)
