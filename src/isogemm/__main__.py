import sys

from isogemm_cli import main

if __name__ == "__main__":
    sys.exit(main())
