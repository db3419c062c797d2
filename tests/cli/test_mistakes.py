# SPDX-License-Identifier: Apache-2.0
"""Mistakes in a call: what the one line says that refuses it."""

from __future__ import annotations

import io

import pytest

from thinwire.cli import console


@pytest.mark.parametrize("name", ["out", "err"])
def test_names_between_colons_are_no_pictures(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(getattr(console, name), "_file", written)
    getattr(console, name).print("--model mine:train: a:b:", markup=False)
    assert written.getvalue() == "--model mine:train: a:b:\n"
