# SPDX-License-Identifier: Apache-2.0
"""Every command and every snippet that the documentation prints is run, as printed.

What `test_docs.py` runs (blocks of Python and commands that are marked `<!-- runs -->`) is not run again here. Commands
are run by a shell in a folder that has what the pages name: `examples`, and a `train.py`, which is README's loop.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from tests.fragments import PROCESSES, run_fragments
from tests.pool import run_processes
from tests.rules import for_each
from tests.test_docs import PAGES, ROOT, STEP_BY_STEP, blocks, inline, text
from tests.tutorial import assert_printed, patched, steps_of
from thinwire.lab.emulate import available
from thinwire.lab.emulate.launch import free_port

SHELL = ("sh", "console", "bash")
Shell = Callable[..., list[subprocess.CompletedProcess[str]]]
NO_LINKS = available()

# What can only be checked: it installs, it is the test suite itself, or it sets a machine's own name.
CHECKED = ("make ", "pip install ", "export ", "python3 -m venv", ". .venv/")
# Pages whose commands end within seconds; the others are slow.
QUICK = ("docs/how-to/choose.md",)
# What must have run before a page's first command.
BEFORE = {
    "docs/how-to/checkpoints.md": (
        "thinwire train --task digits --steps 4 --workers 2 --save-every 4 --out runs/long",
    ),
    "docs/how-to/read-a-run.md": ("thinwire compare --task digits --steps 12 --workers 2 --out runs/slow-link",),
    "docs/fusion/sweeps.md": (
        "thinwire sweep --task digits --trials 2 --steps 20 --lr 0.01,0.1 --out runs/digits-sweep-20260101-120000",
    ),
}


def logical_lines(shell: str) -> list[str]:
    """The commands of a block, each on one line."""
    return [line for line in shell.replace("\\\n", " ").split("\n") if line.strip() and not line.startswith("#")]


def commands() -> list[tuple[str, str]]:
    """Every command in the order of its page, with the page; a script of a batch system as one."""
    found: list[tuple[str, str]] = []
    for page in PAGES:
        if page.name in ("CHANGELOG.md", "changelog.md"):
            continue
        for marked, body in blocks(page, *SHELL):
            if not marked:
                found += [(str(page), each) for each in ([body] if body.startswith("#!") else logical_lines(body))]
    return found


RUN = [(page, line) for page, line in commands() if not line.startswith(CHECKED)]


# -- where commands are run ----------------------------------------------------------------------------------------


def applied(diff: str) -> str:
    """What a diff makes of a program."""
    return "".join(
        line[1:] + "\n" for line in diff.splitlines() if not line.startswith("-") and line[1:].strip() != "..."
    )


def loop_of(page: str, before: str) -> str:
    """The program of a page's diff, after what the page takes for granted."""
    ((_, diff),) = blocks(Path(page), "diff")
    return before + applied(diff)


README_BEFORE = """
import torch
from torch import nn

def Net():
    torch.manual_seed(0)
    return nn.Linear(4, 2)

loss_fn = nn.CrossEntropyLoss()
loader = [(torch.randn(8, 4), torch.randint(2, (8,))) for _ in range(3)]

def evaluate(model):
    print("evaluated", loss_fn(model(loader[0][0]), loader[0][1]).item())
"""

QUICKSTART_BEFORE = README_BEFORE.replace("loader = ", "epochs, train = 2, ") + "loader = train\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a wheel installs: the folder of the package and nothing else of the repository."""
    site = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "src" / "thinwire", site / "thinwire")
    return site


