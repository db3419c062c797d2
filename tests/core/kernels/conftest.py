# SPDX-License-Identifier: Apache-2.0
"""Fixtures that select the builds of the kernels and their implementations."""

from __future__ import annotations

import ctypes

import pytest
import torch

from thinwire.core.kernels import base

PLAIN = ["-O1", "-DTHINWIRE_PORTABLE", "-ffp-contract=off", "-Wno-psabi"]
BUILDS = {"this processor's": base.FLAGS, "narrower vectors": [*base.FLAGS, "-mno-avx512f"], "no vectors": PLAIN}


@pytest.fixture(
    params=[pytest.param(name, marks=[pytest.mark.slow] if "narrower" in name else []) for name in BUILDS],
    scope="module",
)
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """The compiled kernels, with several sets of instructions."""
    flags = BUILDS[request.param]
    if "-mno-avx512f" in flags and "x86" not in base.platform.machine():
        pytest.skip("another kind of processor")
    found = base.load(flags)
    if found is None:
        pytest.skip("no C compiler")
    return found


@pytest.fixture
def by_c(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the kernels use that library."""
    monkeypatch.setattr(base, "_compiled", lambda: library)
    monkeypatch.delenv("THINWIRE_NATIVE", raising=False)


@pytest.fixture(params=["native", "torch"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test with compiled kernels and with torch."""
    if request.param == "torch":
        monkeypatch.setenv("THINWIRE_NATIVE", "0")
    else:
        monkeypatch.delenv("THINWIRE_NATIVE", raising=False)
        if base.compiled(torch.empty(0)) is None:
            pytest.skip("no C compiler")
    return str(request.param)
