"""Planners `chunks` (with `dealing`) and `zones` (with `linear_layout`), and what is planned beside them: attention
near a given layout, the groups of a domain, and the micro-batches of a step (`micro_batch_packing`, `slopes`)."""
