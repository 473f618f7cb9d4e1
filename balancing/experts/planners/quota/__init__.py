"""The planner `quota`. `planner` begins; the other files propose replicas or estimate costs for it."""