@pytest.fixture
def shell(wheel: Path, tmp_path: Path) -> Iterator[Shell]:
    """Run command lines side by side in a folder that has what the pages name; each must succeed."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, call in {
        "thinwire": "-P -m thinwire.cli",
        "torchrun": "-m torch.distributed.run",
        "python": "",
        "scontrol": "-c \"print('127.0.0.1')\"",
    }.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {call} "$@"\n')
    # Two tasks of a batch job, side by side as on two nodes.
    (programs / "srun").write_text('#!/bin/sh\n"$@" & one=$!\n"$@" & two=$!\nwait $one && wait $two\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    desk = tmp_path / "desk"
    desk.mkdir()
    (desk / "examples").symlink_to(ROOT / "examples")
    (desk / "train.py").write_text(loop_of("README.md", README_BEFORE))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("THINWIRE_", "PYTEST_"))}
    environment = {
        **inherited,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(wheel),
        "PYTHONWARNINGS": "error::ResourceWarning",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    started: list[subprocess.Popen[str]] = []

    def run(*lines: str, seconds: float = 400.0, **more: str) -> list[subprocess.CompletedProcess[str]]:
        processes = [
            subprocess.Popen(
                ["bash", "-ec", line],
                cwd=desk,
                env={**environment, **more},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for line in lines
        ]
        started.extend(processes)
        done: list[subprocess.CompletedProcess[str]] = []
        for line, process in zip(lines, processes, strict=True):
            out, err = process.communicate(timeout=seconds)
            done.append(subprocess.CompletedProcess(line, process.returncode, out, err))
        for each in done:
            assert each.returncode == 0, f"{each.args}\n{each.stdout[-3000:]}\n{each.stderr[-6000:]}"
        return done

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.communicate()


# -- commands ------------------------------------------------------------------------------------------------------


def test_every_command_is_run_or_only_checked() -> None:
    known = ("thinwire ", "python ", "torchrun ", "srun ", "#!/bin/bash")
    assert not [line for _, line in commands() if not line.startswith((*known, *CHECKED))]
    assert len(RUN) > 10


def single() -> Iterator[object]:
    """The pages with commands for one machine, each with those commands."""
    for page in dict.fromkeys(page for page, _ in RUN):
        lines = [line for where, line in RUN if where == page and "torchrun --nnodes" not in line]
        marks = [] if page in QUICK else [pytest.mark.slow, pytest.mark.timeout(600)]
        if any("--link" in line and not line.startswith("thinwire explain") for line in lines):
            marks.append(pytest.mark.skipif(NO_LINKS is not None, reason=f"no links here: {NO_LINKS}"))
        if lines:
            yield pytest.param(page, lines, marks=marks, id=page)


@pytest.mark.parametrize(("page", "lines"), list(single()))
@pytest.mark.slow
def test_the_commands_of_a_page_run_one_after_another(page: str, lines: list[str], shell: Shell) -> None:
    for line in [*BEFORE.get(page, ()), *lines]:
        shell(line)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "line"), [(page, line) for page, line in RUN if "torchrun --nnodes" in line])
def test_the_command_of_several_machines_runs_on_two(page: str, line: str, shell: Shell) -> None:
    # As printed, but for the number of machines and the first one's address, which is this machine's.
    port = free_port()
    here = re.sub(r"--nnodes \d+", "--nnodes 2", line)
    here = here.replace("HOST:29500", "host:29500")
    for printed, address in (("host:29500", f"127.0.0.1:{port}"), ("10.0.0.1", "127.0.0.1"), ("29500", str(port))):
        here = here.replace(printed, address)
    if line.startswith("#!"):
        (done,) = shell(here, SLURM_NNODES="2", SLURM_CPUS_PER_TASK="1", SLURM_JOB_ID="7", SLURM_JOB_NODELIST="here")
        said = done.stdout + done.stderr
    else:
        both = [here.replace("--node-rank 0", f"--node-rank {rank}") for rank in range(2)]
        said = "".join(done.stdout + done.stderr for done in shell(*both, seconds=240))
    if "doctor" in line:
        assert "machines" in said and "all-reduce" in said, said
    elif "examples/train.py" in line:
        assert said.startswith("workers 2, steps "), said
    else:
        assert said.count("evaluated") == 2, said
    assert "Warning" not in said and "destroy_process_group" not in said


# Two machines in namespaces of their own: each runs what the page prints, and shows its key to the other in a file.
MACHINES = """
mount -t tmpfs tmpfs /run; mount -t proc proc /proc
ip netns add a; ip netns add b
ip link add uplink netns a type veth peer name uplink netns b
for side in a b; do ip -n $side link set lo up; ip -n $side link set uplink up; done
ip -n a address add 192.0.2.1/24 dev uplink; ip -n b address add 192.0.2.2/24 dev uplink
ip netns exec a bash -e a.sh & one=$!
ip netns exec b bash -e b.sh & two=$!
wait $one && wait $two
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(NO_LINKS is not None, reason=f"no links here: {NO_LINKS}")
@pytest.mark.skipif(shutil.which("wg") is None, reason="wg is not installed")
def test_two_machines_train_over_the_page_s_wireguard(shell: Shell, tmp_path: Path) -> None:
    page = Path("docs/how-to/across-sites.md")
    key, *connect = (line.removeprefix("$ ") for line in printed_block(page, "$ (umask").splitlines())
    train = [line.removeprefix("$ ") for line in printed_block(page, "$ export GLOO_SOCKET_IFNAME=wg0").splitlines()]
    assert len(connect) == 4
    for own, other, host in (("a", "b", ""), ("b", "a", "192.0.2.1")):  # a does not know where b is
        lines = [
            "mount -t tmpfs tmpfs /run",  # where a WireGuard of user space keeps its socket
            f"cd {own}",
            f"({key}) > ../{own}.tmp",
            f"mv ../{own}.tmp ../{own}.pub",
            f"until [ -f ../{other}.pub ]; do sleep 0.1; done",
            *connect,
            *train,
        ]
        script = "\n".join(lines)
        if own == "b":
            script = script.replace("10.9.0.1/24", "10.9.0.2/24").replace("10.9.0.2/32", "10.9.0.1/32")
            script = script.replace("--node-rank 0", "--node-rank 1")
        script = script.replace("PUBLIC_KEY", f"$(cat ../{other}.pub)")
        script = script.replace("endpoint HOST:51820 ", f"endpoint {host}:51820 " if host else "")
        added = "ip link add wg0 type wireguard"
        script = script.replace(added, f"{added} 2>&1 || wireguard-go wg0")  # where the kernel has none
        (tmp_path / "desk" / own).mkdir()
        (tmp_path / "desk" / own / "train.py").symlink_to("../train.py")
        (tmp_path / "desk" / f"{own}.sh").write_text(script)
    (done,) = shell(f"unshare -Urnm --pid --fork --kill-child bash -ec {shlex.quote(MACHINES)}", seconds=280)
    assert done.stdout.count("evaluated") == 2


