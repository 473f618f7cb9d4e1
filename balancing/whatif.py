"""python -m balancing.whatif: forecast a job's step with and without balancing (`balancing_tools.whatif`)."""

import sys

if __name__ == "__main__":
    from balancing_tools.whatif.command import main

    sys.exit(main())
