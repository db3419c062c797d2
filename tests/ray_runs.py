"""What runs under Ray, in a process of its own that ends with it: prints what came of it as JSON."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "LACONIC_DETERMINISTIC": "1",
}


def main() -> None:
    os.environ.update(SETTINGS)
    import ray

    # Ray keeps sockets there, whose names must be short.
    home = tempfile.mkdtemp(prefix="ray-")
    try:
        ray.init(
            num_cpus=1,
            object_store_memory=80 << 20,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            configure_logging=False,
            _temp_dir=home,
        )
        sys.stdout.write(json.dumps(work(Path(home) / "results")))
    finally:
        ray.shutdown()
        shutil.rmtree(home, ignore_errors=True)


def work(folder: Path) -> Any:
    from ray import tune
    from ray.tune import CheckpointConfig, FailureConfig, RunConfig
    from ray.tune.search.optuna import OptunaSearch

    from laconic.sweep.ray_tune import pack_of, packed, trainable
    from tests.test_sweep_ray import PLAN, SPACE, fails_once

    def fit(**settings: Any) -> list[Any]:
        config = RunConfig(
            storage_path=str(folder),
            verbose=0,
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=1),
        )
        told = tune.TuneConfig(
            metric="loss", mode="min", num_samples=2, max_concurrent_trials=1, **settings.pop("told")
        )
        found = tune.Tuner(run_config=config, tune_config=told, **settings).fit()
        return [(each.config, each.metrics, str(each.error)) for each in found]

    search = packed(OptunaSearch(seed=0), SPACE, 3)
    drawn = fit(trainable=trainable(PLAN(), every=2), param_space=pack_of(SPACE, 3), told={})
    spoiled = fails_once(trainable(PLAN(), every=2), folder)
    searched = fit(trainable=spoiled, told={"num_samples": 2, "search_alg": search})
    trials = [(each.state.name, each.value) for each in search.searcher._ot_study.trials]
    return {"drawn": drawn, "searched": searched, "study": trials, "process": os.getpid()}


if __name__ == "__main__":
    main()