def printed_block(page: Path, start: str) -> str:
    """The one block of a page that begins so."""
    (found,) = (body for _, body in blocks(page, "text") if body.startswith(start))
    return found


@pytest.mark.parametrize("page", ["docs/how-to/clusters.md"])
def test_the_commands_of_kubernetes_are_those_of_the_page(page: str) -> None:
    yaml = pytest.importorskip("yaml")
    documents = [each for _, body in blocks(Path(page), "yaml") for each in yaml.safe_load_all(body)]
    assert [each["kind"] for each in documents] == ["Service", "Job", "TrainJob", "PyTorchJob"]
    (container,) = documents[1]["spec"]["template"]["spec"]["containers"]
    words = shlex.split(container["command"][2])
    (printed,) = [line for where, line in RUN if where == page and line.startswith("torchrun")]
    flags = lambda line: {word for word in line if word.startswith("--")}  # noqa: E731
    assert words[:2] == ["exec", "torchrun"]
    assert flags(words) == flags(shlex.split(printed))


def test_the_compose_file_starts_as_many_containers_as_workers() -> None:
    yaml = pytest.importorskip("yaml")
    from torch.distributed.run import parse_args

    services = yaml.safe_load(text(Path("examples/compose.yaml")))["services"]
    containers = sum(each.get("deploy", {"replicas": 1})["replicas"] for each in services.values())
    for each in services.values():
        program, *words = shlex.split(each["command"])
        read = parse_args(words)
        assert program == "torchrun" and (ROOT / read.training_script).exists()
        assert (read.nnodes, read.nproc_per_node, read.rdzv_backend) == (str(containers), "1", "c10d")
        assert read.rdzv_endpoint.partition(":")[0] == services["first"]["hostname"]


def test_what_is_to_be_installed_exists() -> None:
    import tomllib

    extras = tomllib.loads(text(Path("pyproject.toml")))["project"]["optional-dependencies"]
    for _, line in commands():
        for named in re.findall(r"\[([\w,]+)\]", line) if line.startswith("pip install") else ():
            assert set(named.split(",")) <= extras.keys(), line


@for_each(PAGES)
def test_every_command_in_the_text_has_options_that_exist(page: Path) -> None:
    commands = pytest.importorskip("thinwire.cli.commands")
    for line in inline(page) if page.name.lower() != "changelog.md" else ():
        if not re.match(r"thinwire \w+ .*--", line):
            continue
        name, *rest = [word for word in shlex.split(line)[1:] if word != "..."]
        if rest[-1].startswith("--"):  # an option is named, without its value
            kind = commands.kind_of(name)
            assert rest[-1].strip("-") in {field.name for field in fields(kind)}, line
        else:
            assert is_dataclass(commands.parse([name, *rest])), line


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_command_that_splits_a_model_trains_at_the_default_size(
    shell: Shell,
) -> None:
    (line,) = {each for page in ("README.md", "docs/how-to/choose.md") for each in inline(Path(page)) if "2x2" in each}
    shell(f"{line} --steps 2 --eval-limit 1")


