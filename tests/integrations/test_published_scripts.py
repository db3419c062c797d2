# SPDX-License-Identifier: Apache-2.0
"""`thinwire up` on the text of public scripts: nanoGPT's, minGPT's and PyTorch's MNIST example.

`THINWIRE_SCRIPTS` names a folder with checkouts of the repositories, such as `nanoGPT`. Their data sets are replaced by
random ones, and torchvision by a stand-in, since both would have to be downloaded.
"""

from __future__ import annotations

import os
import pickle
import string
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.integrations.test_script import edited, losses, run_by_hand, run_in_bucket, run_up
from tests.pool import run_processes
from thinwire.core.storage.bucket import new_key

UPSTREAM = os.environ.get("THINWIRE_SCRIPTS")
TORCHVISION = """
import torch


class datasets:
    class MNIST(torch.utils.data.Dataset):
        def __init__(self, root, train=True, download=False, transform=None):
            draw = torch.Generator().manual_seed(int(train))
            self.x = torch.rand(320 if train else 64, 1, 28, 28, generator=draw)
            self.y = torch.randint(10, (len(self.x),), generator=draw)
            self.transform = transform

        def __len__(self):
            return len(self.x)

        def __getitem__(self, index):
            return self.transform(self.x[index]), int(self.y[index])


class transforms:
    def Compose(parts):
        return lambda x: parts[1](parts[0](x))

    def ToTensor():
        return lambda x: x

    def Normalize(mean, std):
        return lambda x: (x - mean[0]) / std[0]
"""


@dataclass(frozen=True)
class Published:
    """A script of a public repository.

    Attributes:
        name: of the repository.
        commit: of the text.
        files: the paths of its files in the repository, by their paths in the folder of the run; the script is first.
        arguments: of the script.
        prepare: writes its data.
        attached: the file that is changed where the model is attached by hand.
        by_hand: makes the change, with a strategy.
    """

    name: str
    commit: str
    files: Mapping[str, str]
    arguments: Sequence[str]
    prepare: Callable[[Path], None]
    attached: str
    by_hand: Callable[[str, str], str]


def prepare_mnist(folder: Path) -> None:
    (folder / "torchvision.py").write_text(TORCHVISION)


def mnist_by_hand(text: str, strategy: str) -> str:
    return edited(
        text,
        (
            "enumerate(train_loader)",
            "enumerate(islice(train_loader, dist.get_rank(), len(train_loader) // 2 * 2, 2))",
        ),
        (
            "        output = model(data)\n        loss",
            "        if epoch == 1 and batch_idx == 0 and dist.get_rank():\n"
            "            torch.manual_seed(args.seed + 1)\n"
            "        output = model(data)\n        loss",
        ),
        (
            "    scheduler = StepLR",
            f"    worker = thinwire.attach(model, optimizer, {strategy!r})\n    scheduler = StepLR",
        ),
    )


def prepare_nanogpt(folder: Path) -> None:
    place = folder / "data" / "shakespeare_char"
    place.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for split in ("train", "val"):
        draw.integers(0, 65, 2000).astype(np.uint16).tofile(place / f"{split}.bin")
    (place / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 65}))


def nanogpt_by_hand(text: str, strategy: str) -> str:
    return edited(
        text,
        ("ddp = int(os.environ.get('RANK', -1)) != -1", "ddp = False"),
        ("checkpoint = None # free up memory\n", f"worker = thinwire.attach(model, optimizer, {strategy!r})\n"),
        (
            "    for micro_step in range(gradient_accumulation_steps):\n",
            "    if iter_num == 0 and dist.get_rank():\n        torch.manual_seed(1337 + 1)\n"
            "    for micro_step in range(gradient_accumulation_steps):\n",
        ),
    )


def prepare_mingpt(folder: Path) -> None:
    draw = np.random.default_rng(0)
    text = "".join(draw.choice(list(string.ascii_letters + " ,!"), 2000))
    (folder / "input.txt").write_text(f"O God, O God!{text}")


def mingpt_by_hand(text: str, strategy: str) -> str:
    return edited(
        text,
        (
            "        train_loader = DataLoader(",
            f"        worker = thinwire.attach(model, self.optimizer, {strategy!r})\n"
            "        first = torch.Generator().manual_seed(3407)\n"
            "        drawn = torch.empty((), dtype=torch.int64).random_(generator=first)\n"
            "        order = torch.Generator().manual_seed(int(drawn))\n"
            "        train_loader = DataLoader(",
        ),
        ("num_samples=int(1e10)", "num_samples=int(1e10), generator=order"),
        (
            "        data_iter = iter(train_loader)\n        while True:\n",
            "        data_iter = islice(train_loader, dist.get_rank(), None, 2)\n        while True:\n",
        ),
        (
            "            logits, self.loss = model(x, y)\n",
            "            if self.iter_num == 0 and dist.get_rank():\n                torch.manual_seed(3407 + 1)\n"
            "            logits, self.loss = model(x, y)\n",
        ),
    )


