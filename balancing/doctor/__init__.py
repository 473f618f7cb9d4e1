"""A check of this machine: the packages installed, the kernels that will run, the cost of each missing piece."""
