"""``python -m gradpilot.controller``."""

import sys

from gradpilot.controller.server import main

sys.exit(main())
