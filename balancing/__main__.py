"""python -m balancing: the commands of this package.

  python -m balancing.report DIR            which ranks were slow in a recorded run, with figures
  python -m balancing.whatif DIR            the predicted step time of a recorded or planned run with each balancer
  python -m balancing.layers --from-report DIR     the best pipeline layout for a recorded run
  python -m balancing.experts --from-report DIR    the gain of balanced experts on recorded loads
  python -m balancing.cluster --measure     describe or measure the machines that load balancing plans for
  python -m balancing.doctor                can this machine train, and with which kernels
  python pretrain_gpt.py --help             training, with all flags

Each takes --help. DIR is the directory that --balance-report named in training.
"""

import argparse
import sys

from balancing.command_line import Parser


def main(arguments: list[str] | None = None) -> int:
    """Print the commands. Returns an exit code of `balancing.command_line`."""
    parser = Parser(prog="python -m balancing", add_help=False)
    parser.add_argument("-h", "--help", action="store_true")

    def work(options: argparse.Namespace) -> None:
        print((__doc__ or "").strip())

    return parser.run(work, arguments)


if __name__ == "__main__":
    sys.exit(main())
