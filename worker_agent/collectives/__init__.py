"""Collective algorithms: requests that compressors yield, and schedules that carry them."""
