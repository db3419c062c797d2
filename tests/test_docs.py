# SPDX-License-Identifier: Apache-2.0
"""What the documentation says is so: its links, files, recipes, command lines, programs and figures of speech."""

from __future__ import annotations

import ast
import json
import multiprocessing
import os
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire
from examples.own_strategy import InTurn
from examples.own_strategy import run as run_own
from tests.browser import BROWSER, QUIET
from tests.rules import for_each
from thinwire.cli.commands import COMMANDS
from thinwire.cli.demo import Demo
from thinwire.lab.emulate.launch import free_port
from thinwire.lab.runs.recipes import BASELINES, parse_recipe
from thinwire.methods.strategies.base import Traits
from thinwire.registry import recipe_classes

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(
    path.relative_to(ROOT)
    for path in [*DOCS.rglob("*.md"), *ROOT.glob("*.md")]
    if "_build" not in path.parts and path.is_file()
)
EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.py")) if "__main__" in path.read_text()]
STRATEGIES = tuple(name for name, kind in recipe_classes().items() if issubclass(kind, thinwire.Strategy))
FENCE = re.compile(r"^(<!-- (?:runs|file: \S+) -->\n)?```(\S*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def text(page: Path) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: Path, *languages: str) -> Iterator[tuple[str, str]]:
    """The fenced blocks of a page in some languages, and what they are marked as: "runs", or "file: NAME"."""
    for marked, language, body in FENCE.findall(text(page)):
        if language in languages:
            yield marked.strip("<>!- \n"), body


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", text(page))


def inline(page: Path) -> list[str]:
    """What stands between single backticks."""
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(page))


SITE = "https://thinwire.readthedocs.io/en/latest/"


