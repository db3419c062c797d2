# SPDX-License-Identifier: Apache-2.0
"""An honest submission passes all checks, and six cheating ones are caught."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from thin_gpt.checks import verify
from thin_gpt.referee import Entry, Run, run
from thin_gpt.task import SIZES, Text, load_text, loss_of, model_of, tokens_of

pytestmark = pytest.mark.emulation
HERE = Path(__file__).with_name("cheats")
CAUGHT = {
    "skips_exchange": "weights equal",
    "reads_held_out": "sandbox",
    "under_reports": "bytes",
    "extra_steps": "one pass per step",
    "second_channel": "sandbox",
    "anothers_weights": "weights earned",
}


@pytest.fixture(scope="module")
def text() -> Text:
    return load_text()


def race(name: str, **settings: object) -> tuple[Run, Entry]:
    entry = Entry(name, str(HERE / f"{name}.py"), settings)
    return Run(entry, "toy", "1gbit/equal", rate=3e-3, trunk=24, decay=8, every=16, workers=2, patience=60), entry


def test_an_honest_submission_passes(text: Text) -> None:
    plan, entry = race("honest")
    record = run(plan, text)
    assert verify(record, entry, text) == {}
    assert record["final"] < record["curve"][0][1]
    assert record["digest"] and record["memory"] > 0 and min(record["wire"]) > min(record["claimed"]) > 0


@pytest.mark.parametrize(("name", "settings"), [*((name, {}) for name in CAUGHT), ("extra_steps", {"hidden": True})])
def test_a_cheating_submission_is_caught(name: str, settings: dict[str, object], text: Text, tmp_path: Path) -> None:
    if name == "anothers_weights":
        settings = {"weights": str(trained(tmp_path / "weights", text))}
    plan, entry = race(name, **settings)
    record = run(plan, text)
    found = verify(record, entry, text)
    if name == "second_channel":
        # The file cannot be written, so the racer fails, and says why.
        assert "sandbox refused: os.mkdir" in found["completed"]
    else:
        assert CAUGHT[name] in found, found
    if name == "reads_held_out":
        assert any("held-out text" in each for each in record["violations"])


def test_a_changed_record_is_caught(text: Text) -> None:
    plan, entry = race("honest")
    record = run(replace(plan, track="loopback/equal"), text)
    assert "replay" in verify({**record, "seed": 1}, entry, text)


def trained(path: Path, text: Text) -> Path:
    """The parameters after 200 steps of one worker."""
    size = SIZES["toy"]
    model = model_of(size, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(200):
        optimizer.zero_grad()
        loss_of(model, tokens_of(text.batch(size, 1, 0, step), size)).backward()
        optimizer.step()
    torch.save(torch.nn.utils.parameters_to_vector(model.parameters()).detach(), path)
    return path
