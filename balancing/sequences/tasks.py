"""What one rank does in attention: which queries meet which keys, and who sends whose keys and values to whom, when.

A plan says where tokens are. From it follows, for each rank and without asking anybody, a program: a list of steps that
start transfers, wait for them, and compute (Zeppelin, arXiv 2509.21841, section 4: the attention engine).

- A "ring" sequence lies on G ranks. In round t a rank computes with the keys and values of the t-th rank before it and
  hands them on meanwhile. In the backward pass the gradients of keys and values travel behind them and end at home.
- A "gather" sequence: a rank receives all keys before its last query and computes each run of queries at once, so
  nothing is merged. Gradients go back to the owners.
- Everything whose keys are on the rank itself is local, and fills the time in which others are under way.

Sums have the same order in every run: of gradients along the ring, or by the rank that returns them.

Keys and values stand in one workspace of rows, a token each: the rank's own tokens first, sorted by sequence and
position, then the gathered prefixes, then two buffers for rings over nodes and two for rings inside the node.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from balancing.cluster import Cluster
from balancing.sequences.layout import SequencePlan, Shard
from balancing.sequences.schedule import Work, backward_steps, forward_steps
from balancing.sequences.steps import Exchange, Message, Program, Rows, Stage, Task, joined

__all__ = ["by_sequence", "make_program", "reach"]


def make_program(
    plan: SequencePlan, rank: int, cluster: Cluster | None = None, *, relays: Iterable[Stage] = ()
) -> Program:
    """What `rank` does. Without a cluster all ranks are taken to be on one node.

    relays: stages in which the rank takes part even where it has nothing to send or receive itself, because it hands on
    what others send. Raises ValueError for a rank outside the plan or a cluster that is smaller than the plan.
    """
    return _Builder(plan, rank, cluster, relays).program()


def by_sequence(shards: Iterable[Shard]) -> dict[int, list[Shard]]:
    """The shards of each sequence, by position."""
    found: dict[int, list[Shard]] = defaultdict(list)
    for shard in sorted(shards):
        found[shard.sequence].append(shard)
    return found


class _Rounds:
    """The rings of one class that a rank is in: tasks and messages of each round, and where blocks are put."""

    def __init__(self) -> None:
        self.blocks: dict[int, list[tuple[int, int, int]]] = defaultdict(list)  # round -> (from, sequence, source)
        self.row: dict[tuple[int, int], int] = {}  # (round, sequence) -> first row
        self.region: dict[int, Rows] = {}  # round -> rows of all its blocks
        self.tasks: dict[int, list[Task]] = defaultdict(list)
        self.rings: list[tuple[int, int, tuple[int, ...]]] = []  # (sequence, place, ring)

    @property
    def last(self) -> int:
        """The last round in which blocks come."""
        return max((len(ring) - 1 for _, _, ring in self.rings), default=0)


class _Builder:
    def __init__(self, plan: SequencePlan, rank: int, cluster: Cluster | None, relays: Iterable[Stage]) -> None:
        if not 0 <= rank < plan.ranks:
            raise ValueError(f"rank {rank} is not in a plan of {plan.ranks} ranks (0 to {plan.ranks - 1})")
        if cluster is not None and cluster.world_size < plan.ranks:
            raise ValueError(f"a cluster of {cluster.world_size} ranks is too small for a plan of {plan.ranks} ranks")
        self.plan, self.rank = plan, rank
        self.node = [0 if cluster is None else cluster.node(r) for r in range(plan.ranks)]
        self.held = tuple(sorted(plan.shards(rank)))
        self.row: dict[tuple[int, int], int] = {}  # (sequence, start of an own shard) -> own row
        row = 0
        for shard in self.held:
            self.row[shard[:2]] = row
            row += shard.tokens
        self.rows = row
        own = {shard.sequence for shard in self.held}
        self.shards = by_sequence(shard for shard in plan.attention if shard.sequence in own)
        # Where the rank sends or receives itself, its own exchange takes the place of this one.
        self.exchanges = {stage: Exchange((), (), adds=stage.kind in ("return", "ring return")) for stage in relays}
        self.local: list[Task] = []
        self.gathered: dict[bool, list[Task]] = {True: [], False: []}
        self.rounds = {True: _Rounds(), False: _Rounds()}  # over nodes, and inside

    def program(self) -> Program:
        gathers: list[int] = []
        for sequence in self.shards:
            exchange = self.plan.exchange[sequence]
            ring = self.plan.ring(sequence)
            if exchange == "ring" and len(ring) > 1:
                inter = len({self.node[r] for r in ring}) > 1
                self.rounds[inter].rings.append((sequence, ring.index(self.rank), ring))
            elif exchange == "gather" and len(ring) > 1:
                gathers.append(sequence)
            else:
                (own,) = _runs(self.shards[sequence])
                rows = self._own_rows(sequence, *own)
                self.local.append(Task(rows, rows, causal=True))
        self._gather(gathers)
        for inter in (True, False):
            self._ring(inter)
        work = Work(
            self.exchanges,
            self.local,
            self.gathered,
            {inter: rounds.tasks for inter, rounds in self.rounds.items()},
            {inter: rounds.region for inter, rounds in self.rounds.items()},
        )
        return Program(self.rank, self.held, self.rows, self.exchanges, forward_steps(work), backward_steps(work))

    def _own_rows(self, sequence: int, start: int, stop: int) -> Rows:
        """Own rows of tokens that lie in one own shard or in several that stand behind one another."""
        first = next(s for s in self.shards[sequence] if s.start <= start < s.stop)
        row = self.row[first[:2]] + start - first.start
        return row, row + stop - start

    # Gathered prefixes.

    def _gather(self, sequences: Sequence[int]) -> None:
        sends: dict[bool, dict[int, list[Rows]]] = {True: defaultdict(list), False: defaultdict(list)}
        receives: dict[bool, dict[int, list[Rows]]] = {True: defaultdict(list), False: defaultdict(list)}
        for sequence in sequences:
            shards = self.shards[sequence]
            own = [shard for shard in shards if shard.rank == self.rank]
            needed, first = reach(shards), self._first_tokens(shards)
            for target in sorted(needed):
                inter = self._over_nodes(first, target, needed[target])
                for shard in own:
                    if shard.start < needed[target]:
                        stop = min(shard.stop, needed[target])
                        sends[inter][target].append(self._own_rows(sequence, shard.start, stop))
            runs = _runs(own)
            if runs[0][0] == 0:
                rows = self._own_rows(sequence, *runs[0])
                self.local.append(Task(rows, rows, causal=True))
            if self.rank not in needed:
                continue
            inter = self._over_nodes(first, self.rank, needed[self.rank])
            for shard in shards:
                if shard.start < needed[self.rank]:
                    stop = min(shard.stop, needed[self.rank])
                    receives[inter][shard.rank].append((self.rows + shard.start, self.rows + stop))
            for start, stop in runs:
                if start:
                    keys = (self.rows, self.rows + stop)
                    self.gathered[inter].append(Task(self._own_rows(sequence, start, stop), keys, causal=True))
            self.rows += needed[self.rank]
        for inter in (True, False):
            if sends[inter] or receives[inter]:
                there, back = _messages(sends[inter]), _messages(receives[inter])
                self.exchanges[Stage("gather", inter)] = Exchange(there, back)
                self.exchanges[Stage("return", inter)] = Exchange(back, there, adds=True)

    def _first_tokens(self, shards: Sequence[Shard]) -> dict[int, int]:
        """Node -> the first token of a sequence on it."""
        first: dict[int, int] = {}
        for shard in shards:
            first.setdefault(self.node[shard.rank], shard.start)
        return first

    def _over_nodes(self, first: dict[int, int], target: int, needed: int) -> bool:
        return any(node != self.node[target] and start < needed for node, start in first.items())

    # Rings.

    def _ring(self, inter: bool) -> None:
        rounds = self.rounds[inter]
        for sequence, place, ring in rounds.rings:
            for turn in range(1, len(ring)):
                rounds.blocks[turn].append((ring[place - 1], sequence, ring[place - turn]))
        for turn, blocks in rounds.blocks.items():
            row = 0
            for _, sequence, source in sorted(blocks):
                rounds.row[turn, sequence] = row
                row += self._tokens(sequence, source)
            rounds.region[turn] = (0, row)
        for parity in (0, 1):
            turns = [turn for turn in rounds.region if turn % 2 == parity]
            for turn in turns:
                rounds.region[turn] = (self.rows, self.rows + rounds.region[turn][1])
            for turn, sequence in rounds.row:
                if turn % 2 == parity:
                    rounds.row[turn, sequence] += self.rows
            self.rows = max((rounds.region[turn][1] for turn in turns), default=self.rows)
        for sequence, place, ring in rounds.rings:
            for turn in range(len(ring)):
                self._tasks(rounds, sequence, turn, ring[place - turn])
        for turn in range(1, rounds.last + 1):
            self._ring_exchange(inter, turn)

    def _tokens(self, sequence: int, rank: int) -> int:
        return sum(shard.tokens for shard in self.shards[sequence] if shard.rank == rank)

    def _tasks(self, rounds: _Rounds, sequence: int, turn: int, source: int) -> None:
        """Each run of own queries sees a prefix of the block, because the block is sorted by position."""
        first, _ = self._block(rounds, sequence, turn, source)
        keys = _runs(shard for shard in self.shards[sequence] if shard.rank == source)
        tasks = rounds.tasks[turn]
        for start, stop in _runs(shard for shard in self.shards[sequence] if shard.rank == self.rank):
            seen = sum(key_stop - key_start for key_start, key_stop in keys if key_start < stop)
            queries = self._own_rows(sequence, start, stop)
            task = Task(queries, (first, first + seen), causal=turn == 0, merges=turn > 0)
            before = tasks[-1] if tasks else None
            if not seen:
                continue
            if before is not None and not task.causal and before.keys == task.keys and before.queries[1] == queries[0]:
                tasks[-1] = before._replace(queries=(before.queries[0], queries[1]))
            else:
                tasks.append(task)

    def _block(self, rounds: _Rounds, sequence: int, turn: int, source: int) -> Rows:
        if source == self.rank:
            held = [shard for shard in self.shards[sequence] if shard.rank == self.rank]
            row = self.row[held[0][:2]]
        else:
            row = rounds.row[turn, sequence]
        return row, row + self._tokens(sequence, source)

    def _ring_exchange(self, inter: bool, turn: int) -> None:
        """Blocks go on to the next rank in round `turn`, and so do the sums of their gradients a round later."""
        rounds = self.rounds[inter]
        sends, receives = defaultdict(list), defaultdict(list)
        sums_out, sums_in = defaultdict(list), defaultdict(list)
        for sequence, place, ring in rounds.rings:
            if turn >= len(ring):
                continue
            before, after = ring[place - 1], ring[(place + 1) % len(ring)]
            sends[after].append(self._block(rounds, sequence, turn - 1, ring[place - turn + 1]))
            receives[before].append(self._block(rounds, sequence, turn, ring[place - turn]))
            sums_out[after].append(self._block(rounds, sequence, turn, ring[place - turn]))
            home = (place - turn - 1) % len(ring)
            sums_in[before].append(self._block(rounds, sequence, turn + 1, ring[home]))
        self.exchanges[Stage("ring", inter, turn)] = Exchange(_messages(sends), _messages(receives))
        self.exchanges[Stage("ring return", inter, turn + 1)] = Exchange(
            _messages(sums_out), _messages(sums_in), adds=True
        )


def reach(shards: Sequence[Shard]) -> dict[int, int]:
    """Of one sequence, rank -> how many tokens of the sequence it needs, for ranks that need tokens of others."""
    held: dict[int, list[Shard]] = defaultdict(list)
    for shard in shards:
        held[shard.rank].append(shard)
    runs = {rank: _runs(own) for rank, own in sorted(held.items())}
    return {rank: own[-1][1] for rank, own in runs.items() if own[-1][0] > 0}


def _runs(shards: Iterable[Shard]) -> list[Rows]:
    """[start, stop) of shards of one sequence and one rank, sorted; those that follow one another make one."""
    runs: list[Rows] = []
    for shard in shards:
        if runs and runs[-1][1] == shard.start:
            runs[-1] = (runs[-1][0], shard.stop)
        else:
            runs.append((shard.start, shard.stop))
    return runs


def _messages(rows: dict[int, list[Rows]]) -> tuple[Message, ...]:
    return tuple(Message(peer, tuple(joined(rows[peer]))) for peer in sorted(rows))
