"""The timeout of waits in tests for events that are due at once.

Nothing passes or fails by this number but what never happens: on a machine with thirty times as much to do as it can,
two seconds are a minute.
"""

import signal

PATIENCE = 300.0  # seconds
# Of torchrun: a launcher that stands still for 15 seconds counts as dead by default.
PATIENT_LAUNCHER = (
    f"--rdzv-conf=keep_alive_max_attempt={PATIENCE / 5:.0f},heartbeat_timeout={PATIENCE:.0f},"
    f"close_timeout={PATIENCE:.0f},read_timeout={PATIENCE:.0f}"
)


def heed_interrupts() -> None:
    """Have a process that is about to start heed SIGINT: a shell starts what runs in the background deaf to it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
