"""Load balancing for `megatron.core`. The algorithms are in `balancing`; this package connects them to Megatron.

`experts`, `sequences` and `layers` are the balancers. All use `shared`; none imports another. `observe` measures a run.
`loop` adds balancers to any training loop, and `loops` to those of other frameworks. `trainer` is Megatron-LM's own
loop with all balancers. `cpu` runs Megatron-LM on CPUs. `local` has layers that do not need Transformer Engine.
"""
