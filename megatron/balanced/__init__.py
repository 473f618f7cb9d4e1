"""Load balancing inside Megatron-LM: the wiring of the algorithms in `balancing`, which never imports Megatron.

Each balancer has a folder (`experts`, `sequences`, `layers`), as have the CPU as a device (`cpu`) and the reports of
failures and stalls (`watchdog`). The files of this folder are common to them.
"""
