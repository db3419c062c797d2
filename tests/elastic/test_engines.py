# SPDX-License-Identifier: Apache-2.0
"""Elastic workers that other programs start: torchrun with one agent for each worker, Slurm's srun, Kubernetes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from thinwire.core.comm.rendezvous import host_store

ROOT = Path(__file__).parents[2]
CLUSTERS = (ROOT / "docs/how-to/clusters.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs/how-to/elastic-clusters.md").read_text(encoding="utf-8")
PROGRAM = """
import os, sys, time, torch, thinwire
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
worker = thinwire.attach(model, optimizer, "AllReduce()", elastic=True, timeout=60)
lines = open(sys.argv[1], "a", buffering=1)

def enough():
    # After the worker that was killed has come again, on all workers at the same step.
    came = worker.view.epoch >= 2 and len(worker.view.members) == 2
    return came and worker.step >= max(each.step for each in worker.view.progress.values()) + 20

while not enough():
    lines.write(f"{os.getpid()} {worker.view.epoch} {worker.size} {worker.step}\\n")
    model(torch.ones(2, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
lines.write("done\\n")
"""


def block(start: str) -> str:
    """The one block of the page that begins so."""
    (found,) = re.findall(rf"```[a-z]+\n({re.escape(start)}.*?)```", PAGE, flags=re.DOTALL)
    return found


@pytest.mark.slow
def test_a_torchrun_agent_starts_its_killed_worker_again_while_the_other_goes_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    store = host_store("127.0.0.1", 0)
    shared = {"THINWIRE_STORE": f"127.0.0.1:{store.port}", "THINWIRE_WORKERS": "2", "GLOO_SOCKET_IFNAME": "lo"}
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    options = ["--standalone", "--nproc-per-node", "1", "--max-restarts", "3", "--monitor-interval", "0.2"]
    outputs = [tmp_path / "0", tmp_path / "1"]
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options, "train.py", str(outputs[rank])],
            cwd=tmp_path,
            env={**os.environ, **shared, "THINWIRE_RANK": str(rank), "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    try:
        end = time.monotonic() + 90
        while not outputs[0].exists() or outputs[0].read_text().count("\n") < 10:
            assert time.monotonic() < end
            time.sleep(0.05)
        killed = int(outputs[0].read_text().split()[0])
        os.kill(killed, signal.SIGKILL)  # worker 0
        assert [agent.wait(90) for agent in agents] == [0, 0]
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.terminate()
                agent.wait(30)
    rows = [[line.split() for line in path.read_text().splitlines()] for path in outputs]
    assert rows[0][-1] == rows[1][-1] == ["done"]
    assert len({row[0] for row in rows[0][:-1]}) == 2 and len({row[0] for row in rows[1][:-1]}) == 1
    assert {row[2] for row in rows[1][:-1]} == {"1", "2"}  # it trained alone meanwhile
    steps = [int(row[3]) for row in rows[1][:-1]]
    assert sorted(set(steps)) == list(range(max(steps) + 1))


@pytest.mark.parametrize("ends", [0, 75, 1], ids=["done", "notice", "failed"])
def test_the_slurm_script_starts_one_process_for_each_task_and_requeues_a_job_with_notice(
    ends: int, tmp_path: Path
) -> None:
    script = block("#!/bin/bash")
    assert "#SBATCH --requeue" in script and "#SBATCH --signal=USR1@90" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    # Stands for Slurm: srun runs the command once for each task, and returns the highest exit code.
    srun = 'for i in 0 1 2; do SLURM_PROCID=$i "${@:3}" || code=$?; done\nexit ${code:-0}\n'
    for name, content in {
        "srun": f"#!/bin/bash\n{srun}",
        "scontrol": '#!/bin/bash\n[ "$1" = requeue ] && echo "$@" || echo node-7\n',
        "thinwire": '#!/bin/bash\necho store "$@"\n',
        "python": f'#!/bin/bash\necho $THINWIRE_STORE $THINWIRE_RANK/$THINWIRE_WORKERS "$@"\nexit {ends}\n',
    }.items():
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
    variables = {"SLURM_JOB_NODELIST": "node-[7-9]", "SLURM_NTASKS": "3", "SLURM_JOB_ID": "1"}
    (tmp_path / "job.sh").write_text(script)
    run = subprocess.run(
        ["bash", "job.sh"],
        cwd=tmp_path,
        env={**variables, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    printed = run.stdout.splitlines()
    assert run.returncode == ends
    assert "store store --host node-7 --port 29400" in printed
    assert [line for line in printed if "train.py" in line] == [f"node-7:29400 {i}/3 train.py" for i in range(3)]
    assert ("requeue 1" in printed) == (ends == 75)


def test_the_kubernetes_manifest_can_be_read_and_starts_one_worker_in_each_pod() -> None:
    yaml = pytest.importorskip("yaml")
    service, store, workers = yaml.safe_load_all(block("apiVersion: v1"))
    (port,) = service["spec"]["ports"]
    assert f"--port {port['port']}" in " ".join(store["spec"]["template"]["spec"]["containers"][0]["command"])
    pod = workers["spec"]["template"]["spec"]
    variables = {each["name"]: each for each in pod["containers"][0]["env"]}
    assert variables["THINWIRE_STORE"]["value"] == f"{service['metadata']['name']}:{port['port']}"
    assert int(variables["THINWIRE_WORKERS"]["value"]) == workers["spec"]["completions"]
    assert "job-completion-index" in str(variables["THINWIRE_RANK"]["valueFrom"])
    assert workers["spec"]["backoffLimitPerIndex"] > 0


# The fields of Kubeflow Trainer's types, in its files trainingruntime_types.go and trainjob_types.go.
FIELDS = {
    "TrainingRuntime": {"apiVersion", "kind", "metadata", "spec"},
    "TrainingRuntime.spec": {"mlPolicy", "podGroupPolicy", "template"},
    "TrainingRuntime.spec.mlPolicy": {"numNodes", "torch", "flux", "mpi"},
    "TrainingRuntime.spec.template": {"metadata", "spec"},
    "TrainJob": {"apiVersion", "kind", "metadata", "spec"},
    "TrainJob.spec": {
        *("runtimeRef", "initializer", "trainer", "runtimePatches", "suspend", "activeDeadlineSeconds", "managedBy"),
    },
    "TrainJob.spec.runtimeRef": {"name", "apiGroup", "kind"},
    "TrainJob.spec.trainer": {
        *("image", "command", "args", "env", "numNodes", "resourcesPerNode", "numProcPerNode"),
    },
}


def check_fields(document: dict[str, Any]) -> None:
    """No field of Kubeflow's own is misspelt or in the wrong place."""
    for path, known in FIELDS.items():
        kind, *names = path.split(".")
        if document["kind"] != kind:
            continue
        found: Any = document
        for name in names:
            found = found.get(name, {})
        assert set(found) <= known, f"{path}: {set(found) - known}"


def test_the_runtime_of_kubeflow_starts_elastic_workers_without_torchrun() -> None:
    yaml = pytest.importorskip("yaml")
    runtime, job = yaml.safe_load_all(block("apiVersion: trainer"))
    for document in (runtime, job):
        assert document["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
        check_fields(document)
    assert job["spec"]["runtimeRef"] == {"kind": runtime["kind"], "name": runtime["metadata"]["name"]}
    # Without a policy for torch nobody sets the variables of torchrun, and none is started.
    assert set(runtime["spec"]["mlPolicy"]) == {"numNodes"}
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    # The label and the container's name are how Trainer finds what the TrainJob overrides.
    assert node["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    (container,) = node["template"]["spec"]["template"]["spec"]["containers"]
    assert container["name"] == "node" and "torchrun" not in str(job)
    # Kubernetes counts losses by index only of pods that are not restarted in place.
    assert node["template"]["spec"]["backoffLimitPerIndex"] > 0
    assert node["template"]["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    variables = {each["name"]: each for each in [*container["env"], *job["spec"]["trainer"]["env"]]}
    service, _, _ = yaml.safe_load_all(block("apiVersion: v1"))
    assert variables["THINWIRE_STORE"]["value"].startswith(f"{service['metadata']['name']}:")
    assert int(variables["THINWIRE_WORKERS"]["value"]) == job["spec"]["trainer"]["numNodes"]
    assert "job-completion-index" in str(variables["THINWIRE_RANK"]["valueFrom"])


def test_torchrun_reads_the_variables_that_kubeflows_torch_runtime_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    yaml = pytest.importorskip("yaml")
    from torch.distributed.run import parse_args

    (text,) = re.findall(r"```yaml\n(apiVersion: trainer.*?)```", CLUSTERS, flags=re.DOTALL)
    job = yaml.safe_load(text)
    check_fields(job)
    trainer = job["spec"]["trainer"]
    for name, value in {
        "PET_NNODES": trainer["numNodes"],
        "PET_NPROC_PER_NODE": trainer["numProcPerNode"],
        "PET_NODE_RANK": 2,
        "PET_MASTER_ADDR": "thinwire-node-0-0.thinwire",
        "PET_MASTER_PORT": 29500,
    }.items():
        monkeypatch.setenv(name, str(value))
    program, *arguments = trainer["command"]
    read = parse_args(arguments)
    assert program == "torchrun"
    assert (read.nnodes, read.nproc_per_node, str(read.node_rank)) == ("4", "1", "2")
    assert (read.master_addr, read.master_port) == ("thinwire-node-0-0.thinwire", 29500)