SCRIPTS = [
    Published(
        "examples",
        "77f55b912142",
        {"main.py": "mnist/main.py"},
        ["--epochs", "1", "--batch-size", "16", "--log-interval", "1"],
        prepare_mnist,
        "main.py",
        mnist_by_hand,
    ),
    Published(
        "nanoGPT",
        "3adf61e154c3",
        {"train.py": "train.py", "model.py": "model.py", "configurator.py": "configurator.py"},
        [
            *["--dataset=shakespeare_char", "--device=cpu", "--compile=False", "--dtype=float32", "--eval_iters=2"],
            *["--eval_interval=100", "--gradient_accumulation_steps=2", "--batch_size=4", "--block_size=16"],
            *["--n_layer=1", "--n_head=2", "--n_embd=16", "--dropout=0.1", "--max_iters=10", "--warmup_iters=2"],
            *["--lr_decay_iters=10", "--learning_rate=1e-2"],
        ],
        prepare_nanogpt,
        "train.py",
        nanogpt_by_hand,
    ),
    Published(
        "minGPT",
        "37baab71b9ab",
        {
            "chargpt.py": "projects/chargpt/chargpt.py",
            **{f"mingpt/{name}.py": f"mingpt/{name}.py" for name in ("__init__", "model", "trainer", "utils")},
        },
        [
            *["--model.model_type=None", "--model.n_layer=1", "--model.n_head=2", "--model.n_embd=16"],
            *["--data.block_size=16", "--trainer.batch_size=4", "--trainer.num_workers=0", "--trainer.max_iters=81"],
        ],
        prepare_mingpt,
        "mingpt/trainer.py",
        mingpt_by_hand,
    ),
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(UPSTREAM is None, reason="THINWIRE_SCRIPTS names no folder with the scripts' repositories"),
    pytest.mark.parametrize("published", SCRIPTS, ids=lambda value: value.name),
]


def write(published: Published, folder: Path) -> Path:
    """Write the text of a commit, and the data; returns the script."""
    checkout = Path(str(UPSTREAM)) / published.name
    if not checkout.exists():
        pytest.skip(f"{checkout} does not exist")
    for place, path in published.files.items():
        command = ["git", "-C", str(checkout), "show", f"{published.commit}:{path}"]
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_bytes(subprocess.run(command, capture_output=True, check=True).stdout)
    published.prepare(folder)
    return folder / next(iter(published.files))


def up_in(folder: str, *arguments: object) -> tuple[str, list[str]]:
    """`run_up` in a folder."""
    os.chdir(folder)
    return run_up(*arguments)  # type: ignore[arg-type]


def in_bucket_in(folder: str, *arguments: object) -> tuple[str, list[str]]:
    """`run_in_bucket` in a folder."""
    os.chdir(folder)
    return run_in_bucket(*arguments)  # type: ignore[arg-type]


def by_hand_in(folder: str, script: str, arguments: list[str]) -> str:
    """`run_by_hand` in a folder."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    return run_by_hand(script, arguments)


@pytest.mark.parametrize("strategy", ["AllReduce()", "LocalSGD(period=2, codec=Quantize(4))"])
def test_it_trains_as_if_it_was_attached_by_hand(published: Published, strategy: str, tmp_path: Path) -> None:
    script, given = write(published, tmp_path), list(published.arguments)
    found = run_processes(2, up_in, str(tmp_path), str(script), strategy, given, seconds=120)
    assert not any("Error" in note or "cannot be compared" in note for _, notes in found for note in notes), found
    changed = tmp_path / published.attached
    changed.write_text(published.by_hand(changed.read_text(), strategy))
    wanted = run_processes(2, by_hand_in, str(tmp_path), str(script), given, seconds=120)
    for (printed, _), expected in zip(found, wanted, strict=True):
        assert losses(printed) == losses(expected) and len(losses(printed)) >= 8
    assert losses(found[0][0]) != losses(found[1][0])  # other data


def test_it_trains_over_a_folder(published: Published, tmp_path: Path) -> None:
    script, url = write(published, tmp_path), (tmp_path / "run").as_uri()
    arguments = str(tmp_path), str(script), url, new_key(), list(published.arguments)
    (first, notes), (second, _) = run_processes(2, in_bucket_in, *arguments, seconds=120)
    assert len(losses(first)) == len(losses(second)) >= 8 and losses(first) != losses(second)
    assert any("attached with LocalSGD(period=5) on 2 workers" in note for note in notes)
