"""Benchmarks; each writes ``bench/results/NAME.json`` (see ``results_file``)."""
