"""A check of this machine: the installed packages, the kernels that will run, the effect of each missing package."""
