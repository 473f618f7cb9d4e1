"""The acceptance on GPUs, as tests: each part runs on the CPU device too, as far as that goes.

`scripts/gpu_check.sh` runs the parts in their order on a machine with GPUs and writes down what came of them.
"""
