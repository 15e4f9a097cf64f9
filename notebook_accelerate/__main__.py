# PYTHON_ARGCOMPLETE_OK
"""``python -m notebook_accelerate``: the command line."""

from __future__ import annotations

import sys

from notebook_accelerate.commands.accelerate_cli import main

if __name__ == "__main__":
    sys.exit(main())
