"""``python -m gradpilot.demo``."""

from __future__ import annotations

import sys

from gradpilot.demo.run import main

sys.exit(main(sys.argv[1:]))
