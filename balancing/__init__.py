"""Load balancing for distributed training: measure what is uneven, plan, and move it.

Layers between pipeline stages (`balancing.layers`), sequences between context-parallel ranks (`balancing.sequences`)
and experts between expert-parallel ranks (`balancing.experts`). Nothing here imports Megatron.
"""

__version__ = "0.1.0"
