# SPDX-License-Identifier: Apache-2.0
"""Real tasks: data, models of named sizes, a loss and a metric.

`text` and `digits` need no files. The others read the folder that THINWIRE_DATA names; `mnist`, `cifar10` and `agnews`
are downloaded instead if the `datasets` library is installed and the folder has none of their files.

    mnist        mnist/{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz
    cifar10      cifar10/{train_part1,test}.npz: all JPEG bytes joined (`jpeg`), where each begins (`offsets`), `labels`
    shakespeare  text/tinyshakespeare.txt
    wikitext2    text/wikitext2.{train,valid,test}.txt; the first may be missing
    agnews       agnews/{train,test}.csv; the first may be missing
    a9a          libsvm/a9a.gz
"""

import difflib
from collections.abc import Callable
from pathlib import Path

from thinwire.errors import ConfigError
from thinwire.lab.tasks.base import IGNORED, Defaults, Evaluation, Measure, Task
from thinwire.lab.tasks.classification import a9a, agnews, cifar10, digits, mnist
from thinwire.lab.tasks.data.base import Batch, Shard
from thinwire.lab.tasks.data.files import Folder
from thinwire.lab.tasks.language import shakespeare, text, wikitext2

__all__ = ["IGNORED", "Batch", "Defaults", "Evaluation", "Measure", "Shard", "Task", "load", "names"]

_LOADERS = (text, digits, mnist, cifar10, shakespeare, wikitext2, agnews, a9a)
_TASKS: dict[str, Callable[[Folder], Task]] = {load.__name__: load for load in _LOADERS}


def names() -> tuple[str, ...]:
    """Return the names of all tasks, those that need no files first.

    Example:
        >>> names()
        ('text', 'digits', 'mnist', 'cifar10', 'shakespeare', 'wikitext2', 'agnews', 'a9a')
    """
    return tuple(_TASKS)


def load(name: str, *, data: Path | None = None) -> Task:
    """Load a task.

    Args:
        name: one of `names()`.
        data: the folder of data files; None means the one that THINWIRE_DATA names.

    Raises:
        ConfigError: for an unknown name, a missing folder or file, or one that cannot be read.

    Example:
        >>> task = load("digits")
        >>> task.sizes, task.metric
        (('mlp', 'cnn', 'logistic'), 'accuracy')
    """
    if name not in _TASKS:
        close = difflib.get_close_matches(name, _TASKS, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"task={name!r}: unknown. The tasks are {', '.join(_TASKS)}{hint}")
    return _TASKS[name](Folder(name, None if data is None else Path(data)))
