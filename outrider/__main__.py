"""``python -m outrider`` is the command ``outrider``."""

import sys

from outrider.cli.main import main

sys.exit(main())
