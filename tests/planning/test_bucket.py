# SPDX-License-Identifier: Apache-2.0
"""The cost of a run over a bucket: predicted objects are those of a real run, and prices follow from them."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import thinwire
from tests.buckets import count_found
from tests.rules import refusals
from thinwire.cli import main
from thinwire.core.comm.bucket import BucketComm
from thinwire.core.storage.bucket import Bucket
from thinwire.errors import ConfigError
from thinwire.planning.plan import Store, explain, parse_store, plan_bucket
from thinwire.planning.plan.traffic import DryRun
from thinwire.registry import recipe_classes
from thinwire.worker.compatibility import check_carried

STORE = Store(0.04, 20e6, 50e6, put_price=5.0, get_price=0.4, out_price=0.1)


@pytest.mark.parametrize(
    ("recipe", "parameters"),
    [
        ("LocalSGD(period=4)", 1000),
        ("LocalSGD(period=4)", 1_200_000),  # of two stages
        ("DiLoCo(period=4, codec=Quantize(4))", 1000),
        ("DiLoCo(period=4, codec=ErrorFeedback(OneBit()))", 200_000),
        ("DiLoCo(period=4, codec=ErrorFeedback(Gathered(Nearest(bits=4))))", 200_000),
        ("SlowMo(period=4)", 1000),
    ],
)
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.slow
def test_predicted_objects_are_those_of_a_run(recipe, parameters, workers, monkeypatch):
    pytest.importorskip("obstore")
    read = count_found(monkeypatch)
    url = f"memory://{recipe}-{parameters}-{workers}".replace("(", "-").replace(")", "").replace(" ", "")
    steps = 16

    def work(rank):
        bucket = Bucket.open(url)
        comm = BucketComm(bucket, "0", rank, workers)
        model = torch.nn.ParameterList([torch.zeros(parameters)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worker = thinwire.attach(model, optimizer, recipe, comm=comm)
        counts = []
        for step in range(2 * steps):
            if step in (steps, 2 * steps - 1):
                counts.append((bucket.traffic.puts, bucket.traffic.bytes_up, read[id(bucket)]))
            model[0].grad = torch.full((parameters,), float(rank))
            optimizer.step()
        counts[1] = (bucket.traffic.puts, bucket.traffic.bytes_up, read[id(bucket)])
        worker.detach()
        return [after - before for before, after in zip(*counts, strict=True)]

    with ThreadPoolExecutor(workers) as pool:
        found = list(pool.map(work, range(workers)))
    cost = explain(
        thinwire.parse(recipe), parameters=[parameters], workers=workers, store=STORE, optimizer=torch.optim.SGD
    ).bucket
    assert cost is not None and cost.refusal is None
    puts, up, gets = max(found)
    assert (puts, gets) == (cost.puts_per_step * steps, cost.gets_per_step * steps)
    assert up == pytest.approx(cost.up_bytes_per_step * steps, rel=0.05)
    if "Gathered" in recipe:  # one write of each, and one read of each other
        assert (puts, gets) == (steps / 4, (workers - 1) * steps / 4)


def sends_at(recipe, rank, steps=48):
    """Whether a rank writes or reads at each step, in a dry run."""
    run = DryRun(recipe, [1000], workers=4, rank=rank, dtype=torch.float32, bucket_bytes=1 << 20)
    return [found.puts + found.gets > 0 for found in (run.step().objects for _ in range(steps))]


@pytest.mark.parametrize(
    "recipe",
    [
        *(name for name, kind in sorted(recipe_classes().items()) if issubclass(kind, thinwire.Strategy)),
        "PushSum(staleness=2)",
        "LocalSGD(period=1)",
        "LocalSGD(period=8, warmup_steps=3)",
        "DiLoCo(period=8, fragments=4, delay=1)",
        "DiLoCo(period=4, fragments=4)",
        "SlowMo(base=Gossip(), period=48)",
        'Budget(AllReduce(ErrorFeedback(Nearest())), "20kB/s")',
    ],
)
def test_exactly_the_strategies_that_send_at_every_step_are_refused_on_all_ranks(recipe):
    strategy = thinwire.parse(recipe if "(" in recipe else f"{recipe}()")
    ranks = [sends_at(strategy, rank) for rank in range(4)]
    try:
        check_carried(strategy, 0.25)
        refusal = ""
    except ConfigError as error:
        refusal = str(error)
    if not refusal:
        assert not any(all(sends) for sends in ranks)
    elif "no other rank waits for" in refusal:
        assert strategy.traits.timing_dependent
    else:
        assert "it sends at every step" in refusal and "took 0.25 s" in refusal
        # The first steps of 0/1 Adam, which `steady_from` skips here.
        assert strategy.traits.steady_from > 1 or all(all(sends) for sends in ranks)


def test_a_day_is_what_its_steps_are():
    cost = explain(thinwire.parse("LocalSGD(period=10)"), parameters=250_000, workers=2, store=STORE).bucket
    assert cost is not None
    # A round is one object of 1 MB from each worker: 0.08 s of requests, 0.4 s up and 0.16 s down.
    assert cost.longest_seconds == pytest.approx(0.64, rel=0.01)
    rounds = 2 * 86_400 / (10 * 0.2 + 0.64)
    beats = 2 * 86_400 / 5
    assert cost.requests_per_day == pytest.approx(2 * rounds + beats, rel=0.01)
    assert cost.bytes_per_day == pytest.approx(rounds * 1e6, rel=0.01)
    dollars = (rounds + beats) / 1e3 * 5.0 + rounds / 1e3 * 0.4 + rounds * 1e6 / 1e9 * 0.1
    assert cost.dollars_per_day == pytest.approx(dollars, rel=0.01)


def test_a_strategy_that_sends_at_every_step_is_shown_as_refused(capsys):
    assert main(["explain", "AllReduce()", "--parameters", "1e6", "--bucket", "40ms,20mbit,50mbit", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["bucket"]
    assert "it sends at every step" in found["refusal"] and found["puts_per_step"] >= 1


def test_the_card_shows_a_day(capsys):
    recipe = "DiLoCo(period=100, codec=Quantize(4))"
    bucket = ["--bucket", "40ms,20mbit,50mbit", "--prices", "0,0,1"]
    assert main(["explain", recipe, "--parameters", "1e6", *bucket]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "this run makes" in shown and "requests and" in shown and "refused" not in shown


test_mistakes_are_refused = refusals(
    [
        ("40ms", None, "must be LATENCY,UP,DOWN"),
        ("40ms,20mbit,fast", None, "'fast'"),
        ("40ms,20mbit,50mbit", "1,2", "must be PUT,GET,OUT"),
        ("40ms,20mbit,50mbit", "-1,0,0", "put_price=-1.0: must be finite and not negative"),
    ],
    parse_store,
)


def test_options_without_a_bucket_are_refused(capsys):
    assert main(["explain", "LocalSGD()", "--parameters", "1e6", "--prices", "0,0,0"]) == 2
    assert "are for --bucket" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_a_plan_gives_each_recipe_the_shortest_period_that_keeps_to_the_limit():
    given = {"parameters": 400_000, "workers": 3}
    recipes = [
        "AllReduce()",
        "LocalSGD(period=8)",
        "LocalSGD(period=32)",
        "DiLoCo(period=8, codec=Quantize(4))",
        "DiLoCo(period=8, delay=4, mixing=0.5, codec=ErrorFeedback(Nearest(bits=4)))",
    ]
    found = plan_bucket(STORE, **given, step_seconds=0.2, within=1.05, recipes=recipes)
    assert [each.recipe for each in found if each.refused] == ["AllReduce()"]
    periods = {each.recipe.partition("(")[0]: thinwire.parse(each.recipe).traits.period for each in found}
    assert len(found) == 4  # both of LocalSGD have become one
    assert periods["LocalSGD"] > 50
    for each in found[:-1]:
        strategy = thinwire.parse(each.recipe)
        cost = explain(strategy, **given, store=STORE, step_seconds=0.2).bucket
        assert cost is not None and each.cost is not None
        assert cost.exposed_seconds_per_step == pytest.approx(each.cost.exposed_seconds_per_step)
        assert cost.dollars_per_day == pytest.approx(each.cost.dollars_per_day)
        assert each.slowdown <= 1.05
    # The delay hides what an undelayed round of the same bytes waits for.
    assert periods["DiLoCo"] <= 60
    with pytest.raises(ConfigError, match=r"within=1 is invalid: it must be more than 1"):
        plan_bucket(STORE, **given, step_seconds=0.2, within=1, recipes=recipes)


def test_the_delay_of_a_round_hides_its_messages():
    waits, *hidden = (
        explain(thinwire.parse(recipe), parameters=[1000], workers=2, store=STORE, step_seconds=1).bucket
        for recipe in ("DiLoCo(period=16)", "DiLoCo(period=16, delay=8)", "OverlapLocalSGD(16)", "CoCoD(16)")
    )
    assert waits.exposed_seconds_per_step == pytest.approx(waits.seconds_per_step) and waits.seconds_per_step > 0
    assert all(cost.seconds_per_step > 0 and cost.exposed_seconds_per_step == 0 for cost in hidden)


def test_the_command_recommends_a_recipe_for_a_bucket(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path))
    arguments = [
        "plan",
        "--task",
        "digits",
        "--bucket",
        "40ms,20mbit,50mbit",
        "--step-seconds",
        "0.1",
        "--workers",
        "3",
    ]
    recipes = "AllReduce(); LocalSGD(period=8); OverlapLocalSGD(period=8, codec=ErrorFeedback(Nearest(bits=4)))"
    assert main([*arguments, "--strategies", recipes]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "OverlapLocalSGD(period=8, codec=ErrorFeedback(Nearest(bits=4))) Its period keeps a step within 1.05 times"
        in shown
    )
    assert "left out: AllReduce(): AllReduce() over a bucket: it sends at every step" in shown
    assert main([*arguments, "--strategies", "LocalSGD(period=8)", "--within", "1.2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recommended"].startswith("LocalSGD(period=") and found["options"][0]["slowdown"] <= 1.2
    assert main([*arguments, "--strategies", "AllReduce()"]) == 2
    assert "none of the 1 recipes can be used over this bucket" in " ".join(capsys.readouterr().err.split())
    assert main(["plan", "--link", "1gbit", "--within", "1.1"]) == 2
    assert "--prices and --within are for --bucket" in " ".join(capsys.readouterr().err.split())
