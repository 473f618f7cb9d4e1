"""All three balancers in one run on the emulated cluster: one workload that is uneven in all three ways."""