# -- programs ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "before"), [("README.md", README_BEFORE), ("docs/tutorials/quickstart.md", QUICKSTART_BEFORE)]
)
def test_the_page_s_loop_runs_on_two_processes(page: str, before: str, shell: Shell) -> None:
    with_loop = f"cat > train.py <<'END'\n{loop_of(page, before)}END\n"
    (done,) = shell(with_loop + "thinwire emulate --workers 2 -- python train.py", seconds=100)
    assert done.stdout.count("evaluated") == 2
    assert "destroy_process_group" not in done.stdout + done.stderr


# Pages whose fragments take more than three seconds.
LONG = {page for page, size in PROCESSES.items() if size > 4} | {
    "docs/codecs/uses.md",
    "docs/coresets/selection.md",
    "docs/coresets/training.md",
    "docs/fusion/sweeps.md",
    "docs/how-to/trainers.md",
}


def fragments_of(page: Path) -> list[str]:
    return [code for marked, code in blocks(page, "python") if not marked]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=str(page), marks=[pytest.mark.slow] if str(page) in LONG else [])
        for page in PAGES
        if fragments_of(page)
    ],
)
def test_every_fragment_of_code_runs(page: Path, tmp_path: Path) -> None:
    codes, seconds = fragments_of(page), 110.0 if str(page) in LONG else 60.0
    size = PROCESSES.get(str(page), 1)
    processes = run_processes(size, run_fragments, str(page), codes, str(tmp_path), seconds=seconds)
    if processes[0]:
        pytest.skip("; ".join(processes[0]))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_step_of_the_tutorial_from_ddp_prints_what_the_page_shows(shell: Shell) -> None:
    program, printed = "", ""
    for step in steps_of(STEP_BY_STEP):
        if step.kind == "file":
            program = step.body
        elif step.kind == "diff":
            program = patched(program, step.body)
        elif step.kind == "output":
            assert_printed(printed, step.body)
        elif step.name == "runs":
            line = re.sub(r"--link \S+ ", "", step.body) if NO_LINKS is not None else step.body
            (done,) = shell(f"cat > mine.py <<'END'\n{program}END\n{line}")
            printed = done.stdout


def test_a_newcomer_needs_at_most_ten_commands() -> None:
    lines = [line for step in steps_of(STEP_BY_STEP) if step.kind == "command" for line in logical_lines(step.body)]
    assert len(lines) <= 10
    words = [line.split()[0] for line in lines]
    assert words.index("pip") < words.index("torchrun") < words.index("thinwire")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_of_a_newcomer_work_on_a_fresh_machine(tmp_path: Path) -> None:
    """Every command of the page, as printed, in a checkout's copy, with nothing but Python installed."""
    checkout, files = tmp_path / "thinwire", ("src", "pyproject.toml", "README.md", "LICENSE")
    checkout.mkdir()
    for name in files:
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, checkout / name)
    (program,) = (step.body for step in steps_of(STEP_BY_STEP) if step.kind == "file")
    (checkout / "mine.py").write_text(program)
    lines = [line for step in steps_of(STEP_BY_STEP) if step.kind == "command" for line in logical_lines(step.body)]
    lines = list(dict.fromkeys(lines))  # the same command after every diff
    if NO_LINKS is not None:
        lines = [re.sub(r"--link \S+ ", "", line) for line in lines]
    environment = {name: x for name, x in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    # The torch that was tested, which on this machine may be a wheel in a folder.
    environment["PIP_CONSTRAINT"] = str(ROOT / "constraints.txt")
    done = subprocess.run(
        ["bash", "-ec", "\n".join(lines)], cwd=checkout, env=environment, capture_output=True, text=True, timeout=850
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert (checkout / "runs/mine/report.html").exists()


@pytest.mark.slow
def test_the_tutorial_of_one_s_own_strategy_needs_no_checkout(
    shell: Shell,
) -> None:
    page = Path("docs/tutorials/own-strategy.md")
    shell("rm -r examples train.py")
    program = ""
    for marked, code in blocks(page, "python", "sh"):
        if marked.startswith("file: "):
            shell(f"cat > {marked.removeprefix('file: ')} <<'END'\n{code}END\n")
        elif marked and code.startswith("thinwire "):
            shell(code)
        elif marked:
            program += code
    shell(f"cat > program.py <<'END'\n{program}END\npython program.py")
