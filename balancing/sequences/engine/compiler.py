"""Compiles a plan into one rank's part of it: its program, its changes of layout, and its part in routes.

Every rank derives its program from the plan alone, without communication (Zeppelin, arXiv 2509.21841, section 4: the
attention engine). Compiling takes longer than a layer, and with routes between many nodes longer than planning. In
training a data loader's worker compiles ahead of the step, and all layers of the step share the result.

- Own tokens: the rank's own queries and keys of a sequence, sorted by position, are one task with a causal mask, even
  if they are several pieces of the sequence. A shard of another rank lies wholly before or wholly after each run of own
  queries.
- A "ring" sequence is on G ranks. In round t a rank computes with the keys and values of the t-th rank before it and
  meanwhile passes them on. In the backward pass the gradients of keys and values follow them round the ring and end on
  the rank that holds the keys.
- A "gather" sequence: a rank receives, in a few turns, all other ranks' keys before its last queries. Keys of other
  nodes enter a node once and are then copied (`gather`). All queries are computed with the keys of a turn while the
  next turn is under way. Gradients of these keys then go back to the ranks that hold the keys, summed once a node.
- Keys that come in one turn, and are fewer than the tokens of a turn, are waited for. All queries of their sequences
  are computed once, with all of their keys, and nothing is merged. A rank without other gathered keys and without rings
  computes everything in one call then.
- If queries see only near keys, a rank receives those that the first queries of its runs see. If they are not few, only
  these queries wait for them; all other queries see own keys only.

Gradients are summed in the same order in every run: along the ring, or by the rank that returns them.

The workspace has one row for each token, in this order: the rank's own tokens, sorted by sequence and position;
received keys, one transfer group after another, in the order of the ranks that send them; two buffers for rings over
nodes; two buffers for rings inside the node.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from balancing.cluster import Cluster
from balancing.sequences.cost import least_turn, routing_pays
from balancing.sequences.engine.gather import Transfer, gathering
from balancing.sequences.engine.program import (
    LAYOUT_CHANGES,
    TO_ATTENTION,
    TO_LINEAR,
    Messages,
    PeerRows,
    Program,
    Rows,
    Task,
    TransferGroup,
    Work,
    backward_steps,
    causal_task,
    forward_steps,
    in_calls,
    layout_change,
)
from balancing.sequences.engine.routing import Routing, Slice, TokenBytes, check_routing, routes
from balancing.sequences.engine.row_indices import RowTable, make_table
from balancing.sequences.rounds import TurnTokens
from balancing.sequences.sequence_plan import SequencePlan, Shard, by_sequence, join_adjacent, runs_of

__all__ = ["RankProgram", "compile_rank", "make_program"]


@dataclass(frozen=True)
class RankProgram:
    """One rank's compiled part of a plan. It can be pickled.

    rank: in the plan.
    cluster: tells which ranks share a node.
    program: transfers and computation of attention.
    table: rows of the program's calls and messages, for the device.
    to_attention, to_linear: changes of layout; None where attention has the linear layout, token for token.
    routes: by transfer group with a route, on all ranks the same, the rank's part in messages that do not go directly.
    remapped: as in the plan.
    """

    rank: int
    cluster: Cluster
    program: Program
    table: RowTable
    to_attention: Messages | None
    to_linear: Messages | None
    routes: dict[TransferGroup, list[Slice]]
    remapped: bool


def compile_rank(plan: SequencePlan, rank: int, *, routing: Routing = "auto") -> RankProgram:
    """The program of one rank, the one that training runs. It is deterministic, so the programs of all ranks fit
    together.

    plan: of the whole batch, with the cluster and the shape that it was made for. They tell which ranks share a node,
        in how many turns keys are gathered, and whether routing pays.
    rank: in the plan.
    routing: "auto", "off", or the number of proxies that share a transfer between nodes.

    Raises ValueError for a rank outside the plan, a plan without cluster and shape, a cluster of fewer ranks than the
    plan, an unknown routing, and routing between the nodes of a cluster of more ranks than the plan.
    """
    cluster, shape = plan.cluster, plan.shape
    if cluster is None or shape is None:
        raise ValueError(
            f"a plan with cluster={cluster} and shape={shape} does not tell its programs; make it with plan_sequences, "
            "or give both: dataclasses.replace(plan, cluster=..., shape=...)"
        )
    check_routing(routing)
    token_bytes = TokenBytes.of(plan, shape)
    turns = least_turn(plan, cluster, shape)
    slices: dict[TransferGroup, list[Slice]] = {}
    if routing != "off" and cluster.nodes > 1:
        if cluster.world_size != plan.ranks:
            raise ValueError(f"routing {routing!r} needs the cluster of the plan's {plan.ranks} ranks, not {cluster}")
        if routing != "auto" or routing_pays(
            plan,
            cluster,
            kv_bytes=token_bytes.kv,
            remap_bytes=token_bytes.qkv + token_bytes.out,
            flops_of_pair=token_bytes.pair_flops,
        ):
            slices = routes(plan, rank, cluster, token_bytes.row_bytes, routing, turn_tokens=turns)
    relays = [group for group, own in slices.items() if own and group.kind not in LAYOUT_CHANGES]
    program = make_program(plan, rank, cluster, turns, relays=relays, waits=not token_bytes.latents)
    linear_shards = plan.shards(rank, linear=True)
    if not plan.remapped and linear_shards == program.shards:
        table = make_table(program.calls, program.messages, program.rows)
        return RankProgram(rank, cluster, program, table, None, None, slices, False)
    # Equal layouts may still order a rank's tokens differently.
    to_attention = layout_change(plan.linear, plan.attention, linear_shards, program.shards)
    to_linear = Messages(to_attention.receives, to_attention.sends)
    messages = {**program.messages, TO_ATTENTION: to_attention, TO_LINEAR: to_linear}
    table = make_table(program.calls, messages, program.rows)
    return RankProgram(rank, cluster, program, table, to_attention, to_linear, slices, plan.remapped)


def make_program(
    plan: SequencePlan,
    rank: int,
    cluster: Cluster,
    turn_tokens: TurnTokens,
    *,
    relays: Iterable[TransferGroup] = (),
    waits: bool = True,
) -> Program:
    """A program of one rank with given turns of gathering. `compile_rank` makes the one that training runs.

    plan: the plan of the whole batch.
    rank: in the plan.
    cluster: tells which ranks share a node.
    turn_tokens: least tokens of a turn of gathering, the same on all ranks.
    relays: transfer groups in which the rank relays messages of other ranks. It takes part in them even without
        messages of its own.
    waits: whether queries may wait for all of their keys if these are fewer than the tokens of a turn.

    Raises ValueError for a rank outside the plan or a cluster that is smaller than the plan.
    """
    return _Builder(plan, rank, cluster, relays, turn_tokens, waits).program()


class _Rounds:
    """The rank's rings over nodes, or its rings inside the node: tasks and rows of the blocks of each round."""

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
        cluster: Cluster,
        relays: Iterable[TransferGroup],
        turn_tokens: TurnTokens,
        waits: bool,
    ) -> None:
        if not 0 <= rank < plan.ranks:
            raise ValueError(f"rank {rank} is not in a plan of {plan.ranks} ranks (0 to {plan.ranks - 1})")
        if cluster.world_size < plan.ranks:
            raise ValueError(f"a cluster of {cluster.world_size} ranks is too small for a plan of {plan.ranks} ranks")
        self.plan, self.rank, self.turn_tokens, self.waits = plan, rank, turn_tokens, waits
        self.node = [cluster.node(r) for r in range(plan.ranks)]
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
        # Empty messages, replaced below where the rank itself sends or receives.
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
        transfers, copies = self._receive()
        waiting = self._waiting(transfers)
        for sequence in self.shards:
            parts, ring = self.parts[sequence, self.rank], self.plan.ring(sequence)
            if sequence in waiting or not self.plan.sees_all:
                self._own_alone(sequence, sequence in waiting, len(ring) == 1)
                continue
            rows = self.row[parts[0][:2]], self.row[parts[-1][:2]] + parts[-1].tokens
            self.own_tasks.append(Task(rows, rows, causal=True))
            self.local.append(len(ring) == 1)
            if self.plan.exchange[sequence] == "ring" and len(ring) > 1:
                inter = len({self.node[r] for r in ring}) > 1
                self.rounds[inter].rings.append((sequence, ring.index(self.rank), ring))
        self._gather(transfers, waiting)
        for inter in (True, False):
            self._ring(inter)
        rings = self.rounds[True].rings or self.rounds[False].rings
        masks = {task[2:4] + task[5:] for tasks in (self.own_tasks, *self.gathered.values()) for task in tasks}
        if waiting and not rings and len(masks) == 1:
            # Own tasks wait, too: the last keys' call computes them.
            last = self.gathered[max(self.gathered, key=lambda group: (group.round, group.inter))]
            last[:] = sorted([*self.own_tasks, *last])
            self.own_tasks, self.local = [], []
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

    def _own_alone(self, sequence: int, waits: bool, local: bool) -> None:
        """Add tasks of own queries that see own keys only: in a run at the start of the sequence all, in other runs
        those that see no key before the run. waits: whether these other runs wait as a whole."""
        for start, stop in runs_of(self.parts[sequence, self.rank]):
            first = start
            if start:
                first = stop if waits else self.plan.end_of_reach(start, stop)
            if first < stop:
                rows = self._own_rows(sequence, start, stop)
                queries = rows[0] + first - start, rows[1]
                self.own_tasks.append(causal_task(self.plan, queries, rows))
                self.local.append(local)

    def _own_rows(self, sequence: int, start: int, stop: int) -> Rows:
        """Own rows of tokens [start, stop), which must lie in one own shard or in several adjacent own shards."""
        first = next(s for s in self.parts[sequence, self.rank] if s.start <= start < s.stop)
        row = self.row[first[:2]] + start - first.start
        return row, row + stop - start

    # Gathered keys.

    def _receive(self) -> tuple[list[Transfer], bool]:
        """Transfers of keys from and to the rank, with rows for what it receives, and whether any rank sends copies."""
        gathered = gathering(self.plan, self.node, self.turn_tokens)
        for transfer in gathered.transfers:  # all ranks take part in all groups
            self.messages[TransferGroup("gather", transfer.inter, transfer.round)] = Messages((), ())
            self.messages[TransferGroup("return", transfer.inter, transfer.back)] = Messages((), (), adds=True)
        # Both ends of a message list its transfers in this order, and received rows lie in the order of peers.
        own = sorted(
            (transfer for transfer in gathered.transfers if self.rank in (transfer.source, transfer.target)),
            key=lambda transfer: (transfer.inter, transfer.round, transfer.source, transfer.sequence, transfer.begin),
        )
        for transfer in own:
            if transfer.target == self.rank:
                self.came[transfer.sequence, transfer.begin] = self.rows
                self.rows += transfer.stop - transfer.begin
        self._gather_messages(own)
        return own, gathered.copies

    def _waiting(self, transfers: Sequence[Transfer]) -> set[int]:
        """Sequences whose queries wait for all of their keys, since these come in one turn that is too short to compute
        anything meanwhile: a call and a merge would take longer."""
        waiting: set[int] = set()
        for inter in (True, False):
            coming = [
                transfer
                for transfer in transfers
                if transfer.target == self.rank and transfer.turn is not None and transfer.inter == inter
            ]
            tokens = sum(transfer.stop - transfer.begin for transfer in coming)
            if self.waits and len({transfer.turn for transfer in coming}) == 1 and tokens < self.turn_tokens[inter]:
                waiting |= {transfer.sequence for transfer in coming}
        return waiting

    def _gather(self, transfers: Sequence[Transfer], waiting: Collection[int]) -> None:
        """Make tasks of gathered keys. waiting: sequences whose queries wait for all of their keys."""
        # (inter, turn) -> round in which the turn's last keys arrive
        last: dict[tuple[bool, int | None], int] = defaultdict(int)
        for transfer in transfers:
            if transfer.target == self.rank:
                last[transfer.inter, transfer.turn] = max(last[transfer.inter, transfer.turn], transfer.round)
        # Turns whose last keys arrive in the same round are computed together.
        together: dict[TransferGroup, dict[int, list[Transfer]]] = defaultdict(lambda: defaultdict(list))
        for transfer in sorted(own for own in transfers if own.target == self.rank and own.turn is not None):
            group = TransferGroup("gather", transfer.inter, last[transfer.inter, transfer.turn])
            together[group][transfer.sequence].append(transfer)
        for transfer_group in sorted(together):
            for sequence, coming in together[transfer_group].items():
                arriving = [(transfer.begin, self._rows_of(transfer)) for transfer in coming]  # by position
                if sequence in waiting or not self.plan.sees_all:
                    self.gathered[transfer_group] += self._edges(sequence, arriving, sequence in waiting)
                else:
                    self._meet(self.gathered[transfer_group], sequence, arriving)

    def _gather_messages(self, transfers: Iterable[Transfer]) -> None:
        """Messages of transfers from or to this rank, which are in the order of their rows."""
        sides: dict[TransferGroup, tuple[dict[int, list[Rows]], dict[int, list[Rows]]]] = {}
        for transfer in transfers:
            sends = transfer.source == self.rank
            rows, peer = self._rows_of(transfer), transfer.target if sends else transfer.source
            for transfer_group, goes in (
                (TransferGroup("gather", transfer.inter, transfer.round), sends),
                (TransferGroup("return", transfer.inter, transfer.back), not sends),
            ):
                side = sides.setdefault(transfer_group, (defaultdict(list), defaultdict(list)))
                side[0 if goes else 1][peer].append(rows)
        for transfer_group, (sent, received) in sides.items():
            adds = transfer_group.kind == "return"
            self.messages[transfer_group] = Messages(_messages(sent), _messages(received), adds)

    def _rows_of(self, transfer: Transfer) -> Rows:
        """Rows of the tokens of a transfer: own tokens, or received tokens."""
        sequence, begin, stop = transfer[:3]
        if transfer.source == self.rank and (sequence, begin) not in self.came:
            return self._own_rows(sequence, begin, stop)
        row = self.came[sequence, begin]
        return row, row + stop - begin

    def _meet(self, tasks: list[Task], sequence: int, arriving: list[tuple[int, Rows]]) -> None:
        """Add tasks of own queries that see arriving keys. arriving: first token and rows of each range."""
        for start, stop in runs_of(self.parts[sequence, self.rank]):
            seen = join_adjacent(sorted(rows for token, rows in arriving if token < start))
            if seen:
                queries = self._own_rows(sequence, start, stop)
                _join(tasks, Task(queries, seen[-1], causal=False, merges=True, before=tuple(seen[:-1])))

    def _edges(self, sequence: int, arriving: list[tuple[int, Rows]], waits: bool) -> Iterable[Task]:
        """Tasks of own runs that see arriving keys, with all of their keys: of the queries that see these, or if the
        sequence waits of the whole run. arriving: as in `_meet`."""
        runs = runs_of(self.parts[sequence, self.rank])
        came = [(token, token + stop - start, start) for token, (start, stop) in arriving]
        own_keys = [(start, stop, self._own_rows(sequence, start, stop)[0]) for start, stop in runs]
        for start, stop in runs:
            if not start:
                continue
            begin = self.plan.first_seen(start)
            if not waits:
                stop = self.plan.end_of_reach(start, stop)
            keys = [
                (row + max(begin, first) - first, row + min(stop, last) - first)
                for first, last, row in sorted(came + own_keys)
                if first < stop and last > begin
            ]
            *before, last_keys = join_adjacent(keys)
            queries = self._own_rows(sequence, start, stop)
            yield causal_task(self.plan, queries, last_keys, tuple(before))

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
        """Add tasks of one round. Blocks are sorted by position, so each run of own queries sees a prefix of them."""
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
        """Messages of round `turn`: blocks go to the next rank; the sums of their gradients follow a round later."""
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
        came = [rows for message in _messages(receives) for rows in message.rows]
        assert len(join_adjacent(came)) <= 1, "a round's blocks lie in the order of the ranks that send them"
        self.messages[TransferGroup("ring", inter, turn)] = Messages(_messages(sends), _messages(receives))
        self.messages[TransferGroup("ring return", inter, turn + 1)] = Messages(
            _messages(sums_out), _messages(sums_in), adds=True
        )


def _join(tasks: list[Task], task: Task) -> None:
    """Add a task, or join it with the last task if that has adjacent queries and the same keys."""
    before = tasks[-1] if tasks else None
    if before is not None and before.all_keys == task.all_keys and before.queries[1] == task.queries[0]:
        tasks[-1] = before._replace(queries=(before.queries[0], task.queries[1]))
    else:
        tasks.append(task)


def _messages(rows: dict[int, list[Rows]]) -> tuple[PeerRows, ...]:
    return tuple(PeerRows(peer, tuple(join_adjacent(rows[peer]))) for peer in sorted(rows))
