"""python -m balancing.experts: the gain of balanced experts, from recorded loads (`balancing_tools.experts`)."""

import sys

if __name__ == "__main__":
    from balancing_tools.experts import main

    sys.exit(main())
