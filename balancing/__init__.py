"""Load balancing for distributed training. Each balancer measures loads, plans a better distribution and applies it.

`balancing.layers` moves layers between pipeline stages. `balancing.sequences` distributes sequences over
context-parallel ranks. `balancing.experts` copies hot experts to other expert-parallel ranks. Nothing here imports
Megatron.
"""

import sys

from balancing.command_line import explain_in_one_line

__version__ = "0.1.0"

if sys.argv[:1] == ["-m"]:  # Python sets this while it looks for the module of python -m balancing.NAME
    named = sys.orig_argv.index("-m") + 1 if "-m" in sys.orig_argv else 0
    explain_in_one_line(f"python -m {sys.orig_argv[named]}" if named else "python")
