# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that were damaged or forged, each by a seed: what `load` must refuse.

`python -m tests.worker.rotten` goes through all of them and prints what each was refused with.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.engine import attach, batches, drawn, steps
from tests.problems import Irregular
from thinwire import (
    CheckpointError,
    Comm,
    ErrorFeedback,
    LocalSGD,
    OneBit,
    PushSum,
    SlowMo,
    Strategy,
    Worker,
    run_threads,
)
from thinwire.core.storage.rank_file import RankFile
from thinwire.worker.worker import internals_of

SIZE, EARLIER, STEP = 2, 3, 5
RECIPES: list[Strategy] = [
    SlowMo(PushSum(Irregular(), staleness=1), period=3),
    LocalSGD(2, codec=ErrorFeedback(OneBit(8))),
]
Damage = Callable[[Path, random.Random], None]
Forgery = Callable[[dict[str, Any]], Any]


def home(folder: Path, step: int = STEP) -> Path:
    return folder / f"step-{step:08d}"


def json_of(folder: Path, rank: int, step: int = STEP) -> Path:
    return home(folder, step) / f"rank-{rank:04d}.json"


def tensors_of(folder: Path, rank: int, step: int = STEP) -> Path:
    return next(home(folder, step).glob(f"rank-{rank:04d}-*.safetensors"))


def some_file(folder: Path, draw: random.Random) -> Path:
    return draw.choice([json_of, tensors_of])(folder, draw.randrange(SIZE))


# -- damage: bytes, files and folders ----------------------------------------------------------------------------------


def truncate(folder: Path, draw: random.Random) -> None:
    path = some_file(folder, draw)
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content))])


def flip(folder: Path, draw: random.Random) -> None:
    path = some_file(folder, draw)
    content = bytearray(path.read_bytes())
    for _ in range(draw.choice([1, 1, 2, 8])):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def blank(folder: Path, draw: random.Random) -> None:
    path = some_file(folder, draw)
    content = bytearray(path.read_bytes())
    start = draw.randrange(len(content) - 16)
    content[start : start + 64] = bytes(len(content[start : start + 64]))
    path.write_bytes(content)


def append(folder: Path, draw: random.Random) -> None:
    path = some_file(folder, draw)
    path.write_bytes(path.read_bytes() + draw.randbytes(draw.randrange(1, 99)))


def replace_content(folder: Path, draw: random.Random) -> None:
    kinds = [
        b"",
        draw.randbytes(99),
        b"[]",
        b"null",
        b'"text"',
        b"{}",
        b"<html>404</html>",
        pickle.dumps({"x": 1}),
        b"\xff" * 9,
    ]
    some_file(folder, draw).write_bytes(draw.choice(kinds))


def delete(folder: Path, draw: random.Random) -> None:
    some_file(folder, draw).unlink()


def swap_ranks(folder: Path, draw: random.Random) -> None:
    which = draw.choice([json_of, tensors_of])
    one, other = which(folder, 0), which(folder, 1)
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def one_rank_s_parts_twice(folder: Path, draw: random.Random) -> None:
    rank = draw.randrange(SIZE)
    json_of(folder, 1 - rank).write_bytes(json_of(folder, rank).read_bytes())


def part_of(folder: Path, source: Path, step: int, rank: int) -> None:
    """Put a rank's part of another checkpoint in the place of its own."""
    for path in home(folder).glob(f"rank-{rank:04d}*"):
        path.unlink()
    for path in home(source, step).glob(f"rank-{rank:04d}*"):
        shutil.copy(path, home(folder) / path.name)


def part_of_another_step(folder: Path, draw: random.Random) -> None:
    part_of(folder, folder, EARLIER, draw.randrange(SIZE))


def part_of_another_run(folder: Path, draw: random.Random) -> None:
    part_of(folder, folder / "other", STEP, draw.randrange(SIZE))


def folder_of_another_step(folder: Path, draw: random.Random) -> None:
    home(folder).rename(home(folder, draw.randrange(6, 99)))


def not_a_file(folder: Path, draw: random.Random) -> None:
    path = some_file(folder, draw)
    path.unlink()
    kind = draw.randrange(4)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        os.mkfifo(path)
    else:
        path.symlink_to(Path("/dev/zero") if kind == 2 else folder)


