"""Pretrain GPT with Megatron-LM and load balancing. Takes Megatron-LM's own flags and ours: see --help."""

from balancing.command_line import explain_in_one_line, print_any_name
from balancing.process import end_with_parent


def main() -> None:
    print_any_name()
    from megatron.balanced.trainer.watchdog.failure import report_failures_once

    with report_failures_once():
        from megatron.balanced.trainer.arguments import parse_arguments

        args, config = parse_arguments()  # chooses the device, which must happen before megatron.core is imported

        from megatron.balanced.trainer.train import train

        train(args, config)


if __name__ == "__main__":
    explain_in_one_line("pretrain_gpt.py")
    main()
elif __name__ == "__mp_main__":  # spawned by a rank
    end_with_parent()
