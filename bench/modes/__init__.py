"""What a managed dense plan costs a step in every mode of DDP, over loopback and an emulated link.

    python -m bench.modes [--quick] [--output json] [--result FILE]

Two ranks, one thread each. In every mode two copies of the same job take turns in short blocks of
steps: one without gradpilot, one under a dense plan, with a controller in a process of its own
beside rank 0, which gives way to it as an embedded one does. A block's step time is its wall-clock
time over its steps, on the rank that took longest, so steps in which the agent samples or agrees
count in full. A block's ratio is that of its two step times; blocks that follow each other meet the
same machine.

A hook costs a fixed time a bucket, so ratios hold for steps as long as this model's, which are in
the rows; ``bench.overhead`` shows how they grow where steps are shorter. Both copies see the same
data, so that at the end their parameters must be the same bits.

* ``catalog``: the modes; ``models``: what they train
* ``copies``: a copy of a job; ``job``: what every rank runs
* ``measure``: ranks over loopback or in emulated hosts; ``analysis``: rows and verdicts
"""
