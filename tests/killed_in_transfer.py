"""`pretrain_gpt.py` with a death planted in the transfers of replicas. Run by tests/test_experts_faults.py.

python killed_in_transfer.py METHOD ITERATION RANK FLAGS...: the rank kills itself in the given iteration (from 0),
right after it has started to move weights (METHOD prefetch) or gradients (_start_reduction) of a layer with replicas.
"""

import functools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from balancing.experts.apply import ReplicaSlots
from pretrain_gpt import main


def _plant(method: str, iteration: int) -> None:
    begin_step, transfer = ReplicaSlots.begin_step, getattr(ReplicaSlots, method)
    iterations = -1

    def counted(original: Callable) -> Callable:
        @functools.wraps(original)
        def begin(*args: Any, **kwargs: Any) -> Any:
            nonlocal iterations
            iterations += 1
            return original(*args, **kwargs)

        return begin

    @functools.wraps(transfer)
    def transfer_and_die(slots: ReplicaSlots, layer: int) -> None:
        transfer(slots, layer)
        if iterations >= iteration and 0 <= layer < len(slots.homes) and slots.is_used(layer):
            os.kill(os.getpid(), signal.SIGKILL)

    ReplicaSlots.begin_step = counted(begin_step)  # type: ignore[method-assign]
    setattr(ReplicaSlots, method, transfer_and_die)


if __name__ == "__main__":
    method, iteration, rank = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    del sys.argv[1:4]
    if os.environ["RANK"] == rank:
        _plant(method, iteration)
    main()
