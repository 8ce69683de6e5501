"""Entry point of `bottega` and `python -m bottega`: handle signals before importing anything else."""

import sys

from bottega.signals import CommandSignals, StopRequested
from bottega.terminal import print_notice


def main() -> int:
    """Run the command line and return its exit code."""
    try:
        with CommandSignals():
            from bottega.cli import main as run_command

            return run_command()
    except StopRequested as stop:
        print_notice(f"bottega: {stop}")
        return stop.code


if __name__ == "__main__":
    sys.exit(main())
