"""How long a test waits for what ought to happen at once.

Nothing passes or fails by this number but what never happens: on a machine with thirty times as much to do as it can,
two seconds are a minute.
"""

PATIENCE = 300.0  # seconds
