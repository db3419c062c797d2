"""a9a: does a person in the 1994 US census earn more than 50,000 dollars a year?"""

from functools import partial

import numpy as np

from thinwire.tasks.base import ACCURACY, Defaults, Task
from thinwire.tasks.data.base import Stream
from thinwire.tasks.data.examples import Rows, labelled
from thinwire.tasks.data.files import Folder, libsvm, read
from thinwire.tasks.models.plain import BinaryLogistic

FEATURES = 123


def a9a(folder: Folder) -> Task:
    """Adults and 123 yes-or-no facts about each, from libsvm/a9a.gz; a fifth, chosen at random once, is held out."""
    path = folder.file("libsvm/a9a.gz")
    features, labels = read(path, partial(libsvm, features=FEATURES))
    held, kept = np.split(Stream((0xA9A,)).permutation(len(labels)), [len(labels) // 5])
    sets = [Rows(features[rows], labels[rows]) for rows in (kept, held)]
    settings = (Defaults("sgd", lr=0.1, batch_size=64, momentum=0.0), Defaults("adamw", lr=3e-3, batch_size=64))
    networks = {"logistic": partial(BinaryLogistic, FEATURES)}
    return Task("a9a", "a9a (UCI Adult)", ACCURACY, networks, labelled(*sets), settings)
