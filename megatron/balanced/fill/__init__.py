"""Weight gradients that fill the waits of a pipeline: an option beside the balancers, which none of them names."""
