# SPDX-License-Identifier: Apache-2.0
"""Steps that end when enough ranks are ready; late ranks recover afterwards.

- `rules`: decides for how many ranks to wait, from measured times.
- `messages`: the messages between ranks.
- `coordinator`: a state machine that decides which ranks are members of a step. It holds no tensor and no clock.
- `member`: a state machine of one rank. On the deciding rank it contains the coordinator. It has no clock either.
- `rounds`: a step that a rank has contributed to, and a state that a late rank waits for.
- `reductions`: a state machine in which members average their gradients by messages.
- `participant`: a member with a mailbox, threads and a clock, which the comm's `runtime` provides.
- `state_transfer`: a rank's parameters, optimizer state and settings as bytes, for late ranks.
- `opening`: creates a participant for each replica, or one that only counts bytes.
- `log`, `elastic_sampler`: the members of each step, and data for workers that are sometimes late.

One rank, the coordinator, counts ready gradients in the thread that receives its messages, and selects the members of
each step. The members average their gradients among themselves. The step is committed when the coordinator knows that
every member has the mean; until then it can be retried with other members. A rank that was not a member copies the
state of one that was. If the coordinator is lost, the run ends with an error on all ranks.
"""
