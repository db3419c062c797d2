"""Write `src/thinwire/__init__.pyi`, which tells type checkers what the public names are.

The list is `PUBLIC_NAMES` in `src/thinwire/__init__.py`; nothing else is edited by hand. With `--check` nothing is
written, and the exit code is 1 if the file is not what would be written.
"""

from __future__ import annotations

import sys
from pathlib import Path

import thinwire

STUB = Path(__file__).parents[1] / "src" / "thinwire" / "__init__.pyi"


def stub_text() -> str:
    """The stub: each public name imported from where it is defined, under its own name."""
    imports = [
        f"from thinwire.{module} import {name} as {name}"
        for module, names in sorted(thinwire.PUBLIC_NAMES.items())
        for name in sorted(names.split())
    ]
    head = '"""The public names, for type checkers; written by tools/write_stub.py."""\n\n'
    facts = "from collections.abc import Mapping\n\n"
    return head + facts + "\n".join(imports) + "\n\n__version__: str\nPUBLIC_NAMES: Mapping[str, str]\n"


def main(arguments: list[str]) -> int:
    """Write the stub, or check it."""
    if "--check" not in arguments:
        STUB.write_text(stub_text(), encoding="utf-8")
        return 0
    found = STUB.read_text(encoding="utf-8") if STUB.is_file() else ""
    if found == stub_text():
        return 0
    sys.stderr.write(f"{STUB} is not what the list of public names says; run `make format`\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
