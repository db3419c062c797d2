# SPDX-License-Identifier: Apache-2.0
"""The graphs that strategies of a report send along, as their configurations hold them."""

import numpy as np

from thinwire.lab.report.files import Facts, text
from thinwire.lab.report.graph import graph_picture
from thinwire.lab.report.picture import Picture
from thinwire.lab.report.runs import Collection


def topology_pictures(collection: Collection) -> list[Picture]:
    """One picture for each graph, however many runs have it; empty where no run recorded one."""
    found: dict[str, Facts] = {}
    for run in collection.runs:
        entry = run.config.get("topology")
        if isinstance(entry, dict) and text(entry, "name") and entry.get("mixing"):
            found.setdefault(text(entry, "name"), entry)
    pictures: list[Picture] = []
    for number, (name, entry) in enumerate(found.items()):
        mixing = np.asarray(entry["mixing"], dtype=np.float64)
        if mixing.ndim == 3 and mixing.shape[1] == mixing.shape[2]:
            pictures.append(graph_picture(f"topology-{number}", name, mixing))
    return pictures
