"""Compiles a plan into the program of one rank: which queries meet which keys, and when whose keys and values are sent.

Every rank derives its program from the plan alone, without communication (Zeppelin, arXiv 2509.21841, section 4: the
attention engine).

- The rank's own tokens of a sequence, sorted by position, meet each other under one causal mask, whichever pieces of
  the sequence they are. A shard of another rank is then seen whole or not at all by each run of own queries.
- A "ring" sequence is on G ranks. In round t a rank computes with the keys and values of the t-th rank before it and
  passes them on meanwhile. In the backward pass the gradients of keys and values follow them and end on their rank.
- A "gather" sequence: a rank receives all other ranks' keys before its last queries, in a few turns, those of other
  nodes once a node and then by a copy (`gather`). All queries meet the keys of a turn while the next is under way; then
  these keys' gradients go back to the ranks that hold them, added up once a node.
- In a window a rank receives the keys before its runs that its first queries see. These queries wait for them; all
  others meet own keys alone. Every query is computed once, with all of its keys, so nothing is merged.

Sums have the same order in every run: of gradients along the ring, or by the rank that returns them.

The workspace has one row for each token: first the rank's own tokens, sorted by sequence and position, then gathered
keys, turn by turn, then keys that the rank receives only to send copies, then two buffers for rings over nodes and two
for rings inside the node.
"""

from collections import defaultdict
from collections.abc import Iterable

from balancing.cluster import Cluster
from balancing.sequences.engine.gather import Transfer, gathering
from balancing.sequences.engine.ordering import Work, backward_steps, forward_steps
from balancing.sequences.engine.program import Messages, PeerRows, Program, Rows, Task, TransferGroup, in_calls
from balancing.sequences.rounds import SMALLEST_TURNS, TurnTokens
from balancing.sequences.sequence_plan import SequencePlan, Shard, by_sequence, join_adjacent, runs_of

__all__ = ["make_program"]


def make_program(
    plan: SequencePlan,
    rank: int,
    cluster: Cluster | None = None,
    *,
    relays: Iterable[TransferGroup] = (),
    turn_tokens: TurnTokens = SMALLEST_TURNS,
) -> Program:
    """The program of one rank.

    plan: of the whole batch.
    rank: in the plan.
    cluster: which ranks share a node; None if all do.
    relays: transfer groups in which the rank relays messages of other ranks, so that it takes part in them even if it
        has nothing to send or receive itself.
    turn_tokens: least tokens of a turn of gathering, the same on all ranks.

    Raises ValueError for a rank outside the plan or a cluster that is smaller than the plan.
    """
    return _Builder(plan, rank, cluster, relays, turn_tokens).program()


class _Rounds:
    """The rings over nodes, or those inside, that a rank is in: tasks of each round, and the rows of its blocks."""

    def __init__(self) -> None:
        self.blocks: dict[int, list[tuple[int, int, int]]] = defaultdict(list)  # round -> (from, sequence, source)
        self.row: dict[tuple[int, int], int] = {}  # (round, sequence) -> first row
        self.region: dict[int, Rows] = {}  # round -> rows of all its blocks
        self.tasks: dict[int, list[Task]] = defaultdict(list)
        self.rings: list[tuple[int, int, tuple[int, ...]]] = []  # (sequence, place, ring)

    @property
    def last(self) -> int:
        """The last round in which blocks arrive."""
        return max((len(ring) - 1 for _, _, ring in self.rings), default=0)


