# SPDX-License-Identifier: Apache-2.0
import io

from rich.console import Console

from tests.lab.report.samples import SAMPLES
from thinwire.lab.report import markdown, rich_table, rows
from thinwire.lab.report.labels import labels
from thinwire.lab.report.table import baseline, best, cells, direction, winners
from thinwire.planning import units


def summary(strategy: str, seconds: float, **facts: object) -> dict[str, object]:
    return {
        "strategy": strategy,
        "seconds_per_step": seconds,
        "payload_bytes_per_worker_per_step": 4.2e6 * seconds,
        "wire_bytes_per_worker_per_step": None,
        "compute_seconds_per_step": 0.04,
        "exposed_seconds_per_step": seconds - 0.04,
        "train_loss": 1.5,
        "eval_loss": 1.6 + seconds,
        "eval_metric": 0.5 + seconds / 10,
        "metric": "accuracy",
        "seconds_to_target": None,
        "target_loss": None,
        **facts,
    }


PAIR = [summary("ddp", 0.4), summary("LocalSGD(period=8)", 0.1)]


def test_a_row_has_each_figure_with_its_unit():
    assert rows(PAIR)[1] == {
        "strategy": "LocalSGD",
        "time/step": "100 ms",
        "vs ddp": "4.0×",
        "payload/step": "420 kB",
        "compute": "40.0 ms",
        "exposed": "60.0 ms",
        "train loss": "1.500",
        "held-out loss": "1.700",
        "accuracy": "0.5100",
    }


def test_bytes_on_the_wire_are_a_column_where_a_run_has_counted_them():
    counted = [PAIR[0], {**PAIR[1], "wire_bytes_per_worker_per_step": 4.3e5}]
    assert [row["wire/step"] for row in rows(counted)] == ["-", "430 kB"]
    assert "wire/step" not in rows(PAIR)[0]


def test_speed_is_compared_only_where_ddp_is_present():
    assert [row["vs ddp"] for row in rows(PAIR)] == ["1.00×", "4.0×"]
    assert "vs ddp" not in rows(PAIR[1:])[0]


def test_a_target_adds_its_column_and_who_did_not_reach_it():
    facts = [summary("ddp", 0.4, target_loss=2.0), summary("LocalSGD()", 0.1, target_loss=2.0, seconds_to_target=300)]
    assert [row["time to loss 2.0"] for row in rows(facts)] == ["not reached", "5 min 00 s"]


def test_every_column_is_there_for_every_row_even_of_an_empty_summary():
    first, empty = rows([PAIR[0], {}])
    assert list(first) == list(empty)
    assert set(empty.values()) == {"-"}
    assert rows([]) == []


def test_the_best_is_the_lowest_time_and_the_highest_accuracy():
    assert best(PAIR, "seconds_per_step", -1) == 1
    assert best(PAIR, "eval_metric", direction("accuracy")) == 0
    assert best(PAIR, "train_loss", -1) is None
    assert best(PAIR, "wire_bytes_per_worker_per_step", -1) is None


def test_a_metric_s_name_decides_which_way_is_better():
    names = ["top-1 accuracy", "BLEU", "perplexity", "bits per byte", "rank"]
    assert [direction(name) for name in names] == [1, 1, -1, -1, 0]


def test_those_that_read_the_same_as_the_best_are_marked_too():
    three = [summary("ddp", 0.1), summary("AllReduce()", 0.10001), summary("Gossip()", 0.2)]
    assert [row[0].best for row in cells(three, 0)] == [True, True, False]


def test_figures_are_compared_with_ddp_or_else_with_the_first():
    assert baseline(PAIR[::-1]) == 1
    assert baseline([PAIR[1], summary("AllReduce()", 0.2)]) == 0
    assert baseline(PAIR[:1]) is None
    assert cells(PAIR, 0)[1][0].against == "4.0× faster"
    assert cells(PAIR, 1)[0][0].against == "4.0× slower"
    assert cells(PAIR, 0)[0][0].against == ""


