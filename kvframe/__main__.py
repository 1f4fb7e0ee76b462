"""The `kvframe` command, and `python -m kvframe`. Most is imported where interrupts are heard."""

from __future__ import annotations

import sys

INTERRUPTED = 130


def main() -> None:
    """Entry point of the `kvframe` command."""
    try:
        from kvframe.cli import app

        app()
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted.\n")
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