def json_value(folder: Path, draw: random.Random) -> None:
    """Another value somewhere in the JSON, under the old seal."""
    path = json_of(folder, draw.randrange(SIZE))
    body = json.loads(path.read_bytes())
    place: Any = body
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = draw.choice(keys)
        if not isinstance(place[key], dict | list) or not place[key] or draw.random() < 0.2:
            break
        place = place[key]
    old = place[key]
    place[key] = draw.choice([x for x in (None, -1, [], {}, "x", True, 1e300) if x != old])
    path.write_text(json.dumps(body))


DAMAGES: list[tuple[Damage, int]] = [
    (truncate, 25),
    (flip, 30),
    (blank, 15),
    (append, 10),
    (replace_content, 15),
    (delete, 6),
    (swap_ranks, 4),
    (one_rank_s_parts_twice, 2),
    (part_of_another_step, 6),
    (part_of_another_run, 10),
    (folder_of_another_step, 3),
    (not_a_file, 8),
    (json_value, 20),
]


# -- forgeries: checksums are right, and what they are of is not -------------------------------------------------------


def first_parameter(content: dict[str, Any]) -> tuple[dict[str, Tensor], str]:
    parameters = content["state"]["parameters"]
    return parameters, next(iter(parameters))


def strategy_state(content: dict[str, Any], name: str) -> tuple[dict[str, Tensor], str]:
    state = content["state"]["replicas"][0]["state"]
    return state, next(each for each in state if each.endswith(name))


def memory(content: dict[str, Any]) -> dict[str, Any]:
    held: dict[str, Any] = content["state"]["optimizer"]["state"]
    return held[next(iter(held))]


def put(place: Callable[[dict[str, Any]], Any], value: Any) -> Forgery:
    """Another value; `value` may be a function of the old one."""

    def forge(content: dict[str, Any]) -> None:
        found = place(content)
        holder, key = found
        holder[key] = value(holder[key]) if callable(value) else value

    return forge


def remove(place: Callable[[dict[str, Any]], Any]) -> Forgery:
    def forge(content: dict[str, Any]) -> None:
        holder, key = place(content)
        del holder[key]

    return forge


def with_entry(x: Tensor, value: float) -> Tensor:
    x = x.clone()
    x.view(-1)[0] = value
    return x


def at(*path: Any) -> Callable[[dict[str, Any]], Any]:
    def find(content: dict[str, Any]) -> Any:
        place: Any = content
        for key in path[:-1]:
            place = place[key]
        return place, path[-1]

    return find


def renamed(content: dict[str, Any]) -> None:
    parameters, name = first_parameter(content)
    parameters["another"] = parameters.pop(name)


OPTIMIZER = ("state", "optimizer")
GROUP = (*OPTIMIZER, "param_groups", 0)
VECTOR = ("state", "replicas", 0)
BUFFER = ("state", "others", "1.running_mean")

