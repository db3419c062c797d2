# SPDX-License-Identifier: Apache-2.0
"""What `thinwire doctor --out` has written, read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError
from thinwire.planning.doctor.findings import Examination
from thinwire.planning.doctor.host import Host
from thinwire.planning.doctor.links import Pair
from thinwire.planning.doctor.speeds import LoadedStep, StepTime


def read_examination(path: Path) -> Examination:
    """All of an examination but what went wrong.

    Raises:
        ConfigError: it cannot be read, or is not what the doctor writes.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"--doctor {path}: cannot be read ({reason}). Write it with thinwire doctor --out {path}"
        ) from None
    try:
        return _examination(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path}: is not what thinwire doctor --out writes ({type(error).__name__}: {error}). Write it again with "
            "this version"
        ) from None


def _examination(content: dict[str, Any]) -> Examination:
    return Examination(
        size=int(content["size"]),
        rendezvous=str(content["rendezvous"]),
        hosts={int(rank): Host.from_json(each) for rank, each in content["hosts"].items()},
        pairs=[Pair(**each) for each in content["pairs"]],
        all_reduces={int(size): float(taken) for size, taken in content["all_reduces"].items()},
        steps={int(rank): StepTime(**each) for rank, each in content["steps"].items()},
        loaded={int(rank): LoadedStep(**each) for rank, each in content["loaded"].items()},
    )
