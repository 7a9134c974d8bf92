"""``python -m palimpsest_loader``."""

import sys

from palimpsest_loader.cli import main

sys.exit(main())
