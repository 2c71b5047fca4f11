"""The sections of docs/benchmarks.md, a module each, with a ``SECTION``."""
