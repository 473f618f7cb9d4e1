"""Pretrain a dynamic GPT with load balancing: `pretrain_gpt.py` with five schemes that change layers while they train.

    torchrun --nproc-per-node 4 examples/dynamic_models/pretrain.py --freeze-layers 3 --balance-layers ...

Takes the flags of `pretrain_gpt.py` and those of the schemes: see --help and docs/dynamics.md.
`examples.dynamic_models.extension` describes the model to the trainer.
"""

import sys
from pathlib import Path

# Python puts the script's folder on the path. Its file names are common ones, so the checkout takes its place.
_FOLDER, _NAME = Path(__file__).resolve().parent, Path(__file__).name
sys.path[:] = [str(_FOLDER.parents[1]), *(each for each in sys.path if each != str(_FOLDER))]


def main() -> None:
    from balancing.command_line import explain_in_one_line, print_any_name

    explain_in_one_line(_NAME)
    print_any_name()
    from megatron.balanced.trainer.watchdog.failure import report_failures_once

    with report_failures_once(_NAME):
        from examples.dynamic_models.extension import DynamicModel
        from megatron.balanced.trainer.arguments import parse_arguments

        model = DynamicModel()
        args, config = parse_arguments(extension=model)  # chooses the device, before megatron.core is imported

        from megatron.balanced.trainer.train import train

        train(args, config, extension=model)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # spawned by a rank
    from balancing.process import end_with_parent

    end_with_parent()
