"""Stand-ins for hardware and packages that a CPU does not have: graphs, buffers, kernels, the memory of a host."""
