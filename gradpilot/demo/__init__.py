"""The demo: real training on four ranks over an emulated link, against the same run with bf16.

One command starts the ranks, shows what the controller decides while the link goes from fast to
slow to high latency and back, and writes a report. What is emulated is the link alone: data,
gradients, collectives, decisions and clocks are real.

* ``run`` is the command: starts the ranks, prints the table, judges the claims, writes the report;
* ``train`` is what every rank runs, ``wire`` the emulated link, ``data`` and ``model`` what is
  trained;
* ``schedule``, ``records`` and ``result`` are plain values that both sides share.
"""
