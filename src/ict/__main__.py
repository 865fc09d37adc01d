"""`python -m ict`."""

import sys

from ict.frontpage import main

if __name__ == "__main__":
    sys.exit(main())
