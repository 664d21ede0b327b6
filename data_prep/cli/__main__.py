"""Entry point of `python -m data_prep.cli`, which runs `optimus-data`."""

import sys

from data_prep.cli import main

if __name__ == "__main__":
    sys.exit(main())
