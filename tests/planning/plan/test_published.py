# SPDX-License-Identifier: Apache-2.0
"""Predictions of published measurements: what is fitted, what is predicted, and the committed verdict."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from benchmarks.published import faults, growth, page
from benchmarks.published.results import BOUNDS, HERE, SOURCES, all_predictions, load, order_errors
from thinwire import ConfigError, Strategy, parse
from thinwire.cli import main
from thinwire.planning.plan import published
from thinwire.planning.plan.published import Cell, Predicted, explain_cell, load_source
from thinwire.planning.simulate.wires import PAYLOAD_SHARE
from thinwire.registry import recipe_classes

COLUMNS = "model\tworkers\tlink\tmethod\trecipe\tbucket\tsteps\tseconds\tkind\tnote"
TOML = """
[models.mlp]
compute = "100ms"
layers = [[4, 2500000, 1.0]]

[links.slow]
network = {bandwidth = "1gbit", latency = "0.1us"}

[[fits]]
cell = "mlp, 4, slow, dense"
numbers = ["links/slow/network/bandwidth"]
"""
BYTES = 4 * 10_000_000
RATE = 5e8 * PAYLOAD_SHARE / 8  # what the measurements below were made with
DENSE = 0.1 + 2 * 3 / 4 * BYTES / RATE
ROWS = (
    f"mlp\t4\tslow\tdense\tAllReduce()\t\t\t{DENSE}\tdense\tmeasured",
    f"mlp\t8\tslow\tdense\tAllReduce()\t\t\t{0.1 + 2 * 7 / 8 * BYTES / RATE}\tdense\tmeasured",
    f"mlp\t4\tslow\tlocal\tLocalSGD(period=5)\t\t5\t{5 * 0.1 + DENSE - 0.1}\tmethods\tmeasured",
    f"mlp\t4\tslow\toverlapped\tAllReduce()\t10|20\t\t{DENSE}\tmethods\tmeasured",
    "mlp\t4\tslow\tserver\t\t\t\t1\t\tno strategy",
)


def write(folder: Path, toml: str = TOML, rows: tuple[str, ...] = ROWS) -> Path:
    (folder / "mine.toml").write_text(toml)
    (folder / "mine.tsv").write_text("\n".join([COLUMNS, *rows]) + "\n")
    return folder / "mine"


def test_a_fitted_rate_predicts_the_other_cells(tmp_path: Path) -> None:
    source = load_source(write(tmp_path))
    found = {each.cell.name: each for each in source.predict()}
    assert [name for name, each in found.items() if each.calibrates] == ["mlp, 4, slow, dense"]
    assert found["mlp, 4, slow, dense"].error == pytest.approx(0.0, abs=0.003)
    assert found["mlp, 8, slow, dense"].error == pytest.approx(0.0, abs=0.01)
    assert found["mlp, 4, slow, local"].error == pytest.approx(0.0, abs=0.01)
    # Messages under the backward pass save at most its time.
    assert -0.067 / DENSE < found["mlp, 4, slow, overlapped"].error < -0.03
    assert "mlp, 4, slow, server" not in found
    assert source.calibrated().numbers()["links/slow/network/bandwidth"].startswith("50")
    assert source.numbers()["links/slow/network/bandwidth"] == "1gbit", "a fit changes a copy"
    assert "fitted     links/slow/network/bandwidth = 50" in explain_cell(source, "mlp, 8, slow, dense")


def test_a_link_that_names_a_device_counts_what_strategies_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[str] = []

    def own_work(*_: object, device: str, **__: object) -> list[float]:
        devices.append(device)
        return [0.2]

    monkeypatch.setattr(published, "own_work", own_work)
    toml = TOML.partition("[[fits]]")[0]
    (without,) = (each.seconds for each in load_source(write(tmp_path, toml, ROWS[:1])).predict())
    (counted,) = (
        each.seconds for each in load_source(write(tmp_path, toml + 'compute = {device = "cpu"}\n', ROWS[:1])).predict()
    )
    assert devices == ["cpu"]
    assert counted == pytest.approx(without + 0.2)


def test_a_bucket_of_zero_sends_each_tensor_of_repeated_blocks_alone(tmp_path: Path) -> None:
    toml = (
        TOML.partition("[[fits]]")[0]
        .replace("0.1us", '5ms", one_stream = true, bandwidth = "100gbit')
        .replace('bandwidth = "1gbit", ', "")
    )
    toml = toml.replace("[4, 2500000, 1.0]", "[1, 1000, 0.5], [3, [[2, 1000, 0.25], [1, 10, 0.0]]]")
    rows = tuple(f"mlp\t4\tslow\t{name}\tAllReduce()\t{name}\t\t1\tmethods\tmeasured" for name in ("0", "0.1"))
    alone, together = (each.seconds for each in load_source(write(tmp_path, toml, rows)).predict())
    # A message has six hops of 5 ms. One follows the step, and ten follow the forward pass.
    assert together == pytest.approx(0.1 + 0.03, abs=0.001)
    assert alone == pytest.approx(0.1 / 3 + 10 * 0.03, abs=0.001)


def test_collective_calls_are_predicted_alone(tmp_path: Path) -> None:
    rows = tuple(
        f"mlp\t4\tslow\t{call}\tcall:{call}\t\t\t1\tdense\tmeasured"
        for call in ("all_reduce", "all_to_all+all_gather", "send", "broadcast")
    )
    toml = TOML.partition("[[fits]]")[0].replace("1gbit", "500mbit")
    found = {each.cell.method: each.seconds for each in load_source(write(tmp_path, toml, rows)).predict()}
    assert found["all_reduce"] == pytest.approx(2 * 3 / 4 * BYTES / RATE, rel=0.01)
    assert found["all_to_all+all_gather"] == pytest.approx(found["all_reduce"], rel=0.01)
    assert found["send"] == pytest.approx(BYTES / RATE, rel=0.01)


def test_a_source_that_cannot_be_read_or_fitted_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"A source is a \.toml"):
        load_source(tmp_path / "none")
    with pytest.raises(ConfigError, match="must have the columns"):
        load_source(write(tmp_path, rows=("mlp\t4",)))
    with pytest.raises(ConfigError, match="must be numbers"):
        load_source(write(tmp_path, rows=(ROWS[0].replace("\t4\t", "\tfour\t"),)))
    with pytest.raises(ConfigError, match="0 cells 'mlp, 4, slow, dense'"):
        load_source(write(tmp_path, rows=ROWS[1:])).predict()
    with pytest.raises(ConfigError, match="no link 'fast'"):
        load_source(write(tmp_path, rows=(ROWS[0], ROWS[1].replace("slow", "fast")))).predict()
    for old, new, words in (
        ('compute = "100ms"\n', "", r"models.mlp has no compute. Add compute = \"250ms\""),
        ("layers = [[4, 2500000, 1.0]]\n", "", r"models.mlp has no layers. Add layers = "),
        ('compute = "100ms"', 'compute = "100ms"\ndtype = "half-ish"', "dtype='half-ish': must be a dtype of torch"),
        ("[[4, 2500000, 1.0]]", "1e7", r"models.mlp: layers=10000000.0: must be a list of"),
        ('["links/slow/network/bandwidth"]', '["links/slow/rate"]', r"'links/slow/rate' is no number of the file"),
        ('["links/slow/network/bandwidth"]', '["links/slow"]', r"'links/slow' is no number of the file"),
        ('numbers = ["links/slow/network/bandwidth"]', "", "None is no number of the file"),
        ('cell = "mlp, 4, slow, dense"', "", 'has no cell. Add cell = "mlp, 4, slow, dense"'),
    ):
        assert old in TOML
        with pytest.raises(ConfigError, match=words):
            load_source(write(tmp_path, TOML.replace(old, new))).predict()
    with pytest.raises(ConfigError, match=r"no value of .* gives"):
        load_source(write(tmp_path, rows=(ROWS[0].replace(f"{DENSE}", "0.05"),))).predict()


def test_only_methods_of_one_group_that_are_well_apart_are_ordered() -> None:
    def predicted(workers: int, method: str, published: float, seconds: float) -> Predicted:
        return Predicted(Cell("m", workers, "l", method, "", "", 1, published, "methods", ""), seconds, False)

    fast, slow, near = predicted(4, "a", 1.0, 1.0), predicted(4, "b", 2.0, 0.9), predicted(4, "c", 1.04, 0.8)
    assert order_errors([fast, slow, near, predicted(8, "d", 3.0, 0.1)]) == [(fast, slow)]
    assert not order_errors([fast, near])


@pytest.mark.parametrize("name", SOURCES)
def test_committed_predictions_are_of_the_committed_cells(name: str) -> None:
    source = load_source(HERE / "sources" / name)
    assert [each["cell"] for each in load(name)["cells"]] == [cell.name for cell in source.predictable]
    assert {cell.kind for cell in source.cells} <= {*BOUNDS, ""}
    assert all(cell.recipe for cell in source.predictable) and all(cell.note for cell in source.cells)
    assert len({fit["cell"] for fit in source.table.get("fits", [])}) == len(source.table.get("fits", []))
    fitted = [each["cell"] for each in load(name)["cells"] if each.get("calibrates")]
    assert set(fitted) == {fit["cell"] for fit in source.table.get("fits", [])}


def test_the_page_has_the_committed_verdict() -> None:
    text = (HERE.parents[1] / "docs" / "scale.md").read_text(encoding="utf-8")
    assert page.verdict() in text
    assert all(abs(each.error) < 0.005 for cells in all_predictions().values() for each in cells if each.calibrates)


def test_pictures_are_the_same_when_they_are_drawn_again(tmp_path: Path) -> None:
    for draw in (page.draw, growth.draw, faults.draw):
        draw(tmp_path / "first.svg")
        draw(tmp_path / "second.svg")
        first = (tmp_path / "first.svg").read_bytes()
        assert first == (tmp_path / "second.svg").read_bytes(), draw.__module__
        assert b"<dc:date>" not in first


def test_every_strategy_has_rows_or_a_reason_why_not() -> None:
    assert list(dict.fromkeys(row["strategy"] for row in growth.committed()["rows"])) == list(growth.STRATEGIES)
    found = {type(parse(text)).__name__ for text in growth.STRATEGIES}
    known = {name for name, kind in recipe_classes().items() if issubclass(kind, Strategy)}
    assert not found & {*growth.LEFT_OUT}
    assert found | {*growth.LEFT_OUT} == known


def test_the_bar_on_simulator_seconds_is_written_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(growth, "RESULTS", tmp_path)
    (tmp_path / "growth.json").write_text('{"rows": [1], "bar": {"Old()": 1.0}}', encoding="utf-8")
    assert growth.bar(workers=4, steps=2)
    found = json.loads((tmp_path / "growth.json").read_text(encoding="utf-8"))
    assert found["rows"] == [1]
    assert list(found["bar"]) == list(growth.BAR_RECIPES)
    assert growth.bar_seconds().endswith("(bar: 60 s, met)")
    monkeypatch.setattr(growth, "BAR_SECONDS", -1.0)
    assert not growth.bar(workers=4, steps=2)
    assert growth.bar_seconds().endswith("missed)")
    assert "PushSum(): " in capsys.readouterr().out


def test_the_command_predicts_explains_and_plans_on_a_fitted_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(write(tmp_path))
    assert main(["plan", "--published", source, "--json"]) == 0
    found = {each["cell"]["method"]: each for each in reversed(json.loads(capsys.readouterr().out)["cells"])}
    assert found["dense"]["calibrates"]
    assert abs(found["local"]["error"]) < 0.01
    assert main(["plan", "--published", source, "--cell", "mlp, 8, slow, dense"]) == 0
    told = capsys.readouterr().out
    assert "recipe     AllReduce()" in told
    assert "fitted     links/slow/network/bandwidth = 50" in told
    given = ["plan", "--published", source, "--link", "slow", "--step-seconds", "0.1", "--strategies", "AllReduce()"]
    assert main(given) == 0
    # The network file says 1 Gbit/s; the measurement was made with half of it.
    assert "500 Mbit/s" in capsys.readouterr().out
    for wrong, words in (
        (["--published", source, "--workers", "4"], "--workers 4 with --published"),
        (["--published", source, "--network", "a.toml"], "--network a.toml with --published"),
        (["--link", "1gbit", "--cell", "mlp, 8, slow, dense"], "goes with --published alone"),
        (["--published", source, "--link", "fast"], "has no link 'fast'"),
    ):
        assert main(["plan", *wrong]) == 2
        assert words in " ".join(capsys.readouterr().err.split())


def test_the_printed_commands_predict_explain_and_plan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = HERE.parents[1]
    monkeypatch.chdir(root)
    lines = (root / "docs" / "scale.md").read_text(encoding="utf-8").splitlines()
    commands = [shlex.split(line) for line in lines if line.startswith("thinwire plan --published")]
    printed: list[str] = []
    for command in commands:
        assert main(command[1:]) == 0
        printed.append(capsys.readouterr().out)
    predicted, explained, planned = printed
    errors = [float(line.split("%")[0]) for line in predicted.splitlines()]
    assert len(errors) == 4 and max(map(abs, errors)) < 10
    assert "published  3.615 s" in explained and "fitted     links/home/network/bandwidth" in explained
    assert "LocalSGD(period=8)" in planned