def test_markdown_marks_the_best_and_has_one_line_per_run():
    head, rule, ddp, local = markdown(PAIR).splitlines()
    assert head.startswith("| strategy | time/step | vs ddp |")
    assert rule.count("---:") == head.count("|") - 2
    assert "| **100 ms** |" in local
    assert "| **0.5400** |" in ddp
    assert markdown([]) == ""


def test_the_terminal_s_table_holds_the_same_words():
    console = Console(file=io.StringIO(), width=200, no_color=True)
    console.print(rich_table(PAIR, title="two runs"))
    shown = console.file.getvalue()
    assert all(value in shown for row in rows(PAIR) for value in row.values())
    assert all(heading in shown for heading in rows(PAIR)[0])


def test_brackets_in_a_strategy_s_name_are_shown_in_the_terminal():
    console = Console(file=io.StringIO(), width=200, no_color=True)
    console.print(rich_table([summary("my[bold]name", 1.0)]))
    assert "my[bold]name" in console.file.getvalue()


def test_labels_have_only_the_arguments_that_differ():
    assert labels([sample.strategy for sample in SAMPLES]) == [
        "ddp",
        "AllReduce",
        "LocalSGD",
        "SlowMo(PushSum)",
        "PushSum",
    ]
    assert labels(["LocalSGD(period=4)", "LocalSGD(period=8)"]) == ["LocalSGD(period=4)", "LocalSGD(period=8)"]
    assert labels(["SlowMo(base=Local(), lr=1.0, period=4)", "SlowMo(base=Local(), lr=1.0, period=8)"]) == [
        "SlowMo(period=4)",
        "SlowMo(period=8)",
    ]
    assert labels(["SlowMo(base=PushSum(), lr=1.0)", "SlowMo(base=PushSum(), lr=0.5)"])[0] == "SlowMo(PushSum, lr=1.0)"
    assert labels(["ddp+bf16", "AllReduce(", "AllReduce()", "AllReduce()"]) == [
        "ddp+bf16",
        "AllReduce(",
        "AllReduce",
        "AllReduce #2",
    ]


def test_durations_and_bytes_are_three_digits_and_the_unit_that_fits():
    durations = [0.00012, 0.0412, 0.99951, 3.404, 119.4, 119.6, 7500]
    shown = ["120 µs", "41.2 ms", "1.00 s", "3.40 s", "119 s", "2 min 00 s", "2 h 05 min"]
    assert [units.seconds(value) for value in durations] == shown
    sizes = [0, 812, 26_340, 999_900, 1.534e9]
    assert [units.nbytes(value) for value in sizes] == ["0 B", "812 B", "26.3 kB", "1.00 MB", "1.53 GB"]


def test_rates_and_shares_are_as_people_write_them():
    assert [units.rate(value) for value in (1e9, 1e8, 2.5e6, 64e3, 300)] == [
        "1 Gbit/s",
        "100 Mbit/s",
        "2.5 Mbit/s",
        "64 kbit/s",
        "300 bit/s",
    ]
    assert [units.share(value) for value in (0, 0.003, 0.0996, 0.5)] == ["0 %", "0.3 %", "10 %", "50 %"]
    assert [units.times(value) for value in (0.98, 1.0, 3.42, 11.7)] == ["0.98×", "1.00×", "3.4×", "12×"]


def test_winners_are_named_beyond_the_noise_alone():
    def figures(*values):
        return [{"strategy": f"S{i}", "payload_bytes_per_worker_per_step": v} for i, v in enumerate(values)]

    key = "payload_bytes_per_worker_per_step"
    assert winners(figures(8.0, 1.0, 1.001), key, -1) == [1, 2]
    assert winners(figures(1.0, 1.001), key, -1) == []
    assert winners(figures(8.0, 1.0), key, -1) == [1]
    assert winners(figures(8.0, None), key, -1) == []
    assert "**" not in markdown(figures(1.0, 1.001))
