"""python -m balancing.doctor: can this machine train, and with which kernels? (`balancing_tools.doctor`)"""

import sys

if __name__ == "__main__":
    from balancing_tools.doctor import main

    sys.exit(main())
