"""python -m balancing.doctor: can this machine train, and with which kernels?"""

import sys

from balancing.doctor.diagnosis import main

if __name__ == "__main__":
    sys.exit(main())
