"""`pretrain_gpt.py` with a death planted in a move of layers. Run by tests/test_layers_checkpoints.py.

python killed_in_move.py RANK ITERATION COUNTS FLAGS...: in the given iteration (from 0) layers move until the stages
have COUNTS of them, such as 3,1; RANK kills itself when it has sent what it gives away.
"""

import os
import signal
import sys
from typing import Any

from moving import move_at

from megatron.balanced import arguments


def _plant() -> None:
    from megatron.balanced import layer_state

    exchange = layer_state.exchange

    def exchange_and_die(transfers: list, *args: Any) -> None:
        exchange(transfers, *args)
        if transfers:
            os.kill(os.getpid(), signal.SIGKILL)

    layer_state.exchange = exchange_and_die  # type: ignore[assignment]


if __name__ == "__main__":
    rank, iteration, counts = sys.argv[1:4]
    del sys.argv[1:4]
    args, config = arguments.parse_arguments()

    from megatron.balanced.train import train

    move_at({int(iteration): tuple((int(count),) for count in counts.split(","))})
    if os.environ["RANK"] == rank:
        _plant()
    train(args, config)
