"""Load balancing inside Megatron-LM: the wiring of the algorithms in `balancing`, which never imports Megatron.

`experts`, `sequences` and `layers` are the balancers, which stand side by side on `shared`. `observe` measures a run.
`trainer` is Megatron-LM's own loop with all of them, and `cpu` the CPU as a device.
"""
