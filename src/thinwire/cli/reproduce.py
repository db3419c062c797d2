"""`thinwire reproduce`: a paper's claim, checked at the scale of one machine."""

from __future__ import annotations

import json as json_text
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import Positional

from thinwire.cli.console import out
from thinwire.cli.progress import Watch

if TYPE_CHECKING:
    from reproductions.shared.claims import Claim, Result


@dataclass(frozen=True)
class Reproduce:
    """Check a paper's claim against the paper's own baselines; without a name, list what can be checked.

    The exit code is 1 when the claim does not hold.

    Args:
        name: of the reproduction.
        quick: fewer steps and rounds.
        out: the folder; runs/reproduce-NAME-TIME unless given.
        json: print the result as JSON.
    """

    name: Positional[str | None] = None
    quick: bool = False
    out: Path | None = None
    json: bool = False

    def __call__(self) -> int:
        """Check one, or list them all."""
        from reproductions.shared.claims import claim, write_result

        if self.name is None:
            return self._list()
        which = claim(self.name)
        folder = self.out or _folder(self.name)
        result = self._measure(which, folder)
        page = write_result(folder, which, result, quick=self.quick, when=time.strftime("%Y-%m-%d"))
        if self.json:
            out.print(json_text.dumps({"name": which.name, **asdict(result)}), markup=False)
        else:
            _show(which, result, page)
        return 0 if result.holds else 1

    def _measure(self, which: Claim, folder: Path) -> Result:
        from reproductions.shared.claims import Attempt

        from thinwire.runs import RunFolder

        RunFolder(folder).create()
        with ExitStack() as contexts:
            watches: list[Watch] = []

            def begin(recipe: str, place: int) -> None:
                contexts.close()
                watches[:] = [contexts.enter_context(Watch(f"[{place + 1}] {recipe}", None, None))]

            return which.run(Attempt(folder, self.quick, lambda event: watches[0](event), begin))

    def _list(self) -> int:
        from reproductions.shared.claims import MODULES, claim, last_result

        rows = [(claim(name), last_result(name)) for name in MODULES]
        if self.json:
            content = [{"name": each.name, "claim": each.sentence, "last": last} for each, last in rows]
            out.print(json_text.dumps(content), markup=False)
            return 0
        for each, last in rows:
            out.print(f"{each.name}: {each.sentence}", markup=False)
            out.print(f"  {each.paper}", markup=False)
            out.print(f"  {_last(last)}", markup=False)
        return 0


def _folder(name: str) -> Path:
    return Path("runs") / f"reproduce-{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _last(result: dict[str, Any] | None) -> str:
    if result is None:
        return "no committed result"
    verdict = "holds" if result["holds"] else "does not hold"
    return f"{verdict}: {result['measured']} (thinwire {result['thinwire']}, {result['when']})"


def _show(which: Claim, result: Result, page: Path) -> None:
    lines = {
        "claim": which.sentence,
        "paper": which.paper,
        "published": which.published,
        "measured": result.measured,
        "spread": f"{result.least:.4g} to {result.most:.4g}",
        "rule": which.rule,
        "verdict": "holds" if result.holds else "does not hold",
        "report": str(page),
    }
    for name, words in lines.items():
        out.print(f"{name:<10}{words}", markup=False)
