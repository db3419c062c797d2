# SPDX-License-Identifier: Apache-2.0
"""Write the skeleton of a strategy of thinwire, with everything that the repository asks of one.

`python tools/new_strategy.py LazySGD` writes the method file, its oracle, its line in the battery, its tests, its page
and its rows in the tables of the docs, and updates the stub. The skeleton averages the parameters every few steps, so
all of it works at once. Replace the method, the oracle and the texts by yours.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
FAMILIES = ("gossip", "gradients", "leader", "local", "push_sum")

METHOD = '''\
# SPDX-License-Identifier: Apache-2.0
"""Average the parameters every few steps."""

from typing import Annotated

from thinwire.core.replica.replica import Replica
from thinwire.core.validation import Range
from thinwire.methods.reduce.compressed_all_reduce import mean_
from thinwire.methods.strategies.base import Strategy, Traits
from thinwire.registry import registered


@registered
class NAME(Strategy):
    r"""Average the parameters every $\\tau$ steps.

    With $x_i$ the parameters of worker $i$ of $n$ after $\\tau$ steps of its own optimizer,

    $$x_i \\leftarrow \\tfrac1n \\sum_j x_j .$$

    Traffic: $2\\frac{n-1}{n}$ of the parameters per worker and period. State: none.

    PAPER.

    Args:
        period: $\\tau$, steps between averages; a larger value sends less, and workers drift further apart.

    Example:
        >>> import torch
        >>> import thinwire
        >>> def train(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     thinwire.attach(model, optimizer, thinwire.NAME(period=2), comm=comm)
        ...     for _ in range(2):
        ...         model.weight.grad = torch.full_like(model.weight, comm.rank)
        ...         optimizer.step()
        ...     return model.weight.item()
        >>> thinwire.run_threads(2, train)
        [-1.0, -1.0]
    """

    period: Annotated[int, Range("1..", "8 is usual")] = 8

    paper = "PAPER"
    waits = "every `period` steps all workers wait for one all-reduce"
    limits = "workers drift apart during a period"

    def make_traits(self) -> Traits:
        """See `Traits`."""
        return Traits(period=self.period, lr_factor=None)

    def after_step(self, r: Replica) -> None:
        """Average the parameters at the end of a period."""
        if r.step % self.period == 0:
            mean_(r.comm, r.x).wait()
'''

ORACLE = '''\
# SPDX-License-Identifier: Apache-2.0
"""NAME from the algorithm box of its paper: all workers in one tensor, the worker on the leading axis.

Real runs are compared with it. It imports nothing of thinwire.
"""

from collections.abc import Callable

from torch import Tensor

Gradient = Callable[[Tensor, int], Tensor]
Descent = Callable[[Tensor, Tensor, int], Tensor]


def MODULE(gradient: Gradient, x: Tensor, descend: Descent, steps: int, *, period: int) -> Tensor:
    """Take local steps, and average the workers every `period` steps."""
    for k in range(steps):
        x = x + descend(x, gradient(x, k), k)
        if (k + 1) % period == 0:
            x = x.mean(0).expand_as(x)
    return x
'''

TESTS = '''\
# SPDX-License-Identifier: Apache-2.0
"""NAME: what it equals at special values of its hyperparameters, and which values are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import thinwire


def trained(strategy: thinwire.Strategy) -> list[Tensor]:
    """The parameters of three workers after four steps with different gradients."""

    def train(comm: thinwire.Comm) -> Tensor:
        model = torch.nn.Linear(3, 2, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        thinwire.attach(model, optimizer, strategy, comm=comm)
        for step in range(4):
            model.weight.grad = torch.full_like(model.weight, float(comm.rank + step))
            optimizer.step()
        return model.weight.detach().clone()

    return thinwire.run_threads(3, train)


def test_MODULE_is_local_sgd() -> None:
    for found, expected in zip(trained(thinwire.NAME(period=2)), trained(thinwire.LocalSGD(period=2)), strict=True):
        assert torch.equal(found, expected)


def test_MODULE_refuses_a_period_below_one() -> None:
    with pytest.raises(thinwire.ConfigError, match="period=0: must be at least 1"):
        thinwire.NAME(period=0)
'''

PAGE = """\
# NAME

Every worker trains with its own optimizer, and every $\\tau$ steps the workers average their parameters.

## When to use it

| Use it | Do not use it |
|---|---|
| The transfer takes longer than a step. | Workers' data differ much: use a shorter period. |

## Update

With $x_i$ the parameters of worker $i$ of $n$, every $\\tau$ steps

$$x_i \\leftarrow \\frac1n \\sum_j x_j .$$

## Recipe

```python
worker = thinwire.attach(model, optimizer, thinwire.NAME(period=8))
```

## Hyperparameters

| Hyperparameter | Choice |
|---|---|
| `period` | $\\tau$. Longer periods send less, and workers drift further apart. |

## Bytes and memory

Each worker sends $2\\frac{n-1}{n}B$ per period, with $B$ the bytes of the parameters. All workers wait for
one all-reduce at the end of a period.

## Source

PAPER.
"""


def snake(name: str) -> str:
    """The name of the module of a class: `LazySGD` becomes `lazy_sgd`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def write(root: Path, name: str, *, family: str, paper: str) -> list[Path]:
    """Write all files and rows of a strategy.

    Args:
        root: the repository.
        name: the name of the class.
        family: the folder under `src/thinwire/methods/strategies`.
        paper: authors, title, venue and arXiv number.

    Returns:
        The files that were written or changed.

    Raises:
        FileExistsError: the method file exists; nothing is written then.
    """
    module, page = snake(name), snake(name).replace("_", "-")
    filled = {
        f"src/thinwire/methods/strategies/{family}/{module}.py": METHOD,
        f"tests/oracles/{module}.py": ORACLE,
        f"tests/methods/strategies/test_{module}.py": TESTS,
        f"docs/strategies/{page}.md": PAGE,
    }
    for path in filled:
        if (root / path).exists():
            raise FileExistsError(f"{path} exists. Choose another name, or remove it")
    for path, text in filled.items():
        (root / path).write_text(text.replace("NAME", name).replace("MODULE", module).replace("PAPER", paper))
    cases = root / "tests/battery/cases.py"
    text = _add_to_import(cases.read_text(), "tests.oracles", module)
    text = _add_to_import(text, "thinwire", name)
    line = f"    case({name}(3), to.stacked({module}.{module}, period=3)),"
    cases.write_text(_insert(text, r"STRATEGIES: list\[Case\] = \[\n(?:.*\n)*?(?=\]\n)", line))
    number = re.search(r"arXiv:([\d.]+\d)", paper)
    cited = paper.replace(number[0], f"[{number[0]}](https://arxiv.org/abs/{number[1]})") if number else paper
    rows = {
        "docs/strategies/index.md": (r"(?:.*\n)*?## Average parameters less often\n(?:.*\n)*?(?=```\n)", page),
        "docs/reference/strategies.md": (
            r"(?:.*\n)*?```\{eval-rst\}\n(?:.*\n)*?(?=```)",
            f"\n.. autoclass:: thinwire.{name}",
        ),
        "docs/reference/papers.md": _end_of_table(
            "Method", f"| {name} | [`{name}`](../strategies/{page}.md) | {cited} |"
        ),
        "docs/explanation/bytes.md": _end_of_table("Recipe", f"| `{name}(period=8)` | $2\\frac{{n-1}}{{n}}B / 8$ |"),
        "docs/how-to/choose.md": _end_of_table(
            "Limit", f"| Averages every few steps, with the skeleton | `{name}()` |"
        ),
        "docs/how-to/learning-rate.md": _end_of_table("Family", f"| `{name}()` | not measured yet: tune the rate | |"),
    }
    for path, (pattern, row) in rows.items():
        (root / path).write_text(_insert((root / path).read_text(), pattern, row))
    return [root / path for path in (*filled, "tests/battery/cases.py", *rows)]


def _end_of_table(first: str, row: str) -> tuple[str, str]:
    """The pattern of a page up to the end of the table whose first column has this name, and the row to add."""
    return rf"(?:.*\n)*?\| {first} \|.*\n(?:\|.*\n)+", row


def _insert(text: str, before: str, line: str) -> str:
    found = re.search(before, text)
    if found is None:
        raise ValueError(f"no place for {line!r}. Update the patterns of tools/new_strategy.py")
    return f"{text[: found.end()]}{line}\n{text[found.end() :]}"


def _add_to_import(text: str, module: str, name: str) -> str:
    """Add a name to a `from module import ...`, in the order of ruff."""
    found = re.search(rf"^from {re.escape(module)} import (?:\(\n((?:    .*\n)+)\)|(.*))$", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"no import from {module}. Update tools/new_strategy.py")
    names = {*re.findall(r"\w+", found[1] or found[2]), name}
    ordered = sorted(
        names,
        key=lambda each: (
            not each.isupper(),
            [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", each.lower())],
        ),
    )
    one_line = f"from {module} import {', '.join(ordered)}"
    lines = "".join(f"    {each},\n" for each in ordered)
    new = one_line if len(one_line) <= 120 and not found[1] else f"from {module} import (\n{lines})"
    return text[: found.start()] + new + text[found.end() :]


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the skeleton, update the generated files, and print what is left to do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="the name of the class, such as LazySGD")
    parser.add_argument("--family", choices=FAMILIES, default="local", help="the folder of the method file")
    parser.add_argument("--paper", default="Author et al., Title, Venue 2000, arXiv:2000.00000", help="its citation")
    given = parser.parse_args(arguments)
    if not re.fullmatch(r"[A-Z][A-Za-z0-9]+", given.name):
        parser.error(f"{given.name}: must be a class name, such as LazySGD")
    try:
        paths = write(ROOT, given.name, family=given.family, paper=given.paper)
    except (FileExistsError, ValueError) as error:
        parser.error(str(error))
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    for command in (["tools/write_stub.py"], ["-m", "tests.battery.switch_table"]):
        subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, check=True)
    changed = "".join(f"  {path.relative_to(ROOT)}\n" for path in paths)
    sys.stdout.write(f"Written or changed:\n{changed}")
    sys.stdout.write(
        "Replace the method, the oracle, the tests and the texts by yours, then run `make format` and `make test`.\n"
    )


if __name__ == "__main__":
    main()
