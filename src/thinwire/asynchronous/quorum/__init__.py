# SPDX-License-Identifier: Apache-2.0
"""Steps that end when enough ranks are ready; late ranks recover afterwards.

- `rules`: for how many ranks to wait, from measured times.
- `messages`: what ranks send each other.
- `coordinator`: a state machine that decides which ranks are members of a step. It holds no tensor and no clock.
- `member`: a state machine of one rank, with the coordinator in it on the rank that decides. It has no clock either.
- `rounds`: a step that a rank has contributed to, and a state that a late one waits for.
- `reductions`: members average their gradients by messages; a state machine as well.
- `participant`: a member with a mailbox, threads and a clock, which the comm's `runtime` provides.
- `all_reduces`: the thread in which all ranks average instead, late ones included.
- `state_transfer`: a rank's parameters, optimizer state and settings as bytes, for late ranks.
- `opening`: a participant for each replica, or one that only counts bytes.
- `log`, `elastic_sampler`: which ranks were members of each step, and data for workers that are sometimes late.

One rank, the coordinator, counts ready gradients in the thread in which its messages arrive, and names the members of
each step. The members average their gradients among themselves. The step is committed when the coordinator knows that
every member holds the mean; until then it can be tried again with other members. A rank that was not a member takes the
state of one that was. Where the coordinator is lost, the run ends with an error on all ranks.
"""
