# SPDX-License-Identifier: Apache-2.0
"""Runs under Ray, and a guard that ends all their processes: when they end, when the test ends, or after a timeout.

`python -m tests.arrays.sweep.ray_runs` prints the results of Ray's runs as JSON, of adapters with
THINWIRE_RAY_KIND=adapters and of models without; with `COMMAND ...` it guards another
command. Ray's servers and workers have sessions of their own and outlive a killed process, so the
guard adopts orphans, kills all its descendants by process id, and removes the folder it made.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 280.0
_ADOPT, _DIE_WITH_PARENT = 36, 1
HOME, KIND = "THINWIRE_RAY_HOME", "THINWIRE_RAY_KIND"
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "THINWIRE_DETERMINISTIC": "1",
}


def main() -> int:
    """Guard the command in the arguments; without one, run Ray, under a guard of its own."""
    if HOME in os.environ and not sys.argv[1:]:
        _control(_DIE_WITH_PARENT, signal.SIGKILL)
        run_ray(Path(os.environ[HOME]))
        return 0
    return guard(sys.argv[1:] or [sys.executable, "-m", "tests.arrays.sweep.ray_runs"])


# -- the guard ---------------------------------------------------------------------------------------------------------


def guard(command: list[str]) -> int:
    """Run a command; nothing that it started, and no file, outlives this."""
    parent, end = os.getppid(), time.monotonic() + TIMEOUT_SECONDS
    _control(_ADOPT, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    _remove_orphans()
    # A short path: Ray keeps sockets there, whose paths are limited in length.
    home = tempfile.mkdtemp(prefix=f"ray-{os.getpid()}-")
    try:
        process = subprocess.Popen(command, env={**os.environ, HOME: home})
        while process.poll() is None and os.getppid() == parent and time.monotonic() < end:
            time.sleep(0.05)
        return 1 if process.returncode is None else process.returncode
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _end_descendants()
        shutil.rmtree(home, ignore_errors=True)


def _control(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end_descendants() -> None:
    """Kill all descendants of this process, and those that start meanwhile, until none is left."""
    while below := _descendants():
        for process in below:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.02)
    with suppress(ChildProcessError):
        while os.waitpid(-1, 0):
            pass


def _descendants() -> set[int]:
    """Processes below this one, those that have ended and were not waited for left out."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                parents[int(folder.name)] = int(parent)
    found = {os.getpid()}
    while more := {process for process, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def _remove_orphans() -> None:
    """End what guards that were killed themselves have left, which was started with their folders' names."""
    for folder in Path(tempfile.gettempdir()).glob("ray-*-*"):
        owner = folder.name.split("-")[1]
        if owner.isdigit() and not Path("/proc", owner).exists():
            for process in _started_in(folder):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            shutil.rmtree(folder, ignore_errors=True)


def _started_in(folder: Path) -> Iterator[int]:
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{HOME}={folder}".encode() in (place / "environ").read_bytes().split(b"\0"):
                yield int(place.name)


# -- under guard -------------------------------------------------------------------------------------------------------


def run_ray(home: Path) -> None:
    """Print the results of Ray's runs."""
    os.environ.update(SETTINGS)
    import ray

    try:
        ray.init(
            num_cpus=1,
            object_store_memory=80 << 20,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            configure_logging=False,
            _temp_dir=str(home),
        )
        sys.stdout.write(json.dumps(work(home / "results")))
        sys.stdout.flush()
    finally:
        ray.shutdown()


def work(folder: Path) -> Any:
    from ray import tune
    from ray.tune import CheckpointConfig, FailureConfig, RunConfig
    from ray.tune.search.optuna import OptunaSearch

    from tests.arrays.sweep.test_ray import ADAPTERS, ADAPTING, PLAN, SPACE, fails_once
    from thinwire.arrays.sweep.ray_tune import pack_of, packed, trainable

    def fit(**settings: Any) -> Any:
        config = RunConfig(
            storage_path=str(folder),
            verbose=0,
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=1),
        )
        tune_config = tune.TuneConfig(metric="loss", mode="min", max_concurrent_trials=1, **settings.pop("search"))
        return tune.Tuner(run_config=config, tune_config=tune_config, **settings).fit()

    def rows_of(found: Any) -> list[Any]:
        return [(each.config, each.metrics, str(each.error)) for each in found]

    over_adapters = os.environ.get(KIND) == "adapters"
    plan, space = (ADAPTING(), ADAPTERS) if over_adapters else (PLAN(), SPACE)
    # Every process takes seconds to start, those with adapters the longest: they import transformers.
    packs, members = (1, 6) if over_adapters else (2, 3)
    search = packed(OptunaSearch(seed=0), space, members)
    spoiled = fails_once(trainable(plan, every=2), folder)
    searched = fit(trainable=spoiled, search={"num_samples": packs, "search_alg": search})
    trials = [(each.state.name, each.value) for each in search.searcher._ot_study.trials]
    found = {"searched": rows_of(searched), "study": trials, "process": os.getpid()}
    if over_adapters:
        best = searched.get_best_result()
        adapter = Path(best.checkpoint.to_directory(), "adapters", f"trial-{best.metrics['best']}")
        return {**found, "best": [best.metrics["loss"], loss_of(adapter)]}
    drawn = fit(trainable=trainable(plan, every=2), param_space=pack_of(space, 3), search={})
    return {**found, "drawn": rows_of(drawn)}


def loss_of(adapter: Path) -> float:
    """The held-out loss of an exported adapter, as PEFT loads it."""
    import peft
    import torch

    from tests.arrays.sweep.test_adapters import data, loss, model

    loaded: Any = peft.PeftModel.from_pretrained(model(), adapter).eval()
    with torch.no_grad():
        losses = [float(loss(loaded(ids), ids)) for ids, _ in data(0, 1, 0)[1]]
    return sum(losses) / len(losses)


if __name__ == "__main__":
    sys.exit(main())
