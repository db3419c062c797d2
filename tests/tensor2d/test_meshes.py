# SPDX-License-Identifier: Apache-2.0
"""`thinwire explain --tensor-parallel`: the table of meshes."""

from __future__ import annotations

import json

import pytest

from thinwire.cli import main


def test_every_mesh_is_shown_and_the_best_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--tensor-parallel", "4", "--model-size", "1m", "--link", "1gbit+1ms"]) == 0
    shown = capsys.readouterr().out
    assert all(mesh in shown for mesh in ("1x4", "2x2", "4x1", " *"))
    assert "times as long as" in shown
    assert main(["explain", "--tensor-parallel", "4", "--json"]) == 0
    advice = json.loads(capsys.readouterr().out)
    refused = {(cost["rows"], cost["columns"]): cost["refusal"] for cost in advice["costs"]}
    assert refused == {(1, 4): "3 heads % 4 must be 0", (2, 2): "3 heads % 2 must be 0", (4, 1): ""}
    assert advice["best"]["rows"] == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["AllReduce()", "--tensor-parallel", "4"], "Leave out the recipe"),
        (["--tensor-parallel", "4", "--task", "digits"], "the advisor supports"),
        (["--tensor-parallel", "4", "--link", "none"], "depends on the rate"),
        ([], "RECIPE is missing"),
    ],
)
def test_what_cannot_be_shown_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
