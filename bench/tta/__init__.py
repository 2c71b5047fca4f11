"""Time to accuracy: the same training under several methods, on emulated hosts.

    python -m bench.tta --list
    python -m bench.tta --quick [--output json]
    python -m bench.tta --rows 'cnn/c1,100mbit-5ms/bf16,topk,adaptive/0'

A row is one training: a task, a network, a method, a seed. Every rank runs on a host of its own
(``bench.netlab``), every row in a lab of its own, and everything that a method costs is inside its
time: compression, reports to the controller over the same links, decisions, switches. Time and
accuracy are of the same run.

* ``tasks``, ``networks``, ``methods``: what is trained, over what, how; ``matrix``: which of it
* ``job``: what a rank runs; ``carrier``: who carries its gradients; ``checks``: what it verifies
* ``rows``: makes a lab, starts ranks and controller, waits; ``hosts``: their processes
* ``oracle``: the best static option of every phase, from a sweep and the finished static rows
* ``estimate``: how long rows will take
* ``store``: finished rows are kept, so that a matrix can be made in pieces
* ``reached``, ``report``, ``figures``: smoothing, time to a target, verdicts, charts
"""
