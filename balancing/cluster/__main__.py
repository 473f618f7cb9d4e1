"""python -m balancing.cluster: print a preset, or measure this machine (`balancing_tools.cluster`)."""

import sys

if __name__ == "__main__":
    from balancing_tools.cluster import main

    sys.exit(main())