# (What is forged, how, and the number of the recipe that it is for.)
FORGERIES: dict[str, tuple[Forgery, int]] = {
    "a parameter of another shape": (put(first_parameter, lambda x: x[:-1].clone()), 0),
    "a parameter transposed": (put(first_parameter, lambda x: x.T.clone()), 0),
    "a parameter of float64": (put(first_parameter, lambda x: x.double()), 0),
    "a parameter of integers": (put(first_parameter, lambda x: x.long()), 0),
    "a parameter that is NaN": (put(first_parameter, lambda x: with_entry(x, float("nan"))), 0),
    "a parameter that is infinite": (put(first_parameter, lambda x: with_entry(x, float("inf"))), 1),
    "a parameter that is text": (put(first_parameter, "x"), 0),
    "a parameter that is a list": (put(first_parameter, lambda x: x.tolist()), 0),
    "a missing parameter": (remove(first_parameter), 0),
    "a parameter by another name": (renamed, 0),
    "one parameter too many": (lambda content: content["state"]["parameters"].update(more=torch.ones(2)), 0),
    "parameters that are a list": (put(at("state", "parameters"), [1, 2]), 0),
    "a buffer of another shape": (put(at(*BUFFER), torch.ones(99)), 0),
    "a missing buffer": (remove(at(*BUFFER)), 0),
    "a buffer of another dtype": (put(at(*BUFFER), torch.ones(4, dtype=torch.int64)), 0),
    "a negative step": (put(at("state", "step"), -1), 0),
    "a step that is true": (put(at("state", "step"), True), 0),
    "a step that is text": (put(at("state", "step"), "5"), 0),
    "a step that is a float": (put(at("state", "step"), 5.0), 0),
    "a step beyond all numbers": (put(at("state", "step"), 1 << 70), 0),
    "another step than the folder's": (put(at("state", "step"), STEP + 1), 0),
    "no facts of the save": (remove(at("save")), 0),
    "facts that are a list": (put(at("save"), ["id"]), 0),
    "the id of another save": (put(at("save", "id"), "0" * 32), 0),
    "an id that is a path": (put(at("save", "id"), "../../etc/passwd"), 0),
    "another number of workers": (put(at("save", "size"), 1), 0),
    "more workers than files": (put(at("save", "size"), 1 << 60), 0),
    "no workers": (put(at("save", "size"), 0), 0),
    "another rank": (put(at("save", "rank"), lambda rank: 1 - rank), 0),
    "another step of the save": (put(at("save", "step"), STEP - 1), 0),
    "another recipe": (put(at("state", "identity", "the strategy"), "Local()"), 0),
    "an identity that is a list": (put(at("state", "identity"), []), 0),
    "an identity with more in it": (put(at("state", "identity"), lambda d: {**d, "more": "x"}), 0),
    "no identity": (remove(at("state", "identity")), 0),
    "no vectors": (put(at("state", "replicas"), []), 0),
    "two vectors": (put(at("state", "replicas"), lambda rows: rows * 2), 0),
    "vectors by name": (put(at("state", "replicas"), {"0": {}}), 0),
    "parameters in another order": (put(at(*VECTOR, "layout"), lambda rows: rows[::-1]), 0),
    "other strides": (put(at(*VECTOR, "layout", 0, 1), [1, 99]), 0),
    "strategy's state of another size": (put(lambda c: strategy_state(c, "anchor"), lambda x: x[:-1].clone()), 0),
    "strategy's state of another dtype": (put(lambda c: strategy_state(c, "slow"), lambda x: x.half()), 0),
    "push-sum's mass without its weight": (put(lambda c: strategy_state(c, "mass"), lambda x: x[:-2].clone()), 0),
    "missing state": (remove(lambda c: strategy_state(c, "debiased")), 0),
    "state that is text": (put(lambda c: strategy_state(c, "anchor"), "x"), 0),
    "a residual of another size": (put(lambda c: strategy_state(c, "error"), torch.zeros(3)), 1),
    "a server's residual of another size": (
        lambda c: c["state"]["replicas"][0]["state"].update({"server_error/0-9": torch.zeros(3)}),
        1,
    ),
    "state of a made-up size": (lambda c: c["state"]["replicas"][0]["state"].update(more=torch.zeros(2)), 1),
    "messages that are no list": (put(at(*VECTOR, "inflight"), {"base/shares of step 4": torch.ones(3)}), 0),
    "a message of another size": (put(at(*VECTOR, "inflight"), {"base/shares of step 4": [torch.ones(3)]}), 0),
    "a message that is a number": (put(at(*VECTOR, "inflight"), {"base/shares of step 4": [1]}), 0),
    "no optimizer": (remove(at(*OPTIMIZER)), 0),
    "an optimizer without groups": (put(at(*OPTIMIZER, "param_groups"), []), 0),
    "groups by name": (put(at(*OPTIMIZER, "param_groups"), {}), 0),
    "a group without a learning rate": (remove(at(*GROUP, "lr")), 0),
    "a learning rate that is text": (put(at(*GROUP, "lr"), "0.1"), 0),
    "a learning rate that is NaN": (put(at(*GROUP, "lr"), float("nan")), 0),
    "one beta": (put(at(*GROUP, "betas"), (0.9,)), 0),
    "parameters of a group by other names": (put(at(*GROUP, "params"), lambda names: [f"x{n}" for n in names]), 0),
    "moments of another shape": (lambda c: memory(c).update(exp_avg=torch.ones(7, 7)), 0),
    "moments that are text": (lambda c: memory(c).update(exp_avg="x") or memory(c).pop("exp_avg_sq"), 0),
    "missing moments": (lambda c: memory(c).pop("exp_avg_sq"), 0),
    "moments of no parameter": (lambda c: c["state"]["optimizer"]["state"].update(nobody={"step": 1}), 0),
    "moments that are a list": (put(at(*OPTIMIZER, "state"), [1]), 0),
    "random state of another size": (put(at("random", "cpu"), torch.zeros(9, dtype=torch.uint8)), 0),
    "random state of another dtype": (put(at("random", "cpu"), lambda x: x.float()), 0),
    "no random state": (put(at("random"), {}), 0),
    "extra that is a list": (put(at("extra"), [1]), 0),
    "a missing entry": (remove(at("extra")), 0),
    "a state that is a number": (put(at("state"), 3), 0),
    "everything is a list": (lambda content: [content], 0),
}


