# SPDX-License-Identifier: Apache-2.0
"""Write `src/thinwire/__init__.pyi`, which says where each public name is defined: to type checkers, and to `thinwire`.

Public are all classes of thinwire that recipes may name, which need no line here, and `OTHER_NAMES`. With `--check`
nothing is written, and the exit code is 1 if the file is not what would be written.
"""

from __future__ import annotations

import sys
from pathlib import Path

from thinwire.registry import recipe_classes

STUB = Path(__file__).parents[1] / "src" / "thinwire" / "__init__.pyi"

# The module within thinwire, and the names that it gives to the public.
OTHER_NAMES = {
    "methods.codecs.base": "Codec CodecTraits",
    "methods.codecs.feedback": "resize_errors",
    "core.comm.base": "Comm",
    "core.comm.counting": "CountingComm",
    "core.comm.group": "GroupComm",
    "core.comm.threads": "ThreadComm run_threads",
    "core.comm.work": "Meter",
    "elastic.late": "LateMerging",
    "errors": (
        "CheckpointError CommError CommTimeoutError ConfigError MismatchError NonFiniteError PeerLostError "
        "ThinwireError"
    ),
    "arrays.finetuning": "AdapterArray adapters",
    "arrays.fusion": "FusedArray fuse",
    "integrations.hooks": "ddp_hook fsdp_hook",
    "methods.optimizers": "AcSA CombinedOptimizer Lamb OneBitAdam OneBitLamb Saga Svrg ZeroOneAdam",
    "registry": "registered",
    "core.replica.replica": "Replica",
    "methods.strategies.base": "Rounds Strategy Traits",
    "methods.strategies.recipe": "parse",
    "tensor2d.parallelize": "parallelize_2d",
    "methods.topology.base": "Topology",
    "worker.times": "Stats",
    "worker.attach": "attach",
    "worker.worker": "Worker",
}


def stub_text() -> str:
    """The stub: each public name imported from where it is defined, under its own name."""
    homes = {name: f"thinwire.{module}" for module, names in OTHER_NAMES.items() for name in names.split()}
    homes |= {name: kind.__module__ for name, kind in recipe_classes().items()}
    imports = [f"from {module} import {name} as {name}" for module, name in sorted((m, n) for n, m in homes.items())]
    head = '"""The public names, and where each is defined; written by tools/write_stub.py."""\n\n'
    return head + "\n".join(imports) + "\n\n__version__: str\n"


def main(arguments: list[str]) -> int:
    """Write the stub, or check it."""
    if "--check" not in arguments:
        STUB.write_text(stub_text(), encoding="utf-8")
        return 0
    found = STUB.read_text(encoding="utf-8") if STUB.is_file() else ""
    if found == stub_text():
        return 0
    sys.stderr.write(f"{STUB} is not what the public names are; run `make format`\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
