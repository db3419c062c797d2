# SPDX-License-Identifier: Apache-2.0
"""Coresets as files, what `select` refuses, how good a coreset is, and `thinwire select`."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import thinwire
from tests.coreset.test_selection import alike, same
from tests.oracles.coreset import apart, cost, points
from tests.rules import refusals
from thinwire import Comm, ConfigError
from thinwire.cli import main
from thinwire.cli import select as command
from thinwire.coreset import Coreset, EuclideanDistances, select
from thinwire.coreset.baselines import k_center
from thinwire.coreset.matrices import read_matrix
from thinwire.coreset.quality import quality, random_subset
from thinwire.coreset.subset import stratify

# -- files -------------------------------------------------------------------------------------------------------------


def test_a_coreset_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    found = select(points(50), budget=7, method="naive")
    found.save(tmp_path / "c.safetensors")
    again = Coreset.load(tmp_path / "c.safetensors")
    assert same(found, again) and again.n == 50 and again.method == "naive" and len(again) == 7


def test_a_file_that_holds_no_coreset_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken").write_bytes(b"nothing")
    for path in (tmp_path / "broken", tmp_path / "absent"):
        with pytest.raises(ConfigError, match=r"Coreset\.save"):
            Coreset.load(path)


# -- what is refused ---------------------------------------------------------------------------------------------------

X = points(12)


test_arguments_that_cannot_work_are_refused_in_words = refusals(
    [
        ({}, "one of budget, fraction and cover"),
        ({"budget": 3, "fraction": 0.1}, "budget=3, fraction=0.1"),
        ({"fraction": 0.0}, r"fraction=0.0: must lie in \(0, 1\]"),
        ({"fraction": 1.5}, r"fraction=1.5"),
        ({"fraction": float("nan")}, r"fraction=nan"),
        ({"budget": 0}, r"1\.\.12"),
        ({"budget": 13}, r"1\.\.12"),
        ({"cover": -1.0}, "cover=-1.0"),
        ({"cover": float("nan")}, "cover=nan"),
        ({"budget": 3, "method": "best"}, "method='best': must be one of lazy"),
        ({"budget": 3, "method": "sparse", "neighbours": 0}, "neighbours=0"),
        ({"budget": 2, "labels": torch.arange(12) % 3}, "3 classes of 12 points need at least 1"),
        ({"budget": 3, "labels": torch.arange(11)}, r"labels \[11\]: there are 12 points"),
        ({"budget": 3, "labels": torch.zeros(12, 2)}, r"labels \[12, 2\]"),
        ({"budget": 3, "labels": torch.tensor([0.0] * 11 + [torch.nan])}, "row 11 has none"),
        ({"budget": 2.5}, "budget=2.5: must be a whole number"),
        ({"budget": True}, "budget=True: must be a whole number"),
        ({"budget": "3"}, "budget='3': must be a whole number"),
        ({"fraction": "0.1"}, "fraction='0.1': must be a number"),
        ({"cover": "x"}, "cover='x': must be a number"),
        ({"budget": 3, "seed": 2.5}, "seed=2.5: must be a whole number"),
        ({"budget": 3, "method": "sparse", "neighbours": 2.5}, "neighbours=2.5: must be a whole number"),
        ({"budget": 3, "labels": [None] * 12}, "one number or one text for each point"),
        ({"budget": 3, "labels": ["a", 1, None] * 4}, "one number or one text for each point"),
        ({"budget": 3, "labels": [[1], [2, 3]]}, "one number or one text for each point"),
    ],
    lambda arguments: select(X, **arguments),
)


test_features_that_cannot_be_used_are_refused_in_words = refusals(
    [
        (X[0], r"need a matrix \[n, d\]"),
        (X[:0], r"features \[0, 5\]"),
        (torch.zeros(3, 0), r"features \[3, 0\]"),
        (
            torch.where(torch.arange(12)[:, None] > 9, torch.nan, X),
            "2 of 12 rows hold NaN or infinity, the first is row 10",
        ),
        (torch.where(torch.arange(12)[:, None] == 4, torch.inf, X), "row 4"),
        (X.to(torch.complex64), "real numbers"),
        (X.double() * 1e300, "12 of 12 rows hold numbers above 1e37, the first is row 0; divide"),
        (np.array([["a", "b"]]), "features of <U1: distances need numbers"),
        (np.array([[1, None]]), "features of object: distances need numbers"),
        (np.zeros((3, 2), dtype="datetime64[s]"), r"features of datetime64\[s\]: distances need numbers"),
        (np.zeros(3, dtype=[("a", "f4")]), "distances need numbers"),
        ([[1.0, 2.0]], r"features are a list: .* np\.asarray"),
        (None, "features are a NoneType"),
    ],
    lambda features: select(features, budget=1),
)


SPARSE: dict[str, Callable[[Tensor], Any]] = {
    **{
        f"SciPy's {kind}": partial(lambda kind, x: scipy_matrix(kind, x.numpy()), kind)
        for kind in ("csr", "csc", "coo")
    },
    "SciPy's array": lambda x: scipy_matrix("csr_array", x.numpy()),
    "SciPy's numbers of 16 bits": lambda x: scipy_matrix("csr", x.to(torch.int16).numpy()),
    "torch's CSR": lambda x: x.to_sparse_csr(),
    "torch's COO": lambda x: x.to_sparse_coo(),
}


def scipy_matrix(kind: str, array: Any) -> Any:
    sparse = pytest.importorskip("scipy.sparse", reason="SciPy is not installed")
    return getattr(sparse, kind if kind.endswith("_array") else f"{kind}_matrix")(array)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_features_give_what_dense_ones_give(name: str) -> None:
    x = torch.where(X > 0, (4 * X).round(), 0.0)
    given = SPARSE[name](x)
    expected, found = select(x, budget=4), select(given, budget=4)
    assert found.indices.equal(expected.indices) and found.weights.equal(expected.weights)
    assert found.gains.equal(expected.gains)
    assert EuclideanDistances(given).rows.equal(EuclideanDistances(x).rows)
    assert quality(given, found.indices, found.weights) == quality(x, found.indices, found.weights)
    bad = x.clone()
    bad[3, 1] = torch.inf
    if "16 bits" not in name:
        with pytest.raises(ConfigError, match="the first is row 3"):
            select(SPARSE[name](bad), budget=4)


class Spoiled:
    """Distances between points on a line, of which one is wrong."""

    n = 12

    def __init__(self, value: float | None) -> None:
        self.value = value

    def between(self, candidates: Tensor) -> Tensor:
        place = torch.arange(self.n)
        found = (place[:, None] - candidates).abs().float()
        if self.value is None:
            return found[:-1]
        return torch.where((place[:, None] == 7) & (candidates == 5), self.value, found)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.nan, r"distance of point 7 to point 5 is nan\. Distances must be finite and at least 0"),
        (-0.5, r"distance of point 7 to point 5 is -0\.5\."),
        (torch.inf, r"distance of point 7 to point 5 is inf"),
        (None, r"returned the shape \[11, \d+\] for"),
    ],
)
def test_distances_that_are_none_are_refused(value: float | None, words: str) -> None:
    distances = Spoiled(value)
    for method in ("lazy", "naive"):
        with pytest.raises(ConfigError, match=words.replace("point 7 to point 5", r"point \d+ to point \d+")):
            select(distances, budget=4, method=method)
    with pytest.raises(ConfigError, match=words):
        k_center(distances, 12)
    with pytest.raises(ConfigError, match=words):
        stratify(distances, torch.arange(6), 6)


def test_methods_that_need_coordinates_say_so() -> None:
    with pytest.raises(ConfigError, match="needs features"):
        select(EuclideanDistances(X), budget=3, method="sparse")

    def work(comm: Comm) -> None:
        with pytest.raises(ConfigError, match="one rank alone"):
            select(X, budget=3, method="sparse", comm=comm)
        with pytest.raises(ConfigError, match="own rows"):
            select(EuclideanDistances(X), budget=3, comm=comm)
        with pytest.raises(ConfigError, match="or labels on none"):
            select(X, budget=3, comm=comm, labels=torch.arange(12) if comm.rank else None)
        with pytest.raises(ConfigError, match="columns, by rank"):
            select(X[:, : 3 + comm.rank], budget=3, comm=comm)
        # One rank's mistake is an error on both, at once.
        with pytest.raises(ConfigError, match="need one number" if comm.rank else "whole number for each row"):
            select(X, budget=3, comm=comm, labels=[None] * 12 if comm.rank else [0] * 12)
        with pytest.raises(ConfigError, match="are a list" if comm.rank else "features of rank 1 are invalid"):
            select([[1.0]] if comm.rank else X, budget=3, comm=comm)

    thinwire.run_threads(2, work, timeout=20)


def test_numbers_of_numpy_and_arrays_of_any_layout_are_taken() -> None:
    array = X.double().numpy()
    wanted = select(X.double(), budget=3)
    for features in (array[::-1][::-1], array.astype(">f8"), array.astype(np.longdouble), np.asfortranarray(array)):
        assert same(select(features, budget=np.int64(3), seed=np.int32(0)), wanted)  # type: ignore[arg-type]


def test_constant_columns_and_single_points_have_no_gradient_error() -> None:
    for features in (torch.full((1, 3), 1.1), torch.full((20, 3), 1.1)):
        found = quality(features, torch.tensor([0]), torch.tensor([float(len(features))], dtype=torch.float64))
        assert (found.mean_distance, found.gradient_error) == (0.0, 0.0)
    column = torch.full((12, 1), 1.1)
    own = [quality(each, torch.tensor([0, 5]), torch.full((2,), 6.0).double()) for each in (X, X.repeat(1, 2))]
    assert np.isfinite(quality(torch.cat([X, column], 1), torch.tensor([0]), torch.ones(1).double()).gradient_error)
    assert all(np.isfinite(each.gradient_error) for each in own)


def test_the_quality_s_distances_are_a_mean_a_95th_percentile_and_a_maximum() -> None:
    # Distances 0, 1, 4, ..., 99^2 to the first point.
    x = torch.arange(100.0)[:, None] ** 2
    found = quality(x, torch.tensor([0]), torch.tensor([100.0], dtype=torch.float64))
    assert found.mean_distance == pytest.approx(sum(k * k for k in range(100)) / 100, rel=1e-5)
    assert found.far_distance == pytest.approx(94**2, rel=1e-5)
    assert found.largest_distance == pytest.approx(99**2, rel=1e-5)


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.float16, np.int64, np.uint8, bool])
def test_features_may_be_arrays_of_any_numbers(kind: type) -> None:
    x = (np.arange(60).reshape(20, 3) ** 2 % 7).astype(kind)
    assert alike(select(x, budget=4), select(torch.from_numpy(x.astype(np.float32)), budget=4))


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_half_precision_selects_as_the_same_numbers_in_full(kind: torch.dtype) -> None:
    # Near 0, numbers of half precision are close together; less 11 they would all be one.
    draw = torch.Generator().manual_seed(0)
    x = torch.cat([0.004 * torch.rand(60, 1, generator=draw), torch.full((140, 1), 12.0)]).to(kind)
    wanted = select(x.float(), budget=6)
    assert wanted.cost > 0 and same(select(x, budget=6), wanted)
    # The difference of two numbers of half precision may be none.
    far = torch.tensor([[60000.0], [59000.0], [58000.0], [-60000.0]]).to(kind)
    assert same(select(far, budget=2), select(far.float(), budget=2))

    def work(comm: Comm) -> Coreset:
        return select(x[comm.rank :: 2], budget=6, comm=comm)

    order = torch.cat([x[0::2], x[1::2]])
    assert all(same(each, select(order.float(), budget=6)) for each in thinwire.run_threads(2, work, timeout=20))


# -- quality -----------------------------------------------------------------------------------------------------------


def test_quality_of_everything_is_perfect_and_of_a_coreset_better_than_chance() -> None:
    x, labels = points(300), torch.arange(300) % 2
    for kinds in (None, labels):
        found = select(x, budget=30, labels=kinds)
        own = quality(x, found.indices, found.weights, labels=kinds)
        draws = [random_subset(found, labels=kinds, seed=seed) for seed in range(6)]
        others = [quality(x, *draw, labels=kinds) for draw in draws]
        assert own.mean_distance < min(other.mean_distance for other in others)
        assert own.gradient_error < float(np.mean([other.gradient_error for other in others]))
        assert all(weights.sum() == pytest.approx(300) for _, weights in draws)
    assert own.mean_distance * 300 == pytest.approx(cost(apart(x), found.indices.tolist()), rel=1e-4)
    everything = quality(x, torch.arange(300), torch.ones(300).double(), labels=labels)
    assert everything.largest_distance == 0 and everything.gradient_error < 1e-6


@pytest.mark.parametrize("classes", [None, 3])
def test_the_gradient_error_is_that_of_eight_random_linear_models(classes: int | None) -> None:
    x, labels = points(40), None if classes is None else torch.arange(40) % classes
    indices, weights = torch.tensor([3, 8, 17, 31]), torch.tensor([7.0, 12.0, 9.0, 12.0], dtype=torch.float64)
    rows = ((x - x.mean(0)) / x.std(0)).double()
    draws, errors = torch.Generator().manual_seed(5), []
    torch.randperm(len(x), generator=draws)  # the points whose distances are measured
    for _ in range(8):
        model = torch.randn(x.shape[1], classes or 1, generator=draws).double() / x.shape[1] ** 0.5
        model.requires_grad_()
        logits = rows @ model
        losses = logits.cosh().log().sum(1) if labels is None else F.cross_entropy(logits, labels, reduction="none")
        truth, found = (
            torch.autograd.grad(each, model, retain_graph=True)[0] for each in (losses.sum(), weights @ losses[indices])
        )
        errors.append(float((truth - found).norm() / truth.norm()))
    measured = quality(x, indices, weights, labels=labels, seed=5).gradient_error
    assert measured == pytest.approx(float(np.mean(errors)), rel=1e-3)


# -- the command -------------------------------------------------------------------------------------------------------


def files(folder: Path) -> dict[str, list[str]]:
    """The same points in every kind of file, and the options that name their labels."""
    x, labels = points(60).numpy(), (np.arange(60) % 3).astype(np.int64)
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", labels)
    np.save(folder / "xy.npy", np.column_stack([x, labels]).astype(np.float32))
    np.savez(folder / "x.npz", data=x, kinds=labels)
    lines = [
        " ".join([str(y), *(f"{i + 1}:{v:.9g}" for i, v in enumerate(row))]) for row, y in zip(x, labels, strict=True)
    ]
    (folder / "x.libsvm").write_text("\n".join(lines) + "\n")
    return {
        "x.npy": ["--labels", str(folder / "y.npy")],
        "xy.npy": ["--labels=-1"],
        "x.npz": ["--labels", "kinds"],
        "x.libsvm": [],
    }


def test_the_command_writes_what_select_gives_for_every_kind_of_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = select(points(60), fraction=0.2, labels=torch.arange(60) % 3)
    for name, options in files(tmp_path).items():
        folder = tmp_path / f"out-{name}"
        arguments = ["select", "--data", str(tmp_path / name), "--fraction", "0.2", "--per-class", *options]
        assert main([*arguments, "--out", str(folder), "--json"]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed["chosen"] == 12 and printed["coreset"]["mean_distance"] < printed["random"]["mean_distance"]
        with np.load(folder / "coreset.npz") as file:
            assert file["indices"].tolist() == whole.indices.tolist()
            assert file["weights"].tolist() == whole.weights.tolist()
        table = (folder / "coreset.csv").read_text().splitlines()
        assert table[0] == "index,weight,gain" and len(table) == 13
        assert [int(line.split(",")[0]) for line in table[1:]] == whole.indices.tolist()
        assert json.loads((folder / "summary.json").read_text())["per_class"] is True


def test_the_command_shows_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files(tmp_path)
    (tmp_path / "x.npy").rename(tmp_path / "x[train].npy")
    assert main(["select", "--data", str(tmp_path / "x[train].npy"), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "6 of 60 points of x[train].npy" in printed and "relative gradient error" in printed and "random" in printed
    assert printed.splitlines()[-1] == str(tmp_path / "out")


def test_weights_of_more_than_a_million_points_keep_their_digits(tmp_path: Path) -> None:
    found = Coreset(
        torch.tensor([0, 7]), torch.tensor([1234567.0, 765433.0]).double(), torch.ones(2).double(), 1.0, 2000000
    )
    summary = {"smallest_weight": 765433.0, "largest_weight": 1234567.0, "seconds": 1.0, "optimum_gap": None}
    figures = dict.fromkeys(("mean_distance", "far_distance", "largest_distance", "gradient_error"), 0.5)
    command._write(tmp_path, found, summary)
    assert (tmp_path / "coreset.csv").read_text() == "index,weight,gain\n0,1234567,1.0\n7,765433,1.0\n"
    rows = command._rows({**summary, "coreset": figures, "random": figures})
    assert ("weights", "765,433 to 1,234,567", "equal") in rows


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "absent.npy"], "no such file"),
        (["--data", "x.txt"], "unknown kind of file"),
        (["--data", "broken.npy"], "cannot be read"),
        (["--data", "x.npy", "--per-class"], "gives no labels"),
        (["--data", "xy.npy", "--per-class", "--labels", "9"], "from 0 to 5"),
        (["--data", "xy.npy", "--labels=--1"], "from 0 to 5"),
        (["--data", "xy.npy", "--labels", "²"], "from 0 to 5"),
        (["--data", "x.npz", "--labels", "kind"], "holds data, kinds"),
        (["--data", "two.npz"], "holds 2 matrices"),
        (["--data", "x.libsvm", "--labels", "3"], "has its own"),
        (["--data", "x.npy", "--fraction", "2"], "--fraction 2.0: must lie in (0, 1]"),
        (["--data", "x.npy", "--fraction", "0.1", "--budget", "3"], "one of budget"),
        (["--data", "objects.npy"], "cannot be read"),
        (["--data", "empty.npy"], "cannot be read"),
        (["--data", "empty.npz"], "cannot be read"),
        (["--data", "archive.npy"], "Give it a name that ends in .npz"),
        (["--data", "texts.npy"], "features of <U1: distances need numbers"),
        (["--data", "number.npy"], "need a matrix [n, d]"),
        (["--data", "x.npy", "--labels", "number.npy"], "need one number for each point"),
        (["--data", "x.npy", "--labels", "empty.npy"], "cannot be read"),
    ],
)
def test_the_command_refuses_in_one_message(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    files(tmp_path)
    Path("x.txt").write_text("1 2 3")
    Path("broken.npy").write_bytes(b"\x93NUMPY")
    np.savez("two.npz", a=np.zeros((2, 2)), b=np.zeros((2, 2)))
    np.save("objects.npy", np.array([{}]), allow_pickle=True)
    np.save("texts.npy", np.array([["a", "b"]]))
    np.save("number.npy", np.array(3.0))
    Path("empty.npy").touch()
    Path("empty.npz").write_bytes(b"PK\x03\x04 no archive")
    Path("archive.npy").write_bytes(Path("two.npz").read_bytes())
    assert main(["select", *arguments, "--out", "out"]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("thinwire:") == 1 and words in " ".join(printed.err.split())
    assert "Traceback" not in printed.err
    assert not Path("out").exists()


@pytest.mark.parametrize("name", ["settings.json", "config.json", "comparison.json", "trials.json"])
def test_results_of_something_else_are_not_replaced(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    files(tmp_path)
    Path("run").mkdir()
    for written in (name, "summary.json"):
        Path("run", written).write_text("theirs")
    assert main(["select", "--data", "x.npy", "--out", "run"]) == 2
    assert f"--out run: holds other results ({name})" in " ".join(capsys.readouterr().err.split())
    assert Path("run", "summary.json").read_text() == "theirs"
    # Before anything is read or selected.
    assert main(["select", "--data", "absent.npy", "--out", "x.npy"]) == 2
    assert "--out x.npy: is a file" in capsys.readouterr().err


def test_a_report_is_not_of_a_coreset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files(tmp_path)
    folder = str(tmp_path / "out")
    assert main(["select", "--data", str(tmp_path / "x.npy"), "--out", folder]) == 0
    capsys.readouterr()
    assert main(["report", folder]) == 2
    assert "its summary.json is that of no training run" in " ".join(capsys.readouterr().err.split())
    # A selection of the same folder may be made again.
    assert main(["select", "--data", str(tmp_path / "x.npy"), "--out", folder]) == 0


def test_one_point_is_selected_without_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "one.npy", np.full((1, 3), 1.1))
    assert main(["select", "--data", str(tmp_path / "one.npy"), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    assert "1 of 1 points" in printed.out and "nan" not in printed.out and "Warning" not in printed.err


def test_columns_of_parquet_are_features_but_for_the_labels(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    x, labels = points(20, d=2).numpy(), ["a", "b"] * 10
    table = pyarrow.table({"one": x[:, 0], "kind": labels, "two": x[:, 1]})
    parquet.write_table(table, tmp_path / "x.parquet")
    features, own = read_matrix(tmp_path / "x.parquet", "kind")
    assert own is not None and own.tolist() == labels and np.array_equal(features, x)
    with pytest.raises(ConfigError, match="columns kind are not numbers"):
        read_matrix(tmp_path / "x.parquet")
    with pytest.raises(ConfigError, match="has the columns one, kind, two"):
        read_matrix(tmp_path / "x.parquet", "sort")


@pytest.mark.slow
def test_the_summary_says_where_training_on_the_coreset_ends_and_whether_random_points_are_as_good(tmp_path, capsys):
    draw = torch.Generator().manual_seed(0)
    centres = 6 * torch.randn(12, 4, generator=draw)
    # Near-duplicates of a few points, some of them rare: a coreset has all of these, random points do not.
    x = centres[torch.randint(3, (400,), generator=draw)]
    x = torch.cat([x, centres[3:]]) + 0.01 * torch.randn(409, 4, generator=draw)
    labels = (torch.cdist(x, centres).argmin(1) % 2).numpy()
    np.save(tmp_path / "x.npy", x.numpy())
    np.save(tmp_path / "y.npy", labels)
    arguments = ["select", "--data", str(tmp_path / "x.npy"), "--budget", "12", "--out", str(tmp_path / "out")]
    assert main([*arguments, "--labels", str(tmp_path / "y.npy")]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "as many random points stay further from it in all 5 draws" in told
    gaps = json.loads((tmp_path / "out" / "summary.json").read_bytes())["optimum_gap"]
    assert gaps["coreset"] < min(gaps["random"])
    assert main(arguments) == 0
    assert "give --labels" in capsys.readouterr().out


def test_noise_is_represented_as_well_by_random_points(tmp_path, capsys):
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(400, 3, generator=draw)
    np.save(tmp_path / "x.npy", x.numpy())
    np.save(tmp_path / "y.npy", torch.randint(2, (400,), generator=draw).numpy())
    arguments = ["select", "--data", str(tmp_path / "x.npy"), "--fraction", "0.05", "--out", str(tmp_path / "out")]
    assert main([*arguments, "--labels", str(tmp_path / "y.npy")]) == 0
    assert "they are as good here, and cost nothing" in " ".join(capsys.readouterr().out.split())