def forge(folder: Path, how: Forgery, ranks: list[int]) -> None:
    """Change the content of some parts, and write them with right checksums."""
    for rank in ranks:
        part = RankFile(home(folder), rank)
        content = deepcopy(part.read())
        returned = how(content)
        part.commit(part.stage(returned if isinstance(returned, list) else content))


def raw(folder: Path, change: Callable[[dict[str, Any], bytes], tuple[Any, bytes]]) -> None:
    """Change the bytes of the second part's tensors and its JSON, and seal them."""
    path, file = json_of(folder, 1), tensors_of(folder, 1)
    body = json.loads(path.read_bytes())
    del body["seal"]
    body, tensors = change(body, file.read_bytes())
    if isinstance(body, dict):
        if tensors != file.read_bytes():
            body["checksum"] = hashlib.sha256(tensors).hexdigest()
            body["tensors"] = f"rank-0001-{body['checksum'][:16]}.safetensors"
        (home(folder) / f"rank-0001-{hashlib.sha256(tensors).hexdigest()[:16]}.safetensors").write_bytes(tensors)
        body["seal"] = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    path.write_text(body if isinstance(body, str) else json.dumps(body))


def header(tensors: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """The tensors with another safetensors header."""
    (length,) = struct.unpack("<Q", tensors[:8])
    head = json.loads(tensors[8 : 8 + length])
    change(head)
    text = json.dumps(head).encode()
    return struct.pack("<Q", len(text)) + text + tensors[8 + length :]


def first_of(head: dict[str, Any]) -> dict[str, Any]:
    return head[next(name for name in head if name != "__metadata__")]


def deep(n: int) -> str:
    return "[" * n + "]" * n


RAW: dict[str, Callable[[dict[str, Any], bytes], tuple[Any, bytes]]] = {
    "JSON nested too deeply": lambda body, x: (deep(100_000), x),
    "a tree nested too deeply": lambda body, x: ({**body, "tree": json.loads(deep(400))}, x),
    "a number of 5,000 digits": lambda body, x: ('{"seal": ' + "9" * 5000 + "}", x),
    "a body that is a list": lambda body, x: (json.dumps([body]), x),
    "no tree": lambda body, x: ({k: v for k, v in body.items() if k != "tree"}, x),
    "tensors in another folder": lambda body, x: ({**body, "tensors": "../../other.safetensors"}, x),
    "tensors at an absolute path": lambda body, x: ({**body, "tensors": "/etc/passwd"}, x),
    "tensors that are a number": lambda body, x: ({**body, "tensors": 5}, x),
    "a checksum that is a path": lambda body, x: ({**body, "checksum": "../../../" + "0" * 55}, x),
    "a checksum that is null": lambda body, x: ({**body, "checksum": None}, x),
    "a rank that is text": lambda body, x: ({**body, "rank": "1"}, x),
    "a tensor that is not there": lambda body, x: ({**body, "tree": {**body["tree"], "extra": {"$tensor": "?"}}}, x),
    "a tensor's name that is a number": lambda body, x: ({**body, "tree": {**body["tree"], "save": {"$tensor": 5}}}, x),
    "items that are no pairs": lambda body, x: ({**body, "tree": {**body["tree"], "extra": {"$items": [1]}}}, x),
    "items by unhashable keys": lambda body, x: ({**body, "tree": {**body["tree"], "extra": {"$items": [[[], 1]]}}}, x),
    "a tuple that is a number": lambda body, x: ({**body, "tree": {**body["tree"], "extra": {"$tuple": 3}}}, x),
    "a header of many exabytes": lambda body, x: (body, struct.pack("<Q", 1 << 62) + x[8:]),
    "a tensor of many exabytes": lambda body, x: (body, header(x, lambda h: first_of(h).update(shape=[1 << 40] * 3))),
    "tensors that overlap": lambda body, x: (body, header(x, lambda h: first_of(h).update(data_offsets=[0, 1]))),
    "an unknown dtype": lambda body, x: (body, header(x, lambda h: first_of(h).update(dtype="F7"))),
    "no tensors": lambda body, x: (body, b""),
    "an empty header": lambda body, x: (body, struct.pack("<Q", 2) + b"{}"),
}


# -- trying them -------------------------------------------------------------------------------------------------------


def begun(comm: Comm, strategy: Strategy, seed: int) -> Worker:
    model = drawn(
        torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh(), torch.nn.Linear(4, 2)),
        seed,
    )
    return attach(comm, strategy, model=model, optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.01))


