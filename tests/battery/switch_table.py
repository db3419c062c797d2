# SPDX-License-Identifier: Apache-2.0
"""The table of what a switch keeps, from switching every strategy of the battery to one of its own class.

`python -m tests.battery.switch_table` writes it into `docs/reference/switching.md`.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

import thinwire
from tests.battery.cases import STRATEGIES, is_first
from tests.battery.runs import Case, begin, go_on, smallest, with_
from thinwire import Comm
from thinwire.planning.plan.traffic import topologies
from thinwire.worker.worker import internals_of

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "switching.md"
MARKS = ("<!-- table: switch -->\n", "<!-- /table -->\n")


def names_of(each: Case) -> tuple[list[str], list[str], list[str]]:
    """State that is kept as it is, that is set anew where workers are, and that is dropped."""
    setting = with_(each, size=smallest(each), steps=8)

    def body(comm: Comm) -> tuple[list[str], list[str], list[str]]:
        worker = go_on(begin(comm, setting), setting, 5)
        worker.optimizer.zero_grad()
        internals_of(worker).wait_pending()
        before = {name: x.clone() for name, x in worker.replicas[0].state.items()}
        done = worker.switch(each.strategy)
        after = worker.replicas[0].state
        same = [name for name in done.kept if name in after and torch.equal(after[name], before[name])]
        worker.detach()
        return same, [name for name in done.kept if name not in same], list(done.dropped)

    found = thinwire.run_threads(setting.size, body, timeout=20)[0]
    return tuple([re.sub(r"server_error/.*", "server_error", name) for name in names] for names in found)  # type: ignore[return-value]


def table() -> str:
    """All rows, as Markdown."""
    rows = ["| Strategy | Kept | Set to the parameters | Dropped |", "|---|---|---|---|"]
    for each in STRATEGIES:
        if not all(type(topology).__module__.startswith("thinwire.") for topology in topologies(each.strategy)):
            continue  # a graph that only tests have
        columns = names_of(each)
        if not is_first(each) and not any(columns):
            continue
        cells = [", ".join(f"`{name}`" for name in dict.fromkeys(names)) for names in columns]
        rows.append(f"| `{each.strategy!s}` | {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |"))
    return "\n".join(rows) + "\n"


def written(page: str) -> str:
    """The page with the table of now."""
    start, end = page.index(MARKS[0]) + len(MARKS[0]), page.index(MARKS[1])
    return page[:start] + "\n" + table() + "\n" + page[end:]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
