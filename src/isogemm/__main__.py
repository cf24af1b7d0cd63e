import sys

from isogemm.cli import main

if __name__ == "__main__":
    sys.exit(main())
