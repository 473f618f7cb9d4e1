"""The timeout of waits in tests for events that are due at once.

Nothing passes or fails by this number but what never happens: on a machine with thirty times as much to do as it can,
two seconds are a minute.
"""

import signal
from collections.abc import Collection
from typing import Any

PATIENCE = 300.0  # seconds
# Of torchrun: a launcher that stands still for 15 seconds counts as dead by default.
PATIENT_LAUNCHER = (
    f"--rdzv-conf=keep_alive_max_attempt={PATIENCE / 5:.0f},heartbeat_timeout={PATIENCE:.0f},"
    f"close_timeout={PATIENCE:.0f},read_timeout={PATIENCE:.0f}"
)


def heed_interrupts() -> None:
    """Have a process that is about to start heed SIGINT: a shell starts what runs in the background deaf to it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def answers_come_from(ranks: Collection[int]) -> None:
    """On a rank of the pool: when it fails it waits for the answers of these ranks, since no other one answers, and
    then not for long for them to fail as well, since they wait for it."""
    from megatron.balanced.trainer.rendezvous import wait_for
    from megatron.balanced.trainer.watchdog import failure, stall

    def wait(store: Any, keys: list[str], seconds: float, *look: Any, **named: Any) -> bool:
        answering = [key for key in keys if int(key.rpartition("/")[2]) in ranks]
        return wait_for(store, answering, PATIENCE, *look, **named)

    stall.wait_for = wait  # type: ignore[assignment]
    failure._PATIENCE_SECONDS = 5.0
