# SPDX-License-Identifier: Apache-2.0
"""`thinwire simulate`, and the training runs that it simulates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from thinwire import BackupWorkers, ConfigError, PushSum
from thinwire.cli import main
from thinwire.lab.report.folder import read
from thinwire.lab.runs.simulated_training import Training, summarise
from thinwire.planning.simulate import Death, Duration, Network, Special, simulate

Capture = pytest.CaptureFixture[str]


def printed(capsys: Capture, *arguments: str, code: int = 0) -> str:
    assert main(["simulate", *arguments]) == code
    return capsys.readouterr().out


def figures(capsys: Capture, *arguments: str, code: int = 0) -> dict[str, Any]:
    return json.loads(printed(capsys, *arguments, "--json", code=code))


SMALL = ("--workers", "4", "--steps", "6", "--parameters", "100")


def test_it_prints_steps_bytes_and_waits(capsys: Capture) -> None:
    found = printed(capsys, "--strategy", "LocalSGD(period=3)", *SMALL)
    assert found.startswith("LocalSGD(period=3)\n4 simulated workers, 6 steps")
    for word in ("step", "sent", "waits", "loss"):
        assert f"\n  {word}" in found


def test_its_figures_are_those_of_the_run(capsys: Capture) -> None:
    found = figures(capsys, "--strategy", "PushSum()", *SMALL, "--compute-time", "100ms")
    assert found["workers"] == 4
    assert found["steps"] == 6
    assert found["payload_bytes_per_worker_per_step"] == 400
    assert found["messages_per_worker_per_step"] == 1
    assert found["computed_seconds_per_step"] == pytest.approx(0.1)
    assert 0.6 < found["seconds"] < 0.7
    assert found["loss"] > 0
    assert not found["failures"]


def test_a_network_file_may_say_that_computing_takes_no_time(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "none.toml"
    for text, expected in (('[compute]\ntime = "0s"\n', 0.0), ("", 0.05)):
        file.write_text(text)
        found = figures(capsys, "--strategy", "AllReduce()", *SMALL, "--network", str(file))
        assert found["computed_seconds_per_step"] == pytest.approx(expected)


def test_a_device_is_refused_since_no_codec_is_timed(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "device.toml"
    file.write_text('compute = {device = "cpu"}')
    assert main(["simulate", "--strategy", "AllReduce()", "--network", str(file)]) == 2
    assert "[compute] device: a simulation is the same bit for bit" in " ".join(capsys.readouterr().err.split())


def test_a_seed_is_a_run(capsys: Capture) -> None:
    arguments = ("--strategy", "EagerPushSum(staleness=2)", *SMALL, "--compute-time", "pareto(10ms, 1.5)")
    first, again, other = (figures(capsys, *arguments, "--seed", seed) for seed in ("1", "1", "2"))
    assert first == again != other


def test_a_network_file_names_the_slow_worker(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "slow.toml"
    file.write_text('[compute]\ntime = "10ms"\n[[workers]]\nranks = 2\nslowdown = 5')
    found = figures(capsys, "--strategy", "AllReduce()", *SMALL, "--network", str(file))
    seconds = found["waited_on"]
    assert next(iter(seconds)) == "2" and seconds["2"] > 100 * sum(
        each for rank, each in seconds.items() if rank != "2"
    )
    assert found["waits"][0]["on"] == 2
    longest = found["longest"]
    assert longest["end"] - longest["start"] == pytest.approx(0.05, abs=0.005)


def test_meta_has_the_times_and_bytes_of_a_real_run_and_no_loss(capsys: Capture) -> None:
    real, meta = (figures(capsys, "--strategy", "PushSum(staleness=1)", *SMALL, *more) for more in ((), ("--meta",)))
    assert meta["loss"] is None
    assert real | {"loss": None} == meta


def test_a_death_is_told_and_the_exit_code_says_so(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "network.toml"
    file.write_text("[[deaths]]\nrank = 1\nstep = 2")
    found = printed(capsys, "--strategy", "AllReduce()", *SMALL, "--network", str(file), code=1)
    assert "died        rank 1 at" in found
    assert "rank 0 failed: PeerLostError: rank 0, step 2," in found


def test_a_run_folder_is_one_that_the_report_reads(capsys: Capture, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    printed(capsys, "--strategy", "LocalSGD(period=2)", *SMALL, "--out", str(folder))
    (run,) = read(folder).runs
    assert run.summary["steps"] == 6
    assert {span.kind for span in run.spans} == {"compute", "communication", "wait"}
    assert {span.rank for span in run.spans} == set(range(4))
    assert not [note for note in run.notes if "missing" in note and "metrics" not in note]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--strategy", "ddp"), "torch's own method"),
        (("--strategy", "AllReduce()", "--parameters", "0"), "--parameters 0: must be a whole number"),
        (("--strategy", "AllReduce()", "--steps", "0"), "--steps 0"),
        (("--strategy", "AllReduce()", "--workers", "0"), "--workers 0"),
        (("--strategy", "AllReduce()", "--compute-time", "soon"), "--compute-time soon"),
        (("--strategy", "AllReduce()", "--network", "no-such.toml"), "no-such.toml: cannot be read"),
        (("--strategy", "Hypercub()"), "Hypercub"),
        (("--strategy", "Gossip(Hypercube())", "--workers", "6"), "6"),
    ],
)
def test_mistakes_are_named(arguments: tuple[str, ...], words: str, capsys: Capture) -> None:
    assert main(["simulate", *arguments]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_folder_holds_one_run(capsys: Capture, tmp_path: Path) -> None:
    arguments = ("--strategy", "AllReduce()", *SMALL, "--out", str(tmp_path / "run"))
    printed(capsys, *arguments)
    before = (tmp_path / "run" / "timeline.jsonl").read_text()
    assert main(["simulate", *arguments]) == 2
    assert "holds a run already. Name another folder" in " ".join(capsys.readouterr().err.split())
    assert (tmp_path / "run" / "timeline.jsonl").read_text() == before
    for option in ("--steps", "--workers", "--timeout"):
        assert main(["simulate", "--strategy", "AllReduce()", option, "0", "--out", str(tmp_path / "no")]) == 2
        assert not (tmp_path / "no").exists(), option


def test_the_first_broadcast_is_no_part_of_a_step(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "slow.toml"
    file.write_text('network = {bandwidth = "10mbit"}')
    large = ("--strategy", "LocalSGD(period=50)", "--workers", "2", "--steps", "5", "--parameters", "1e6", "--meta")
    found = figures(capsys, *large, "--network", str(file))  # the broadcast takes three seconds
    assert found["seconds_per_step"] == pytest.approx(0.05, rel=0.05)


# -- training ----------------------------------------------------------------------------------------------------------


def test_workers_agree_on_the_mean_of_their_minima() -> None:
    losses = [
        simulate(4, Training(PushSum(), steps=steps, parameters=20)).results[0].loss  # type: ignore[union-attr]
        for steps in (1, 60)
    ]
    assert losses[0] is not None and losses[1] is not None
    assert losses[1] < losses[0]


def test_a_late_worker_s_steps_are_counted_as_they_were() -> None:
    network = Network(compute=Duration("constant", 0.1), specials=(Special((2,), slowdown=3.5),))
    ended = simulate(4, Training(BackupWorkers(), steps=12, parameters=10), network=network)
    assert not ended.failures
    taken = [sum(each.rank == rank for each in ended.record.steps) for rank in range(4)]
    assert taken[0] == 12
    assert taken[2] < 6


def test_the_dead_have_no_outcome() -> None:
    ended = simulate(3, Training(PushSum(), steps=5, parameters=5), network=Network(deaths=(Death(1, step=3),)))
    assert ended.results[1] is None
    assert summarise(ended).died == ended.died
    assert set(summarise(ended).failures) == {0, 2}


@pytest.mark.parametrize("settings", [{"steps": 0}, {"parameters": 0}])
def test_impossible_training_runs_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Training(PushSum(), **settings)
