"""Steps of compiled programs on simulated links: what the schedule exposes, without processes and their noise.

    python -m benchmarks.sequences.simulated [--cluster "2 x 8"|"4 x 4"] [--model NAME] [--documents NAME ...]

One layer, forward and backward, of the batches and machines of `benchmarks.sequences.emulated`, as fast as modelled.
Every rank runs the program that the engine would (`compile_rank`): it starts transfer groups, waits for them, and
computes as long as its whole tiles take. A message moves once both ends have started its group. Messages under way
share links fairly: a network card on either side, or the links of two ranks of a node. Host and launches take no time.
"routed": all cards of a node are one. Changes of layout and collectives of peers (`benchmarks.sequences.peers`) take
what the cost model says; peers are not routed. "bound": no plan with equal tokens is faster
(`benchmarks.sequences.bound`), modelled with as much exposed as the model says of gathering, simulated with nothing
exposed as long as compute lasts. Takes seconds on one core.
"""

import argparse
import heapq
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from balancing.cluster import Cluster
from balancing.sequences import AttentionShape, SequencePlan, limit_seconds, plan_sequences, step_cost
from balancing.sequences.cost import hidden_seconds, kv_bytes, linear_seconds
from balancing.sequences.engine.compiler import compile_rank
from balancing.sequences.engine.program import Compute, Program, Start, TransferGroup
from balancing.sequences.traffic import remap_traffic, traffic_seconds
from benchmarks.sequences.bound import bound_seconds
from benchmarks.sequences.emulated_workload import CLUSTERS, SHAPES, Scale, tile_pairs
from benchmarks.sequences.lengths import draw_batch
from benchmarks.sequences.peers import all_gather_seconds, heads_and_ring

__all__ = ["simulated_seconds"]

_BACKWARD = 2.5  # of attention's compute over its forward
_Link = tuple[str, int]
_Message = tuple[TransferGroup, int, int]  # of a group, from one rank to another


def simulated_seconds(
    plan: SequencePlan, cluster: Cluster, shape: AttentionShape, *, routed: bool, peer: bool = False
) -> float:
    """Seconds of one layer, forward and backward, of the slowest rank. routed: whether a node's cards act as one.
    peer: whether gradients on rings have as many bytes as keys inside nodes, too."""
    plan = replace(plan, cluster=cluster, shape=shape)
    programs = [compile_rank(plan, rank, routing="off").program for rank in range(plan.ranks)]
    linear = [linear_seconds(int(tokens), cluster, shape) / shape.layers for tokens in plan.linear_tokens]
    clocks = [seconds / 3 for seconds in linear]
    for backward in (False, True):
        clocks = _Pass(programs, cluster, shape, clocks, backward=backward, routed=routed, peer=peer).run()
    remap = 0.0
    if plan.remapped:
        numbers = (shape.heads + shape.kv_heads) * (shape.head_size + shape.value_size)
        remap = 2 * traffic_seconds(remap_traffic(plan), 2 * numbers, cluster, routed or None)
    return max(clock + seconds * 2 / 3 for clock, seconds in zip(clocks, linear, strict=True)) + remap


