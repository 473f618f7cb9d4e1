"""python -m balancing.cluster: print a preset, or measure this machine (see `balancing.cluster.measure`)."""

import sys

from balancing.cluster.measure import main

if __name__ == "__main__":
    sys.exit(main())
