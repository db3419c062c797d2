# SPDX-License-Identifier: Apache-2.0
"""Other libraries' methods as baselines of a run, each as its own documentation uses it.

Each library has an environment of its own, `environment` of it, with what `NAME.txt` pins. torch and everything that
thinwire needs are those of the environment that it was made from.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

LIBRARIES = ("accelerate", "torchft", "fairscale", "hivemind", "deepspeed")
HERE = Path(__file__).parent
NOT_RUN: dict[str, str] = {
    "DeepSpeed 0.18.9, 1-bit Adam": (
        "its compressed all-reduce needs a GPU's libraries: on CPUs `comm_backend_name` raises an error with `nccl`, "
        "`mpi`, `compressed` and `gloo`"
    ),
    "DeepSpeed 0.18.9, 1-bit LAMB": "it chooses among the same backends by the same code; not tried",
}
"""What a user could pick and could not be run here, with the reason."""


def home() -> Path:
    """The folder of the environments."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "thinwire" / "peers"


def python_of(library: str) -> Path:
    """The interpreter of a library's environment."""
    return home() / library / "bin" / "python"


def installed(library: str) -> bool:
    """Whether a library's environment is complete."""
    return (home() / library / "ok").exists() and (home() / library / "ok").read_text() == _pins(library)


def install(library: str) -> None:
    """Make the environment of a library.

    Raises:
        CalledProcessError: pip could not install it.
    """
    place = home() / library
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
    (packages,) = (place / "lib").glob("python*/site-packages")
    (packages / "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    constraints = HERE.parents[1] / "constraints.txt"
    command = [str(python_of(library)), "-m", "pip", "install", "--quiet", "-c", str(constraints)]
    # DeepSpeed would compile kernels for GPUs.
    environment = {**os.environ, "DS_BUILD_OPS": "0"}
    subprocess.run([*command, "-r", str(HERE / f"{library}.txt")], check=True, env=environment)
    (place / "ok").write_text(_pins(library))


def _pins(library: str) -> str:
    return (HERE / f"{library}.txt").read_text()
