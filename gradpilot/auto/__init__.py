"""Managing every DDP model of a job by one variable of its environment.

    PYTHONPATH="$(python -m gradpilot.auto)" torchrun ... train.py

For jobs whose command cannot be changed either; else ``-m gradpilot.worker_agent`` is plainer. The
folder of this package on ``PYTHONPATH`` makes every interpreter import ``sitecustomize`` from it at
its start. Nothing is installed that acts unasked, as a ``.pth`` file would: without the variable no
line of it runs.
"""
