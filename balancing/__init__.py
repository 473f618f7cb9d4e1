"""Load balancing for distributed training: measure what is uneven, plan, and move it.

Layers between pipeline stages (`balancing.layers`), sequences between context-parallel ranks (`balancing.sequences`)
and experts between expert-parallel ranks (`balancing.experts`). Nothing here imports Megatron.
"""

import sys

from balancing.command_line import explain_in_one_line

__version__ = "0.1.0"

if sys.argv[:1] == ["-m"]:  # while Python looks for the module of python -m balancing.NAME
    named = sys.orig_argv.index("-m") + 1 if "-m" in sys.orig_argv else 0
    explain_in_one_line(f"python -m {sys.orig_argv[named]}" if named else "python")
