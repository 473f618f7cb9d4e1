"""python -m balancing.layers: the best pipeline layout for a recorded run (`balancing_tools.layers`)."""

import sys

if __name__ == "__main__":
    from balancing_tools.layers import main

    sys.exit(main())
