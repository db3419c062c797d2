# SPDX-License-Identifier: Apache-2.0
"""The licence of every source file, as one line: `python tools/spdx.py` writes it, `--check` names files without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINE = "SPDX-License-Identifier: Apache-2.0"
COMMENTS = {".py": "# {}", ".c": "/* {} */", ".h": "/* {} */", ".css": "/* {} */", ".js": "// {}"}


def sources() -> list[Path]:
    """The tracked files that are code, but for empty ones and the stub, which is written by a program."""
    named = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = (ROOT / name for name in named.split("\0") if Path(name).suffix in COMMENTS)
    return [path for path in paths if path.is_file() and path.stat().st_size]


def has_line(path: Path) -> bool:
    """Whether one of the first two lines is the licence's; the first may name an interpreter."""
    return any(LINE in line for line in path.read_text(encoding="utf-8").split("\n")[:2])


def add_line(path: Path) -> None:
    """Write the line at the top, below that of an interpreter."""
    line, text = COMMENTS[path.suffix].format(LINE) + "\n", path.read_text(encoding="utf-8")
    first, rest = text.split("\n", 1) if text.startswith("#!") else ("", text)
    path.write_text(f"{first}\n{line}{rest}" if first else line + rest, encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Check or write; returns 0 where every file has its line."""
    missing = [path for path in sources() if not has_line(path)]
    if "--check" in arguments:
        for path in missing:
            sys.stderr.write(f"{path.relative_to(ROOT)}: no licence; run python tools/spdx.py\n")
        return 1 if missing else 0
    for path in missing:
        add_line(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
