"""What skipping reduce steps of a ring saves in time, and what it costs in accuracy.

    python -m bench.skip [--quick] [--output json] [--result FILE] [--part time|accuracy]

Time is measured on emulated hosts, accuracy by trainings on virtual ranks; the two are never
combined to a time to accuracy, which ``bench.tta`` measures in one run.
"""
