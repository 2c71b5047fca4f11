"""Parts of ``bench.efficiency``: tasks, methods, trainings, the sweep and what follows from it."""
