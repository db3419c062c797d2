# SPDX-License-Identifier: Apache-2.0
"""Groups of processes under FSDP2 train while random ranks are killed, and report how long the other groups pause.

python -m tests.elastic.group_kills [--kills N] [--groups N] [--recipe TEXT] [--notices] [--seed N]

After each kill the group is started again, and the next kill follows when it trains. With `--notices`, a rank of
another group gets SIGTERM just before each kill, and that group leaves and is started again too. A pause is the longest
interval between two steps of a surviving group in the 1.5 s after a kill, and while a group joins again. At the end all
ranks must have one consensus.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from statistics import median

from tests.elastic.groups import RANKS, Groups, Rank


def main() -> None:
    """Run the kills, and print the pauses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--recipe", default="LocalSGD(period=4)")
    parser.add_argument("--notices", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    draw = random.Random(given.seed)
    options: dict[str, int] = {"notice": 4} if given.notices else {}
    groups = Groups(given.recipe, given.groups, steps=1 << 30, traced=False, pause=0.02, ends_by_store=True, **options)
    running = list(range(given.groups))
    for number in running:
        groups.until(number, 8)
    pauses, joins = list[float](), list[float]()
    for kill in range(given.kills):
        victim, leaver = draw.sample(running, 2)
        rank, gone = draw.randrange(RANKS), [victim]
        if given.notices:
            groups.signal(leaver, draw.randrange(RANKS))
            gone.append(leaver)
        time.sleep(draw.uniform(0.0, 0.2))  # at any point of a round
        killed = time.time()
        groups.kill(victim, rank)
        running = [each for each in running if each not in gone]
        own = groups.longest(running, killed, lambda end=killed + 1.5: time.time() > end)
        pauses += own
        for process in (process for each in gone for process in groups.groups[each]):  # the other ranks end themselves
            process.process.join(20.0)
            assert not process.process.is_alive(), "a rank of a group that is gone did not end"
        for _ in gone:
            new = groups.start()
            joins += groups.longest(running, time.time(), lambda new=new: groups.step(new) > 0)
            running.append(new)
        load = os.getloadavg()[0]
        print(f"kill {kill + 1}: rank {rank} of group {victim}, pauses {max(own):.2f} s, load {load:.1f}", flush=True)
    groups.store.set("test/end", str(max(groups.step(number) for number in running) + 100))
    ends = groups.finish(seconds=120.0)
    agreed = [rank.agreed if isinstance(rank, Rank) else rank for number in running for rank in ends[number]]
    assert all(isinstance(each, list) and each == agreed[0] for each in agreed), agreed
    print(
        f"{given.kills} kills, {given.groups} groups of {RANKS}: pauses of the other groups, median "
        f"{median(pauses):.2f} s, longest {max(pauses):.2f} s; while a group joins, median {median(joins):.2f} s, "
        f"longest {max(joins):.2f} s; one consensus at the end"
    )


if __name__ == "__main__":
    main()
