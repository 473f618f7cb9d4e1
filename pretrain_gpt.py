"""Pretrain GPT with Megatron-LM and load balancing. Takes Megatron-LM's own flags and ours: see --help."""

from balancing.command_line import print_any_name
from megatron.balanced.arguments import parse_arguments
from megatron.balanced.watchdog.heartbeat import report_failures_once


def main() -> None:
    print_any_name()
    with report_failures_once():
        args, config = parse_arguments()  # chooses the device, which must happen before megatron.core is imported

        from megatron.balanced.train import train

        train(args, config)


if __name__ == "__main__":
    main()
