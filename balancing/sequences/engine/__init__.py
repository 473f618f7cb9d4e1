"""Attention over a plan: each rank sends keys and values, computes its queries, and merges what it computed.

Glossary
    program          the steps of one rank in one layer: start a transfer group, wait for it, compute a call.
    transfer group   what starts together on all ranks: a collective for gathered keys, messages for a round of rings.
    round, turn      one step of a ring; one part of a gather, whose messages are under way together.
    workspace        rows of keys and values, one a token: the rank's own, then those that it receives.
    run              adjacent tokens of one document on one rank.
    task, piece      a block of queries and the keys that they see, fully or causally; a task inside a kernel's call.
    call             all tasks of a step together, one launch of a kernel.
    route, proxy     a message between nodes is cut into parts, and a proxy sends each part over its own NIC.
"""