class _Builder:
    def __init__(
        self,
        plan: SequencePlan,
        rank: int,
        cluster: Cluster | None,
        relays: Iterable[TransferGroup],
        turn_tokens: TurnTokens,
    ) -> None:
        if not 0 <= rank < plan.ranks:
            raise ValueError(f"rank {rank} is not in a plan of {plan.ranks} ranks (0 to {plan.ranks - 1})")
        if cluster is not None and cluster.world_size < plan.ranks:
            raise ValueError(f"a cluster of {cluster.world_size} ranks is too small for a plan of {plan.ranks} ranks")
        self.plan, self.rank, self.turn_tokens = plan, rank, turn_tokens
        self.node = [0 if cluster is None else cluster.node(r) for r in range(plan.ranks)]
        self.own_shards = tuple(sorted(plan.shards(rank)))
        self.row: dict[tuple[int, int], int] = {}  # (sequence, start of an own shard) -> own row
        row = 0
        for shard in self.own_shards:
            self.row[shard[:2]] = row
            row += shard.tokens
        self.rows = row
        own_sequences = {shard.sequence for shard in self.own_shards}
        self.shards = by_sequence(shard for shard in plan.attention if shard.sequence in own_sequences)
        self.parts: dict[tuple[int, int], list[Shard]] = defaultdict(list)  # (sequence, rank) -> shards, by position
        for shards in self.shards.values():
            for shard in shards:
                self.parts[shard.sequence, shard.rank].append(shard)
        # Where the rank sends or receives itself, its own messages replace these.
        self.messages = {
            transfer_group: Messages((), (), adds=transfer_group.kind in ("return", "ring return"))
            for transfer_group in relays
        }
        self.own_tasks: list[Task] = []
        self.local: list[bool] = []
        self.came: dict[tuple[int, int], int] = {}  # (sequence, first token) -> row of tokens of other ranks
        self.gathered: dict[TransferGroup, list[Task]] = defaultdict(list)
        self.rounds = {True: _Rounds(), False: _Rounds()}  # over nodes; inside a node

    def program(self) -> Program:
        for sequence in self.shards:
            parts, ring = self.parts[sequence, self.rank], self.plan.ring(sequence)
            if self.plan.window is not None:
                self._own_windows(sequence, self.plan.window, len(ring) == 1)
                continue
            rows = self.row[parts[0][:2]], self.row[parts[-1][:2]] + parts[-1].tokens
            self.own_tasks.append(Task(rows, rows, causal=True))
            self.local.append(len(ring) == 1)
            if self.plan.exchange[sequence] == "ring" and len(ring) > 1:
                inter = len({self.node[r] for r in ring}) > 1
                self.rounds[inter].rings.append((sequence, ring.index(self.rank), ring))
        copies = self._gather()
        for inter in (True, False):
            self._ring(inter)
        work = Work(
            self.messages,
            self.own_tasks,
            self.local,
            self.gathered,
            copies,
            {inter: rounds.tasks for inter, rounds in self.rounds.items()},
            {inter: rounds.region for inter, rounds in self.rounds.items()},
        )
        calls, (forward, backward) = in_calls(forward_steps(work), backward_steps(work))
        gathers = sorted(
            (group for group in self.messages if group.kind == "gather" and copies),
            key=lambda group: (group.round, not group.inter),
        )
        return Program(self.rank, self.own_shards, self.rows, self.messages, calls, forward, backward, tuple(gathers))

    def _own_windows(self, sequence: int, window: int, local: bool) -> None:
        """Add tasks of own queries whose windows hold own keys alone: all of a run but its first, if it has any."""
        for start, stop in runs_of(self.parts[sequence, self.rank]):
            first = start + window if start else 0
            if first < stop:
                rows = self._own_rows(sequence, start, stop)
                queries = rows[0] + first - start, rows[1]
                self.own_tasks.append(Task(queries, rows, causal=True, window=window))
                self.local.append(local)

    def _own_rows(self, sequence: int, start: int, stop: int) -> Rows:
        """Own rows of tokens [start, stop), which lie in one own shard or in several adjacent ones."""
        first = next(s for s in self.parts[sequence, self.rank] if s.start <= start < s.stop)
        row = self.row[first[:2]] + start - first.start
        return row, row + stop - start

    # Gathered keys.

    def _gather(self) -> bool:
        """Make messages and tasks of gathered keys. Returns whether any ranks of the plan send copies."""
        found = gathering(self.plan, self.node, self.turn_tokens)
        own = [one for one in found.transfers if self.rank in (one.source, one.target)]
        coming = sorted(one for one in own if one.target == self.rank and one.turn is not None)
        last: dict[tuple[bool, int | None], int] = defaultdict(
            int
        )  # (inter, turn) -> round in which its last keys come
        for one in coming:
            last[one.inter, one.turn] = max(last[one.inter, one.turn], one.round)
        # What comes last in the same round is computed together.
        together: dict[TransferGroup, dict[int, list[Transfer]]] = defaultdict(lambda: defaultdict(list))
        for one in coming:
            together[TransferGroup("gather", one.inter, last[one.inter, one.turn])][one.sequence].append(one)
        for transfer_group in sorted(together):
            for sequence, transfers in together[transfer_group].items():
                arriving: list[tuple[int, Rows]] = []  # first token and rows, by position
                for one in transfers:
                    self.came[one[:2]] = self.rows
                    arriving.append((one.begin, (self.rows, self.rows + one.stop - one.begin)))
                    self.rows += one.stop - one.begin
                if self.plan.window is None:
                    self._meet(self.gathered[transfer_group], sequence, arriving)
                else:
                    self.gathered[transfer_group] += self._edges(sequence, arriving, self.plan.window)
        self._gather_messages(own)
        return found.copies

    def _gather_messages(self, transfers: Iterable[Transfer]) -> None:
        """Messages of transfers from or to this rank. Both ends have them in one order, so their rows match."""
        sides: dict[TransferGroup, tuple[dict[int, list[Rows]], dict[int, list[Rows]]]] = {}
        for one in transfers:
            sends = one.source == self.rank
            rows, peer = self._rows_of(one), one.target if sends else one.source
            for transfer_group, goes in (
                (TransferGroup("gather", one.inter, one.round), sends),
                (TransferGroup("return", one.inter, one.back), not sends),
            ):
                side = sides.setdefault(transfer_group, (defaultdict(list), defaultdict(list)))
                side[0 if goes else 1][peer].append(rows)
        for transfer_group in sorted(sides):
            sent, received = map(_messages, sides[transfer_group])
            self.messages[transfer_group] = Messages(sent, received, adds=transfer_group.kind == "return")

    def _rows_of(self, transfer: Transfer) -> Rows:
        """Rows of the tokens of a transfer: own ones, those that came, or new ones, from which copies are sent."""
        sequence, begin, stop = transfer[:3]
        if transfer.source == self.rank and (sequence, begin) not in self.came:
            return self._own_rows(sequence, begin, stop)
        if (sequence, begin) not in self.came:
            self.came[sequence, begin] = self.rows
            self.rows += stop - begin
        row = self.came[sequence, begin]
        return row, row + stop - begin

    def _meet(self, tasks: list[Task], sequence: int, arriving: list[tuple[int, Rows]]) -> None:
        """Add tasks of own queries that see keys that arrive. arriving: their first tokens and rows, in order."""
        first = arriving[0][1][0]
        for start, stop in runs_of(self.parts[sequence, self.rank]):
            seen = max((rows[1] for token, rows in arriving if token < start), default=first)
            if seen > first:
                _join(tasks, Task(self._own_rows(sequence, start, stop), (first, seen), causal=False, merges=True))

    def _edges(self, sequence: int, arriving: list[tuple[int, Rows]], window: int) -> Iterable[Task]:
        """Tasks of the first queries of own runs, which see keys that arrive. arriving: as in `_meet`."""
        runs = runs_of(self.parts[sequence, self.rank])
        came = [(token, token + stop - start, start) for token, (start, stop) in arriving]
        own_keys = [(start, stop, self._own_rows(sequence, start, stop)[0]) for start, stop in runs]
        for start, stop in runs:
            if not start:
                continue
            begin, stop = max(0, start - window), min(stop, start + window)
            keys = [
                (row + max(begin, first) - first, row + min(stop, last) - first)
                for first, last, row in sorted(came + own_keys)
                if first < stop and last > begin
            ]
            *before, last_keys = join_adjacent(keys)
            queries = self._own_rows(sequence, start, stop)
            yield Task(queries, last_keys, causal=True, before=tuple(before), window=window)

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
            for turn in range(1, len(ring)):
                self._tasks(rounds, sequence, turn, ring[place - turn])
        for turn in range(1, rounds.last + 1):
            self._ring_messages(inter, turn)

    def _tokens(self, sequence: int, rank: int) -> int:
        return sum(shard.tokens for shard in self.parts[sequence, rank])

    def _tasks(self, rounds: _Rounds, sequence: int, turn: int, source: int) -> None:
        """Add tasks of one round: each run of own queries sees a prefix of the block, which is sorted by position."""
        first, _ = self._block(rounds, sequence, turn, source)
        keys = runs_of(self.parts[sequence, source])
        tasks = rounds.tasks[turn]
        for start, stop in runs_of(self.parts[sequence, self.rank]):
            seen = sum(key_stop - key_start for key_start, key_stop in keys if key_start < stop)
            queries = self._own_rows(sequence, start, stop)
            if seen:
                _join(tasks, Task(queries, (first, first + seen), causal=False, merges=True))

    def _block(self, rounds: _Rounds, sequence: int, turn: int, source: int) -> Rows:
        is_own = source == self.rank
        row = self.row[self.parts[sequence, source][0][:2]] if is_own else rounds.row[turn, sequence]
        return row, row + self._tokens(sequence, source)

    def _ring_messages(self, inter: bool, turn: int) -> None:
        """In round `turn` blocks are passed to the next rank; the sums of their gradients follow a round later."""
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
        self.messages[TransferGroup("ring", inter, turn)] = Messages(_messages(sends), _messages(receives))
        self.messages[TransferGroup("ring return", inter, turn + 1)] = Messages(
            _messages(sums_out), _messages(sums_in), adds=True
        )


def _join(tasks: list[Task], task: Task) -> None:
    """Add a task, or join it with the one before it if that has adjacent queries and the same keys."""
    before = tasks[-1] if tasks else None
    if before is not None and before.keys == task.keys and before.queries[1] == task.queries[0]:
        tasks[-1] = before._replace(queries=(before.queries[0], task.queries[1]))
    else:
        tasks.append(task)


def _messages(rows: dict[int, list[Rows]]) -> tuple[PeerRows, ...]:
    return tuple(PeerRows(peer, tuple(join_adjacent(rows[peer]))) for peer in sorted(rows))
