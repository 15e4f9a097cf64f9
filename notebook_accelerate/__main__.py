# PYTHON_ARGCOMPLETE_OK
"""The command line, ``python -m notebook_accelerate``."""

from __future__ import annotations

import sys

from notebook_accelerate.commands.accelerate_cli import main

if __name__ == "__main__":
    sys.exit(main())
