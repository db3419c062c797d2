# SPDX-License-Identifier: Apache-2.0
"""The race: recipes, PyTorch's own methods and other libraries on the same work over the same thin links.

    python -m benchmarks.race next              the next run that is missing; --part, --only
    python -m benchmarks.race all               everything that is missing, in this order; hours
    python -m benchmarks.race left              what is missing, and how long it takes
    python -m benchmarks.race peers             make the environments of the other libraries, in the cache folder
    python -m benchmarks.race table             what the results say; plot draws them, page writes docs/race.md
                                                and the README's table

A curve takes two to six minutes on two cores, and a timed run one to three: `left` says how long is left.

The rule, which was written before any run, and is not changed:

- Everyone trains the same model from the same parameters, on the same batches in the same order: the GPT of 6 M
  parameters on `text`, 2 sequences a worker and step, AdamW with 20 steps of warm-up and a constant rate.
- Rates are tuned at 4 workers with seed 100, apart from those that are judged: each racer has the same three, multiples
  of the task's own; one with an outer optimizer has three of that one's rate, at the inner rate that is best for
  LocalSGD of the same period. The one with the lowest held-out loss at the end is taken.
- The budget is 240 steps. The target is the mean of the last three held-out losses of DDP, by seed.
- Steps to the target are those of the first evaluation from which the mean of three is no more than it, within twice
  the budget. No method here depends on timing, so curves are computed once per seed, and not per link.
- Seconds of a step are the median over blocks of whole periods, of at least 30 steps after 5, as the slowest rank's
  clock has them. Seconds to the target are steps times seconds, the median over seeds. Five of
  these products are checked by whole runs, which are told beside them.
- The wall is the step of `Local()` on the same link, in the same hour.

Each result is a line of benchmarks/results/race, written as soon as it is there, and is not repeated.

Added before any run, where the rule was silent:

- The outer rates are 0.4, 0.7 and 1. Tuning runs take 96 steps with an evaluation every 24; the mean of the last three
  decides.
- `AllReduce()` takes the rates and curves of DDP, since both average gradients at every step; its times are its own.
  `ddp+bf16` takes DDP's rates, and LocalSGD of 4 bits LocalSGD's; their curves are their own.
- Training losses have a target too: the mean over the last 30 steps of DDP's budget, reached at the first evaluation
  whose last 30 steps have a mean no more than it. Losses are means over the workers.
- A curve ends once the budget is spent and both targets are reached, at the latest after twice the budget.
- Loss at equal steps is that after the budget; at equal bytes, that when an eighth of the bytes of DDP's budget has
  been sent; at equal seconds, that after as long as the budget takes at the wall. Each is the mean of the last three
  evaluations until then, or of as many as there are.
- Exposed communication is the step less the wall's. Payload is counted over the timed blocks. Bytes on the wire are
  those of the kernel's counters of each worker's interface, memory is the peak of any worker's process, CPU seconds are
  those of a worker's process, all over a timed run.
- At 20 Mbit, where a racer sends all gradients at every step, 8 steps after 2 are timed, in blocks of two: each takes 8
  seconds or more.
- The five checked products, seed 0: the racer of ours that is first on 100 Mbit, 20 Mbit, 1 Gbit and 100 Mbit with 50
  ms, and the peer that is first on 100 Mbit, with 4 workers. Each is run for as many steps as its curve took.
- Order: 4 workers, the racers of the headline, seed 0: racer by racer its rates and its curve; then their times by
  link. Then the checks, the other seeds, 8 workers, the ResNet, and the other racers. What has not been run is "not
  run" in every table.

Added with the other libraries, before any of their runs:

- Local SGD of Accelerate and of torchft computes what `LocalSGD(period=8)` does, and torchft's DiLoCo what
  `DiLoCo(period=32)` does: the held-out losses were equal to the last digit in trials of 16 steps with a period of 8.
  They take these rates and curves; their times are their own.
- hivemind averages every 32 steps, in half precision, and waits for it; it takes the rates of `LocalSGD(period=32)`.
  fairscale's SlowMo averages every 8 steps, with the values that its documentation recommends otherwise, and takes the
  rates of `LocalSGD(period=8)`; its SGP takes DDP's. Their curves are their own.
- 1-bit Adam compresses after 48 steps, a fifth of the budget, and torch's PowerSGD after ten.
- On 100 Mbit with 4 workers a ResNet of 20 layers is trained too, on CIFAR-10, with one seed: 64 images a worker and
  step, SGD with momentum, the task's rate, and otherwise by the same rule. Its racers are DDP, PowerSGD,
  OverlapLocalSGD in 4 bits, post-local SGD, and `AllReduce` as such and with PowerSGD, chosen before any run.
- What could not be run is listed with the reason in `benchmarks/peers/__init__.py`.

Added when the code was read against what was asked, before any run:

- The rates are multiples of the task's own for AdamW, for every racer: 0.15, 0.3 and 0.6 of it with the GPT, which
  learns fastest near a third of it, and 0.5, 1 and 2 with the ResNet. A chosen rate at an edge is marked.
- The first steps of torch's PowerSGD and of 1-bit Adam, which send everything, take as long as DDP's or AllReduce's,
  and are in the product; later steps are those of a form that has two such steps.
- Curves are those of 4 workers. With 8 the headline's steps are timed, and there are no seconds to a target.
- At least two periods are timed, and one step more, in which what is in flight at the end is waited for.
- Losses at equal bytes and seconds are those of the budget at the latest. A curve that fails is told, and counts for
  nothing. A peer is ahead if it takes less than 0.98 of the time.
- torchft's DiLoCo is also raced with two fragments and a delay, as `DiLoCo` is here, at its rates; post-local SGD,
  which averages from the first step on, takes those of `LocalSGD(period=8)`. Ours has two more racers: `DiLoCo` in 4
  bits with rounds of 12 steps, and with rounds of 8 and a delay. Their outer rates are tuned at the inner rate that is
  best for `LocalSGD(period=8)`.
- The headline has the racers that a bar can depend on, with three seeds: DDP, PowerSGD of rank 4, post-local SGD and
  LocalSGD, torchft's DiLoCo with fragments, hivemind, five of ours, and `AllReduce()`.

Made shorter before any run, so that the whole takes fewer hours:

- Two sequences a worker and step, not four. Three rates each, not four, and tuning runs of 96 steps, not 120.
- `OverlapLocalSGD(period=8)` takes the rates of the same in 4 bits, and is not in the headline.
- Racers outside of the headline race on 100 Mbit with 4 workers alone, where they are timed in one row with a wall of
  their own; Accelerate's and torchft's local SGD are among them.

Changed after steps without a limit had been timed once:

- Without a limit DDP and `AllReduce()` differ by less than this machine's clock does from one minute to the next:
  timed minutes apart, DDP's time over AllReduce's was 0.77, and 0.90 and 1.14 when both were timed again. So that bar
  is judged by steps in turns in the same processes, four of each in a round, 16 rounds, the median of the rounds'
  ratios. By the rule before it was not met. The table has the times of runs apart, as for all others.

Added after the planner had been asked, before any run of it:

- At 1 Gbit `thinwire plan` recommended `PushSum(staleness=1)`, which was not a racer: it races there, outside of the
  headline, at the rates of `PushSum()`.
- Since the planner counts that messages need the processor too, it recommends `AllReduce(codec=Bf16())` there, which
  races in the same way, at the rates of DDP.

Changed after the timed form of 1-bit Adam, which compresses after two steps, had become NaN:

- Forms that are only timed have a thousandth of the task's rate.
"""
