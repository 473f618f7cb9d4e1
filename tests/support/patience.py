"""The timeout of waits in tests for events that are due at once.

Nothing passes or fails by this number but what never happens: on a machine with thirty times as much to do as it can,
two seconds are a minute.
"""

import signal

PATIENCE = 300.0  # seconds


def heed_interrupts() -> None:
    """Have a process that is about to start heed SIGINT: a shell starts what runs in the background deaf to it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
