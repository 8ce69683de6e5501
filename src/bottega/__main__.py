"""`python -m bottega`, which is how torchrun and accelerate start a rank."""

import sys

from bottega.cli import main

if __name__ == "__main__":
    sys.exit(main())
