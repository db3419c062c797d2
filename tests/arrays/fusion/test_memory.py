# SPDX-License-Identifier: Apache-2.0
"""Freed memory is kept in the process."""

import ctypes
import json
import platform
import subprocess
import sys

import pytest

import thinwire.arrays.fusion.memory as memory
from thinwire.arrays.fusion import keep_memory

LARGE = """
import json, resource, sys
import torch
from thinwire.arrays.fusion import keep_memory
kept = sys.argv[1] == "kept" and keep_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
# Small blocks that are freed first may split the memory that a large one needs.
for _ in range(24):
    torch.ones(1 << 23)
before = faults()
for _ in range(8):
    torch.ones(1 << 23)
print(json.dumps([kept, faults() - before]))
"""


def faults(mode: str) -> tuple[bool, int]:
    """Whether the settings were accepted, and the page faults of eight more tensors of 32 MiB, one after another."""
    done = subprocess.run([sys.executable, "-c", LARGE, mode], capture_output=True, text=True, check=True, timeout=60)
    kept, count = json.loads(done.stdout)
    return kept, count


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of glibc")
@pytest.mark.slow
def test_what_is_freed_is_used_again_without_asking_the_system() -> None:
    kept, few = faults("kept")
    _, many = faults("given back")
    assert kept
    assert few < many / 3


def test_a_c_library_without_such_settings_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    assert not keep_memory()


def test_another_system_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    assert not keep_memory()