def anchors(page: Path) -> set[str]:
    """What a link may point to within a page."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


# -- what pages point to ------------------------------------------------------------------------------------------


@for_each(PAGES)
def test_every_link_within_the_documentation_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(SITE):  # the README is read outside of the repository too
            place, _, anchor = target.removeprefix(SITE).partition("#")
            path = Path("docs") / re.sub(r"\.html$", ".md", place)
            assert (ROOT / path).exists(), target
            assert not anchor or anchor in anchors(path), target
            continue
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        found = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found.relative_to(ROOT)), target


# What a newcomer looks up, and the section that answers it.
LOOKED_UP = {
    "resume on other machines": "docs/how-to/checkpoints.md#other-machines",
    "add a worker": "docs/how-to/elastic.md",
    "use with Hugging Face Trainer": "docs/how-to/trainers.md#hugging-face-trainer",
    "pick bits": "docs/codecs/index.md",
    "read a slow run": "docs/how-to/read-a-run.md",
    "sweep": "docs/fusion/sweeps.md",
    "export to Hugging Face": "docs/how-to/checkpoints.md#exporting-a-model",
    "own data": "docs/how-to/own-task.md",
    "two homes": "docs/how-to/across-sites.md#two-homes",
    "a method for 20 Mbit/s": "docs/how-to/choose.md",
}


def test_what_a_newcomer_looks_up_is_linked_from_the_first_page() -> None:
    front = Path("docs/index.md")
    linked = {os.path.normpath(front.parent / target) for target in re.findall(r"\]\(([^)\s]+)\)", prose(front))}
    pages = {target.partition("#")[0] for target in linked}
    for task, target in LOOKED_UP.items():
        page, _, anchor = target.partition("#")
        assert page in pages, task  # one click; the second leads to a section
        assert not anchor or anchor in anchors(Path(page)), task


@for_each(PAGES)
def test_every_file_that_is_named_exists(page: Path) -> None:
    for name in inline(page):
        if re.fullmatch(r"(examples|tests|src|docs|benchmarks)/[\w/.-]+", name) and "_build" not in name:
            assert (ROOT / name).exists(), name


@cache
def names_of_tests() -> set[str]:
    paths = [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "reproductions").rglob("test_*.py")]
    return {name for path in paths for name in re.findall(r"^def (test_\w+)", path.read_text("utf-8"), re.MULTILINE)}


@for_each(PAGES)
def test_every_test_that_is_named_exists(page: Path) -> None:
    assert {name for name in inline(page) if re.fullmatch(r"test_\w+", name)} <= names_of_tests()


@for_each(PAGES)
def test_every_make_target_that_is_named_exists(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shell = "\n".join(body for _, body in blocks(page, "sh"))
    named = re.findall(r"^make ([\w-]+)", shell, re.MULTILINE)
    named += [name[5:] for name in inline(page) if re.match(r"make [\w-]+$", name)]
    assert set(named) <= targets


# -- what pages quote ---------------------------------------------------------------------------------------------


@for_each(PAGES)
def test_every_recipe_is_understood(page: Path) -> None:
    for code in inline(page):
        if re.match(rf"({'|'.join(STRATEGIES)})\(.*\)$", code) and "..." not in code and ":" not in code:
            thinwire.parse(code)


@for_each(PAGES)
def test_every_command_line_is_understood(page: Path) -> None:
    commands = pytest.importorskip("thinwire.cli.commands")
    shell = "\n".join(body for _, body in blocks(page, "sh")).replace("\\\n", " ")
    lines = [line for line in shell.split("\n") if line.startswith("thinwire ")]
    for line in lines:
        # A configuration is written by an earlier command of the page, and a shell takes what is redirected.
        words = shlex.split(re.sub(r"--config \S+|> \S+$", "", line), comments=True)[1:]
        assert is_dataclass(commands.parse(words)), line
        for flag, value in pairwise(words):
            for recipe in value.split(";") if flag in ("--strategy", "--strategies") else ():
                if ":" not in recipe:  # a class of the reader's own, in blocks that are run
                    parse_recipe(recipe)


@for_each(PAGES)
def test_python_blocks_are_python(page: Path) -> None:
    for _, code in blocks(page, "python"):
        ast.parse(code)


STEP_BY_STEP = Path("docs/tutorials/from-ddp.md")
"""A page that is read as a newcomer reads it, in `test_docs_run.py`."""


def runnable() -> list[Path]:
    return [page for page in PAGES if page != STEP_BY_STEP and any(marked for marked, _ in blocks(page, "python"))]


LONG = {Path("docs/tutorials/own-strategy.md")}
"""Pages whose programs take half a minute; under `make test-all`."""


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow) if page in LONG else page for page in runnable()],
    ids=str,
)
def test_blocks_that_are_marked_run_one_after_another(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    names: dict[str, Any] = {"__name__": page.stem}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for marked, code in blocks(page, "python", "sh"):
            if marked.startswith("file: "):
                Path(marked.removeprefix("file: ")).write_text(code, encoding="utf-8")
            elif marked and code.startswith("thinwire "):
                for line in code.splitlines():
                    run_command(line)
            elif marked:
                exec(compile(code, str(page), "exec"), names)


def run_command(line: str) -> None:
    """Run a command line as the installed program would be run, whose module path has no current folder."""
    command = [sys.executable, "-P", "-m", "thinwire.cli", *shlex.split(line)[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def test_the_reference_lists_exactly_the_yardsticks() -> None:
    baselines = prose(Path("docs/reference/recipes.md")).partition("and baselines")[2]
    listed = {parse_recipe(name) for row in re.findall(r"^\| (`.*?) \|", baselines, re.M) for name in names_in(row)}
    assert {type(peer) for peer in listed} == set(BASELINES.values())


def names_in(row: str) -> list[str]:
    return re.findall(r"`([^`]+)`", row)


@for_each(STRATEGIES)
def test_every_strategy_has_a_line_among_the_papers(name: str) -> None:
    rows = re.findall(r"^\| [^|]+ \| (.*?) \| (.*) \|$", text(Path("docs/reference/papers.md")), re.MULTILINE)
    # By what a row names first, so that none shares another's.
    found = [paper for named, paper in rows if named.startswith((f"[`{name}`]", f"`{name}`"))]
    assert found, f"docs/reference/papers.md has no line for {name}"
    paper = getattr(thinwire, name).paper
    if not paper:
        assert name == "Probe", "all but what only looks come from somewhere"
        return
    number = re.search(r"arXiv:[\d.]+\d", paper)
    key = number[0] if number else paper.rpartition(":")[2].split(",")[0].split(" ")[1]
    assert any(key in each for each in found) or found[0].startswith("the "), paper


@for_each(recipe_classes())
def test_every_class_that_recipes_name_is_in_the_reference(name: str) -> None:
    pages = [text(Path("docs/reference") / page) for page in ("strategies.md", "topologies.md")]
    listed = [each for page in pages for each in re.findall(r"^\.\. autoclass:: thinwire\.(\w+)$", page, re.MULTILINE)]
    assert listed.count(name) == 1, f"docs/reference: give {name} one autoclass"


@pytest.mark.slow
def test_the_notebook_runs_without_jupyter(monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    notebook = json.loads(text(Path("docs/tutorials/notebook.ipynb")))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] for cell in cells), "outputs are made when the site is built"
    names: dict[str, Any] = {}
    for cell in cells:
        exec(compile("".join(cell["source"]), "notebook", "exec"), names)
    matplotlib.pyplot.close("all")
    sent = {recipe: workers[0][2] for recipe, workers in names["results"].items()}
    assert sent["LocalSGD(period=8, codec=Quantize(4))"] < sent["LocalSGD(period=8)"] < sent["AllReduce()"] / 7


def test_every_hyperparameter_is_in_the_tables_with_a_meaning() -> None:
    sys.path.insert(0, str(DOCS / "_ext"))
    try:
        from class_fields import classes_of, shown
    finally:
        sys.path.pop(0)
    listed = {kind for package in ("strategies", "codecs", "topology") for kind in classes_of(package)}
    assert listed == {kind for kind in recipe_classes().values() if shown(kind)}
    missing = [f"{kind.__name__}.{name}" for kind in listed for name, _, meaning in shown(kind) if not meaning]
    assert not missing, f"Args in the docstring have no line for {missing}"


def test_the_own_task_that_is_shown_is_the_example() -> None:
    ((_, shown),) = blocks(Path("docs/how-to/own-task.md"), "python")
    assert shown.strip() in text(Path("examples/own_task.py"))


def test_what_is_to_be_measured_has_a_beginning_and_an_end() -> None:
    for page in PAGES:
        marks = re.findall(r"<!-- (/?)measured:([\w-]+) -->", text(page))
        assert marks[::2] == [("", name) for _, name in marks[::2]]
        assert marks[1::2] == [("/", name) for _, name in marks[::2]]


def test_the_readme_is_short() -> None:
    assert len(text(Path("README.md")).split("\n")) < 150


def test_the_readme_and_the_help_say_alike_how_long_the_demo_takes() -> None:
    duration = COMMANDS["demo"].partition(", in ")[2]
    assert duration.endswith("minutes")
    for page in (text(Path("README.md")), Demo.__doc__ or ""):
        assert f"takes {duration}" in " ".join(page.split()).lower()


def test_the_words_by_which_an_error_is_found_are_in_it() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src" / "thinwire").rglob("*.py"))
    said = re.sub(r'"\s*f?"', "", sources)
    table = text(Path("docs/how-to/troubleshooting.md")).partition("## Errors")[2].partition("## Symptoms")[0]
    rows = re.findall(r"^\| `(\w+)`, `([^`]+)` \|", table, re.MULTILINE)
    assert len(rows) > 10
    for kind, words in rows:
        assert issubclass(getattr(thinwire, kind), thinwire.ThinwireError)
        assert words in said, words


# -- what a run leaves --------------------------------------------------------------------------------------------


def test_the_run_folder_is_as_described(tmp_path: Path) -> None:
    from thinwire.lab.runs import resolve, work

    asked = {"task": "digits", "strategy": "LocalSGD(period=2)", "steps": 4, "eval_every": 2, "save_every": 4}
    summary = work(resolve({**asked, "workers": 1, "threads": 1}), tmp_path)
    page = text(Path("docs/reference/run-folder.md"))
    sections = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.M))

    def named(title: str) -> set[str]:
        return set(re.findall(r"`([a-z_]+)`", sections[title]))

    assert summary is not None
    assert set(summary) <= named("summary.json")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {key for line in lines for key in line} == named("metrics.jsonl") - {"metrics", "consensus_distance"}
    links = json.loads((tmp_path / "links.json").read_text())
    assert set(links[0]) == named("links.json") - {"null"}
    files = {name.rstrip("/") for name in re.findall(r"^\| `([\w./]+)`", page, re.MULTILINE)}
    assert {path.name for path in tmp_path.iterdir()} - {"settings.json"} <= files


# -- examples -----------------------------------------------------------------------------------------------------


def _example(path: str, arguments: list[str], rank: int, size: int, port: int, said: str) -> None:
    """One process of an example, as a launcher would start it; what it prints goes to a file."""
    if size > 1:
        names = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    sys.argv = [path, *arguments]
    warnings.simplefilter("error")
    with Path(said).open("w", encoding="utf-8") as file, redirect_stdout(file):
        runpy.run_path(path, run_name="__main__")


def run_example(path: Path, folder: Path, *arguments: str, size: int = 1) -> str:
    """Run an example on so many processes; returns what rank 0 printed."""
    context = multiprocessing.get_context("forkserver")
    port = free_port()
    folder.mkdir(exist_ok=True)
    said = [folder / f"said-{rank}.txt" for rank in range(size)]
    processes = [
        context.Process(target=_example, args=(str(path), list(arguments), rank, size, port, str(said[rank])))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
        process.join()
    assert [process.exitcode for process in processes] == [0] * size
    return said[0].read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_runs_alone_and_with_another_worker(path: Path, size: int, tmp_path: Path) -> None:
    arguments = ["--folder", str(tmp_path / "kept"), "--steps", "10"] if path.stem == "resume" else []
    assert run_example(path, tmp_path, *arguments, size=size).strip()


@pytest.mark.slow
def test_an_example_runs_under_torchrun() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*launcher, str(ROOT / "examples" / "train.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("workers 2, ")


@pytest.mark.slow
def test_an_example_that_is_resumed_ends_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    path, folder, size = ROOT / "examples" / "resume.py", str(tmp_path / "stopped"), 2
    run_example(path, tmp_path / "a", "--folder", folder, "--steps", "10", size=size)
    resumed = run_example(path, tmp_path / "a", "--folder", folder, "--steps", "20", "--resume", size=size)
    whole = run_example(path, tmp_path / "b", "--folder", str(tmp_path / "whole"), "--steps", "20", size=size)
    assert resumed.startswith("steps 10 to 20")
    assert resumed.rpartition(" ")[2] == whole.rpartition(" ")[2]


def test_ones_own_strategy_sends_what_local_sgd_sends_in_more_messages() -> None:
    own, local = run_own(InTurn(parts=4), steps=8), run_own(thinwire.LocalSGD(period=4), steps=8)
    assert own.payload_bytes == pytest.approx(local.payload_bytes)
    assert own.messages == 4 * local.messages


def test_ones_own_strategy_in_one_part_is_local_sgd_at_every_step() -> None:
    def parameters(strategy: thinwire.Strategy) -> Callable[[thinwire.Comm], list[float]]:
        return lambda comm: train_a_little(strategy, comm)

    own, local = (thinwire.run_threads(3, parameters(s)) for s in (InTurn(parts=1), thinwire.LocalSGD(period=1)))
    assert own == local


def train_a_little(strategy: thinwire.Strategy, comm: thinwire.Comm) -> list[float]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.zero_()
    thinwire.attach(model, optimizer, strategy, comm=comm)
    for step in range(5):
        model(torch.full((1, 3), 1.0 + comm.rank + step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.nn.utils.parameters_to_vector(model.parameters()).tolist()


def test_the_tutorials_strategy_is_as_short_as_it_says() -> None:
    source = (ROOT / "examples" / "own_strategy.py").read_text(encoding="utf-8")
    body = source.partition("# own strategy: begin")[2].partition("# own strategy: end")[0].strip()
    assert len(body.split("\n")) <= 20
    (_, printed), *_ = blocks(Path("docs/tutorials/own-strategy.md"), "python")
    assert printed.strip().endswith(body)


# -- the site -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    for library in ("sphinx", "furo", "myst_nb"):
        pytest.importorskip(library, reason="the docs group is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", "-d", tmp_path / "trees", DOCS, tmp_path / "site"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for page in (tmp_path / "site").rglob("*.html"):
        assert not re.search(r'<(script|link|img)[^>]+(src|href)="https?://', page.read_text(encoding="utf-8")), page
    if BROWSER:
        assert wider_pages(tmp_path / "site", tmp_path / "profile", width=400) == []


SITE_PROBE = """<!doctype html><meta charset="utf-8"><body><pre id="found"></pre><script>
const pages = PAGES, wide = [];
const look = number => {
  if (number === pages.length) {
    document.getElementById("found").textContent = JSON.stringify({looked: number, wide});
    return;
  }
  const frame = document.createElement("iframe");
  frame.style = "border:0; width:WIDTHpx; height:800px";
  frame.src = pages[number];
  frame.onload = () => {
    const page = frame.contentDocument;
    const boxes = [...page.querySelectorAll(".table-wrapper")].filter(box => box.scrollWidth > box.clientWidth + 1);
    // A table that is wider says so.
    const silent = boxes.some(box => !box.classList.contains("scrolls"));
    if (page.documentElement.scrollWidth > WIDTH || silent) wide.push(pages[number]);
    frame.remove();
    look(number + 1);
  };
  document.body.appendChild(frame);
};
look(0);
</script>"""


def wider_pages(site: Path, profile: Path, *, width: int) -> list[str]:
    """The pages of a site that are wider than a screen of so many pixels, or whose wide tables do not say so."""
    pages = sorted(str(page.relative_to(site)) for page in site.rglob("*.html") if "_modules" not in page.parts)
    probe = site / "probe.html"
    probe.write_text(SITE_PROBE.replace("PAGES", json.dumps(pages)).replace("WIDTH", str(width)), encoding="utf-8")
    done = subprocess.run(
        [BROWSER, *QUIET, "--allow-file-access-from-files", f"--user-data-dir={profile}", "--window-size=1400,1000",
         "--virtual-time-budget=120000", "--dump-dom", probe.as_uri()],
        capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    found = json.loads(re.findall(r'<pre id="found">(\{.*?\})</pre>', done.stdout, re.DOTALL)[0])
    assert found["looked"] == len(pages)
    return found["wide"]


ON_GPUS = (
    "Distributed training was tested and measured on CPUs over Gloo; on one GPU (an NVIDIA H200) the kernels, arrays "
    "of models and one rank over NCCL were tested, and NCCL between GPUs has not been run."
)


def test_what_was_run_on_gpus_is_said_in_one_sentence_everywhere() -> None:
    told = {str(page) for page in PAGES if ON_GPUS in " ".join(text(page).split())}
    assert {"README.md", "docs/index.md", "docs/how-to/clusters.md", "docs/explanation/peers.md"} <= told
    other = re.compile(r"NCCL[^.]{0,80}(takes? the same calls|not (yet )?been (run|tested)|been run with)")
    for page in PAGES:
        if page.name not in ("CHANGELOG.md", "changelog.md"):
            found = other.search(" ".join(text(page).split()).replace(ON_GPUS, ""))
            assert found is None, f"{page}: {found}"


def test_the_page_names_everything_that_elastic_runs_refuse() -> None:
    page = " ".join(text(Path("docs/how-to/elastic.md")).split())
    limits = "`BackupWorkers` " + page.partition("`BackupWorkers` needs no")[2]
    refused: list[str] = []
    for name, kind in recipe_classes().items():
        try:
            made: Any = kind()
        except TypeError:  # it needs arguments
            made = kind
        traits = getattr(made, "traits", None)
        if traits.inelastic_reason if isinstance(traits, Traits) else getattr(traits, "inelastic", ""):
            refused.append(name)
    assert {"ADPSGD", "BetweenNodes", "NodeAverage"} <= set(refused)
    assert [name for name in refused if f"`{name}`" not in limits] == []