class _Pass:
    """One direction of all ranks. clocks: when each rank begins."""

    def __init__(
        self,
        programs: Sequence[Program],
        cluster: Cluster,
        shape: AttentionShape,
        clocks: Sequence[float],
        *,
        backward: bool,
        routed: bool,
        peer: bool,
    ) -> None:
        self.programs, self.cluster, self.routed, self.peer = programs, cluster, routed, peer
        self.steps = [program.backward if backward else program.forward for program in programs]
        self.pair_seconds = hidden_seconds(1, cluster, shape) * (_BACKWARD if backward else 1)
        self.token_bytes = kv_bytes(shape)
        self.clocks, self.at = list(clocks), [0] * len(programs)
        self.moving: dict[_Message, float] = {}  # bytes that are left
        self.posted: set[_Message] = set()  # by one end
        self.left: dict[tuple[int, TransferGroup], int] = {}  # messages of a group that a rank has started
        self.waiting: dict[int, TransferGroup] = {}
        self.chains: dict[int, list[TransferGroup]] = {}
        self.ready = [(clock, rank) for rank, clock in enumerate(clocks)]
        heapq.heapify(self.ready)

    def run(self) -> list[float]:
        now = 0.0
        while self.ready or self.moving:
            rates = self._rates()
            ends = {message: now + left / rates[message] for message, left in self.moving.items()}
            upcoming = min(ends.values(), default=np.inf)
            until = min(upcoming, self.ready[0][0] if self.ready else np.inf)
            for message in self.moving:
                self.moving[message] -= rates[message] * (until - now)
            now = until
            if self.ready and self.ready[0][0] <= upcoming:
                self._advance(heapq.heappop(self.ready)[1], now)
                continue
            for message in [message for message, end in ends.items() if end <= now]:
                del self.moving[message]
                group, *ranks = message
                for rank in ranks:
                    self.left[rank, group] -= 1
                    self._came(rank, group, now)
        assert not self.waiting, f"ranks {sorted(self.waiting)} wait in a circle"
        return self.clocks

    def _advance(self, rank: int, now: float) -> None:
        """Run the steps of a rank until it computes or waits."""
        program, steps = self.programs[rank], self.steps[rank]
        self.clocks[rank] = now
        while self.at[rank] < len(steps):
            step = steps[self.at[rank]]
            self.at[rank] += 1
            if isinstance(step, Compute):
                if step.call is not None:
                    seconds = tile_pairs(program.calls[step.call].pieces) * self.pair_seconds
                    heapq.heappush(self.ready, (now + seconds, rank))
                    return
            elif isinstance(step, Start):
                if step.group not in program.chained:
                    self._post(rank, step.group, now)
                elif rank not in self.chains:
                    self.chains[rank] = list(program.chained)
                    self._post(rank, self.chains[rank][0], now)
            elif self.left.get((rank, step.group)) != 0:
                self.waiting[rank] = step.group
                return

    def _post(self, rank: int, group: TransferGroup, now: float) -> None:
        messages = self.programs[rank].messages[group]
        pairs = [(rank, one.peer, one.tokens) for one in messages.sends]
        pairs += [(one.peer, rank, one.tokens) for one in messages.receives]
        self.left[rank, group] = len(pairs)
        for source, target, tokens in pairs:
            message = group, source, target
            if message in self.posted:
                self.posted.remove(message)
                wide = not self.peer and group.kind == "ring return" and self.cluster.same_node(source, target)
                self.moving[message] = float(tokens * self.token_bytes * (2 if wide else 1))
            else:
                self.posted.add(message)
        self._came(rank, group, now)

    def _came(self, rank: int, group: TransferGroup, now: float) -> None:
        """Go on where the last message of a group has come."""
        if self.left[rank, group]:
            return
        if (chain := self.chains.get(rank)) and chain[0] == group:
            chain.pop(0)
            if chain:
                self._post(rank, chain[0], now)
        if self.waiting.get(rank) == group:
            del self.waiting[rank]
            self._advance(rank, now)

    def _rates(self) -> dict[_Message, float]:
        """Bytes/s of each message: links are filled one after another, the one with the smallest shares first."""
        links = {message: self._links(message) for message in self.moving}
        users: dict[_Link, set[_Message]] = defaultdict(set)
        for message, both in links.items():
            for link in both:
                users[link].add(message)
        room = {link: self._capacity(link) for link in users}
        rates: dict[_Message, float] = {}
        while len(rates) < len(links):
            tightest = min((link for link in users if users[link]), key=lambda link: room[link] / len(users[link]))
            share = room[tightest] / len(users[tightest])
            for message in list(users[tightest]):
                rates[message] = share
                for link in links[message]:
                    room[link] -= share
                    users[link].remove(message)
        return rates

    def _links(self, message: _Message) -> tuple[_Link, _Link]:
        _, source, target = message
        if self.cluster.same_node(source, target):
            return ("out of rank", source), ("into rank", target)
        card = self.cluster.node if self.routed else self.cluster.nic
        return ("out of card", card(source)), ("into card", card(target))

    def _capacity(self, link: _Link) -> float:
        if link[0].endswith("rank"):
            return self.cluster.intra_node_bandwidth
        return self.cluster.nic_bandwidth * (self.cluster.nics_per_node if self.routed else 1)


def _rows(
    lengths: Sequence[int], cluster: Cluster, shape: AttentionShape
) -> Iterator[tuple[str, tuple[float, float, float]]]:
    """Seconds of one layer by method: modelled, simulated, and simulated routed."""
    layers = shape.layers
    ring = plan_sequences(lengths, cluster, shape=shape, method="ring")
    modelled = step_cost(ring, cluster, shape, routed=False, gradient_width=1.0).total / layers
    simulated = simulated_seconds(ring, cluster, shape, routed=False, peer=True)
    yield "ring", (modelled, simulated, simulated)
    gathered = all_gather_seconds(lengths, cluster, shape, ring) / layers
    yield "all-gather", (gathered, gathered, gathered)
    both = heads_and_ring(lengths, cluster, shape)
    simulated = simulated_seconds(both.plan, both.cluster, shape, routed=True, peer=True) + both.exchange / layers
    yield "a2a+p2p", (both.seconds(shape) / layers, simulated, simulated)
    for method in ("zones", "chunks"):
        plan = plan_sequences(lengths, cluster, shape=shape, method=method)
        direct, routed = (simulated_seconds(plan, cluster, shape, routed=routed) for routed in (False, True))
        yield method, (step_cost(plan, cluster, shape).total / layers, direct, routed)
    exposed, hidden = (bound_seconds(lengths, cluster, shape, exposes=exposes) / layers for exposes in (True, False))
    yield "bound", (exposed, hidden, hidden)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sequences.simulated", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--cluster", choices=list(CLUSTERS), help="only this one; both by default")
    parser.add_argument("--model", choices=list(SHAPES), help="only this one; both by default")
    parser.add_argument("--documents", nargs="+", default=["prolong", "packed", "mix"], metavar="NAME")
    options = parser.parse_args(arguments)
    print(f"{'step / limit':32}{'method':>11}{'model':>11}{'simulated':>11}{'routed':>11}")
    for name in [options.cluster] if options.cluster else CLUSTERS:
        cluster = Scale(*CLUSTERS[name], 1.0).cluster
        for model in [options.model] if options.model else SHAPES:
            for documents in options.documents:
                lengths = draw_batch(documents, 4096 * cluster.world_size, np.random.default_rng(0))
                limit = limit_seconds(lengths, cluster, SHAPES[model])
                for method, seconds in _rows(lengths, cluster, SHAPES[model]):
                    case, layer = f"{name}, {model}, {documents}", limit / SHAPES[model].layers
                    print(f"{case:32}{method:>11}" + "".join(f"{one / layer:11.3f}" for one in seconds), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