def saved(folder: Path, strategy: Strategy) -> None:
    """Two checkpoints of one run, and in `other` one of another run."""

    def work(comm: Comm) -> None:
        worker = steps(begun(comm, strategy, 0), batches(comm.rank, EARLIER))
        worker.save(folder)
        steps(worker, batches(comm.rank, STEP - EARLIER, first=EARLIER)).save(folder)
        steps(begun(comm, strategy, 1), batches(comm.rank, STEP, first=40)).save(folder / "other")

    run_threads(SIZE, work)


def snapshot_of(worker: Worker) -> list[Any]:
    """All that `load` could change, down to torch's random generator."""
    internals_of(worker).wait_pending()
    replica = worker.replicas[0]
    state = [[name, x.clone()] for name, x in replica.state.items()]
    inflight = [[name, [x.clone() for x in work.wait()]] for name, work in replica.inflight.items()]
    model = [[name, x.clone()] for name, x in worker.model.state_dict().items()]
    return [worker.step, model, deepcopy(worker.optimizer.state_dict()), state, inflight, torch.get_rng_state()]


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b)


def cases() -> Iterator[tuple[str, int, Callable[[Path], None]]]:
    """All damages and forgeries: a name, the recipe's number, and how it is done in a folder."""
    for damage, count in DAMAGES:
        for seed in range(count):
            name = f"{damage.__name__} {seed}"
            yield name, seed % len(RECIPES), lambda folder, d=damage, n=name: d(folder, random.Random(n))
    for i, (name, (how, recipe)) in enumerate(FORGERIES.items()):
        ranks = [0, 1] if i % 3 == 0 and "rank" not in name else [i % 2]
        yield f"forged: {name}", recipe, lambda folder, h=how, r=ranks: forge(folder, h, r)
    for name, change in RAW.items():
        yield f"forged: {name}", 0, lambda folder, c=change: raw(folder, c)


def tried(folder: Path, chosen: list[tuple[str, int, Callable[[Path], None]]]) -> list[tuple[str, str]]:
    """For each case what the load was refused with, after checking that no rank has changed; empty if it was not."""
    for number, strategy in enumerate(RECIPES):
        saved(folder / f"recipe-{number}", strategy)
    places: list[Path] = []
    for i, (_, recipe, spoil) in enumerate(chosen):
        places.append(folder / f"case-{i}")
        shutil.copytree(folder / f"recipe-{recipe}", places[-1])
        # Only the newest: nothing else may be loaded in its place.
        spoil(places[-1])
        shutil.rmtree(home(places[-1], EARLIER))

    def work(comm: Comm) -> list[str]:
        workers = [steps(begun(comm, strategy, 7), batches(comm.rank, 2, first=9)) for strategy in RECIPES]
        found: list[str] = []
        for (name, recipe, _), place in zip(chosen, places, strict=True):
            before = snapshot_of(workers[recipe])
            try:
                workers[recipe].load(place)
                found.append("")
            except CheckpointError as error:
                found.append(str(error))
                assert alike(before, snapshot_of(workers[recipe])), f"{name}: something has changed"
        return found

    rows = run_threads(SIZE, work, timeout=20)
    assert rows[0] == rows[1], "all ranks must be told the same"
    return [(name, words) for (name, _, _), words in zip(chosen, rows[0], strict=True)]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        results = tried(Path(temporary), list(cases()))
    for case, words in results:
        sys.stdout.write(f"{case}: {words[:160] or 'LOADED'}\n")
    refused = sum(bool(words) for _, words in results)
    sys.stdout.write(f"{refused} of {len(results)} were refused by CheckpointError, with nothing changed on any rank\n")
    sys.exit(refused < len(results))
