# SPDX-License-Identifier: Apache-2.0
import ast
import dataclasses
import json
import math
import re
import shutil
import struct
from html.parser import HTMLParser
from pathlib import Path

import pytest

import thinwire.lab.report
from tests.lab.report.samples import SAMPLES, Sample, write_comparison, write_run
from thinwire.errors import ConfigError
from thinwire.lab.report import page as report_page
from thinwire.lab.report import read, write_report
from thinwire.lab.report.headline import lead, paper_of
from thinwire.lab.report.palette import TONES, looks
from thinwire.lab.report.table import columns, written
from thinwire.planning import units

VOID = {"meta", "br", "link", "img", "input", "hr"}
THREE = (SAMPLES[0], SAMPLES[2], SAMPLES[3])
SECTIONS = ["summary", "trade", "loss", "time", "timeline", "details"]


class Page(HTMLParser):
    """A page taken apart; a tag closed out of order is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.cells: list[str] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, {key: value or "" for key, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, {key: value or "" for key, value in attrs}))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words += data
        if "td" in self.open and "small" not in self.open:
            self.cells[-1] += data

    def values(self, name: str) -> list[str]:
        return [attributes[name] for _, attributes in self.tags if name in attributes]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory) -> Path:
    folder = write_comparison(tmp_path_factory.mktemp("comparison"), THREE, steps=100)
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def text(comparison) -> str:
    return (comparison / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(text) -> Page:
    return Page(text)


@pytest.fixture
def run_folder(tmp_path) -> Path:
    return write_run(tmp_path / "run", SAMPLES[2], steps=24, workers=2)


def without_curves(folder: Path) -> None:
    """What is looked at is no curve: these pictures take most of the time of a report."""
    for name in ("metrics.jsonl", "timeline.jsonl"):
        (folder / name).unlink()


def words_of(folder: Path) -> str:
    collection = read(folder)
    styles = looks([run.strategy for run in collection.runs])
    return Page(report_page.page(collection, styles, report_page.draw(collection, styles))).words


def test_every_section_is_there_and_the_navigation_leads_to_it(page):
    sections = [attributes["id"] for tag, attributes in page.tags if tag == "section"]
    assert sections == SECTIONS
    assert [link for link in page.values("href") if link in {f"#{name}" for name in SECTIONS}] == [
        f"#{name}" for name in SECTIONS
    ]


def test_nothing_is_fetched_and_nothing_is_run(text, page):
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert page.values("src") == []
    outside = [a["href"] for tag, a in page.tags if tag != "a" and not a.get("href", "#").startswith("#")]
    assert outside == []
    assert "@import" not in text
    assert re.findall(r"url\((?!#)", text) == []
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)


def test_papers_are_the_only_links_that_leave_the_page(page):
    left = {a["href"] for tag, a in page.tags if tag == "a" and not a["href"].startswith("#")}
    assert left == {"https://arxiv.org/abs/1805.09767", "https://arxiv.org/abs/1910.00643"}


def test_names_within_the_page_are_unique_and_every_reference_has_its_name(text, page):
    names = page.values("id")
    assert len(names) == len(set(names))
    references = {link[1:] for link in page.values("href") if link.startswith("#")}
    references |= set(re.findall(r"url\(#([^)]+)\)", text)) | set(page.values("aria-labelledby"))
    assert references <= set(names)


@pytest.mark.slow
def test_every_drawing_is_described_and_captioned(page):
    drawings = [attributes for tag, attributes in page.tags if tag == "svg"]
    # Each is there twice: for wide screens and for narrow ones.
    assert len(drawings) == 2 * (5 + len(THREE))
    assert all(drawing["role"] == "img" and len(drawing["aria-label"]) > 40 for drawing in drawings)
    assert 2 * sum(tag == "figcaption" for tag, _ in page.tags) == len(drawings)


@pytest.mark.slow
def test_drawings_follow_the_choice_of_light_or_dark(text):
    drawings = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert not [tone.light for tone in TONES if tone.light in drawings]
    assert "prefers-color-scheme: dark" in text
    assert set(re.findall(r"var\((--[\w-]+)\)", text)) <= set(re.findall(r"(--[\w-]+):", text))


def test_the_figures_in_the_table_are_those_of_the_summaries(comparison, page):
    summaries = [json.loads((comparison / sample.folder / "summary.json").read_text()) for sample in THREE]
    expected = [written(summary, column) for summary in summaries for column in columns(summaries)]
    assert [cell.removesuffix(" (best)") for cell in page.cells] == expected


def test_marks_are_explained_where_runs_are_compared(tmp_path: Path) -> None:
    small, dots = "Small figures compare with ddp.", "Dots mark the best of a column"
    compared, alone = (words_of(write_comparison(tmp_path / str(k), THREE[:k], steps=20)) for k in (2, 1))
    assert small in compared and dots in compared
    assert "Small figures" not in alone and dots not in alone


def test_the_best_of_each_column_is_marked_in_words_too(page):
    marked = [cell for cell in page.cells if cell.endswith(" (best)")]
    assert sum(attributes.get("class") == "best" for tag, attributes in page.tags if tag == "td") == len(marked)
    assert len(marked) >= 6


@pytest.mark.slow
def test_plots_are_images_of_a_good_size(comparison):
    plots = sorted((comparison / "plots").glob("*.png"))
    assert [plot.stem for plot in plots] == [
        "loss-bytes",
        "loss-seconds",
        "loss-steps",
        "pareto",
        "time-per-step",
        "timeline-1",
        "timeline-2",
        "timeline-3",
    ]
    for plot in plots:
        content = plot.read_bytes()
        width, height = struct.unpack(">II", content[16:24])
        assert content.startswith(b"\x89PNG")
        assert width >= 800
        assert height >= 150


@pytest.mark.slow
def test_a_single_run_has_no_trade_off_and_its_report_is_the_same_when_written_again(run_folder):
    written_files = write_report(run_folder)
    assert not {"pareto", "memory"} & {path.stem for path in written_files.plots}
    assert 'href="#trade"' not in written_files.report.read_text()
    first = [path.read_bytes() for path in (written_files.report, *written_files.plots)]
    again = write_report(run_folder)
    assert [path.read_bytes() for path in (again.report, *again.plots)] == first
    assert not list(run_folder.rglob(".*"))


def test_a_strategy_keeps_its_colour_whoever_stands_beside_it():
    everyone = {
        sample.strategy: look for sample, look in zip(SAMPLES, looks([s.strategy for s in SAMPLES]), strict=True)
    }
    assert all(looks([recipe]) == [look] for recipe, look in everyone.items())
    assert looks([SAMPLES[3].strategy, SAMPLES[0].strategy])[1] == everyone["ddp"]


def test_no_two_runs_of_a_comparison_look_alike():
    recipes = [f"LocalSGD(period={period})" for period in range(1, 30)]
    assert len(set(looks(recipes))) == len(recipes)


def test_each_colour_of_the_palette_is_used_once():
    for mode in ("light", "dark"):
        colours = [getattr(tone, mode) for tone in TONES]
        assert len(set(colours)) == len(colours)


def test_a_table_row_and_its_drawings_share_one_colour(text):
    colour = looks([sample.strategy for sample in THREE])[1].tone.variable
    assert f"--own: var({colour})" in text
    for name in ("loss-seconds", "time-per-step", "timeline-2"):
        drawing = next(d for d in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL) if f'id="{name}-' in d)
        assert f"var({colour})" in drawing


@pytest.mark.parametrize("simulated", [True, False])
@pytest.mark.slow
def test_links_of_a_simulated_network_are_not_called_unlimited(run_folder, simulated):
    # The rates are in a network file.
    for name in ("config.json", "summary.json"):
        facts = json.loads((run_folder / name).read_text())
        (run_folder / name).write_text(json.dumps({**facts, "link": None, "simulated": simulated}))
    without_curves(run_folder)
    text = write_report(run_folder).report.read_text()
    shown, other = "links of a simulated network", "links not limited"
    wanted, unwanted = (shown, other) if simulated else (other, shown)
    assert wanted in text and unwanted not in text


def test_every_missing_file_is_named_in_a_sentence_and_the_table_stays(run_folder):
    for name in ("config.json", "metrics.jsonl", "timeline.jsonl"):
        (run_folder / name).unlink()
    words = words_of(run_folder)
    assert "LocalSGD" in words
    assert "config.json is missing" in words
    assert "No loss was recorded" in words
    assert "No timeline was recorded" in words


def test_a_run_that_has_just_begun_is_reported(tmp_path):
    folder = tmp_path / "begun"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"strategy": "AllReduce()", "task": "digits"}))
    (folder / "metrics.jsonl").write_text("")
    assert "No step was timed" in words_of(folder)


def test_a_line_cut_short_by_a_kill_is_left_out_with_a_note(run_folder):
    metrics = run_folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-30])
    assert len(read(run_folder).runs[0].steps) == 23
    assert read(run_folder).runs[0].notes == ("1 of the 24 lines of metrics.jsonl cannot be read and are left out.",)


def test_a_killed_run_takes_its_figures_from_its_metrics(run_folder):
    summary = json.loads((run_folder / "summary.json").read_text())
    (run_folder / "summary.json").unlink()
    (run,) = read(run_folder).runs
    rebuilt = run.summary
    assert "ended before its summary.json was written" in run.notes[0]
    same = ("strategy", "steps", "seconds", "train_loss", "payload_bytes_per_worker_per_step")
    assert {key: rebuilt[key] for key in same} == {key: summary[key] for key in same}
    for key in ("seconds_per_step", "exposed_seconds_per_step", "compute_seconds_per_step"):
        assert math.isclose(rebuilt[key], summary[key], rel_tol=1e-9)


def test_a_loss_that_is_not_a_number_is_named_and_not_drawn(run_folder):
    summary = json.loads((run_folder / "summary.json").read_text()) | {"train_loss": math.nan}
    (run_folder / "summary.json").write_text(json.dumps(summary))
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    lost = [line | {"loss": math.nan} for line in lines]
    (run_folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lost))
    (run_folder / "timeline.jsonl").unlink()
    words = words_of(run_folder)
    assert "not finite" in words
    assert "No loss was recorded" in words


def test_a_run_missing_from_a_comparison_is_left_out_with_a_note(tmp_path):
    folder = write_comparison(tmp_path / "two", (SAMPLES[0], SAMPLES[2]), steps=12)
    shutil.rmtree(folder / "ddp")
    collection = read(folder)
    assert [run.label for run in collection.runs] == ["LocalSGD"]
    assert collection.notes == ("ddp is listed in comparison.json but holds no run, so it is left out.",)


def test_a_comparison_does_not_read_outside_its_folder(tmp_path):
    write_run(tmp_path / "outside", steps=4)
    folder = write_comparison(tmp_path / "inside", (SAMPLES[0],), steps=4)
    (folder / "comparison.json").write_text(json.dumps({"runs": ["../outside", "ddp"]}))
    assert len(read(folder).runs) == 1


def test_a_missing_folder_is_named_with_the_fix(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere: no such folder. Give the folder that .*--out"):
        write_report(tmp_path / "nowhere")


def test_a_folder_without_a_run_is_named_with_the_fix(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no config.json, metrics.jsonl or summary.json. Give"):
        write_report(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "summary.json"])
@pytest.mark.parametrize("content", ['{"strategy": ', "3"])
def test_a_broken_file_is_named_with_the_fix(run_folder, name, content):
    (run_folder / name).write_text(content)
    with pytest.raises(ConfigError, match=rf"{name}: .*([Ww]rite the run again)"):
        write_report(run_folder)


@pytest.mark.parametrize("runs", [[], "ddp", None, ["lost", "gone"]])
def test_a_comparison_without_runs_is_refused(tmp_path, runs):
    (tmp_path / "comparison.json").write_text(json.dumps({"runs": runs}))
    with pytest.raises(ConfigError, match=r"`runs` must list|none of the runs"):
        write_report(tmp_path)


def test_words_from_files_are_shown_and_never_interpreted(tmp_path):
    folder = write_comparison(tmp_path / "markup", (Sample("a", "<b>Bold</b> & 'co'"),), steps=6)
    (folder / "comparison.json").write_text(json.dumps({"runs": ["a"], "title": "<script>1</script>"}))
    without_curves(folder / "a")
    page = Page(write_report(folder).report.read_text(encoding="utf-8"))
    assert "<script>1</script>" in page.words
    assert "<b>Bold</b> & 'co'" in page.words
    assert not {"script", "b"} & {tag for tag, _ in page.tags}


def test_a_paper_is_linked_where_its_address_is_known():
    whole = "Wang et al., SlowMo, ICLR 2020, arXiv:1910.00643, Algorithm 1"
    assert paper_of({"paper": "https://a.org/p.pdf"}) == ("https://a.org/p.pdf", "https://a.org/p.pdf")
    assert paper_of({"paper": whole}) == (whole, "https://arxiv.org/abs/1910.00643")
    assert paper_of({"paper": "javascript:1"}) == ("javascript:1", "")
    assert paper_of({"paper": "a book"}) == ("a book", "")
    assert paper_of({}) is None


def test_a_comparison_without_a_title_is_named_by_what_it_compares(tmp_path):
    folder = write_comparison(tmp_path / "two", (SAMPLES[0], SAMPLES[2]), steps=4)
    (folder / "comparison.json").write_text(json.dumps({"runs": ["ddp", "local-sgd"], "title": ""}))
    assert read(folder).title == "2 strategies on text over 100mbit"
    assert read(folder / "ddp").title == "ddp on text over 100mbit"


def test_the_fastest_steps_are_the_finding_where_no_target_is_reached(comparison, page):
    facts = {run.label: run.summary for run in read(comparison).runs}
    assert all(summary["seconds_to_target"] is None for summary in facts.values())
    fastest, reference = (facts[label]["seconds_per_step"] for label in ("LocalSGD", "ddp"))
    sentence = f"LocalSGD takes {units.seconds(fastest)} per step, {units.times(reference / fastest)} faster than ddp"
    assert sentence in page.words


def test_the_first_at_the_target_is_the_finding_where_one_is_set(comparison):
    collection = read(comparison)
    reached = dict(zip(("ddp", "LocalSGD", "SlowMo(PushSum)"), (90.0, 30.0, 45.0), strict=True))
    runs = tuple(
        dataclasses.replace(run, summary={**run.summary, "seconds_to_target": reached[run.label]})
        for run in collection.runs
    )
    words = lead(dataclasses.replace(collection, runs=runs))
    assert (
        "<strong>LocalSGD</strong> reached a held-out loss of 2.0 in <strong>30.0 s</strong>, 3.0× sooner than ddp"
        in words
    )
    late = (dataclasses.replace(runs[0], summary=collection.runs[0].summary), *runs[1:])
    assert "ddp did not reach it" in lead(dataclasses.replace(collection, runs=late))


def test_empty_spans_are_explained_and_narrow_pages_have_a_hint(text):
    assert "Empty spans of the upper lane lie between steps" in " ".join(text.split())
    hint = text.index('class="hint"')
    assert hint < text.index('class="scroll"') and "@media (max-width: 640px)" in text
    assert ".hint { display: none" in text and ".hint { display: block" in text


def test_drawing_leaves_pyplot_alone():
    for path in Path(thinwire.lab.report.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            assert not any("pyplot" in name for name in names)
