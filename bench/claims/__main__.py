"""``python -m bench.claims``; see ``bench.claims.run``."""

from bench.claims.run import main

if __name__ == "__main__":
    raise SystemExit(main())
