"""Programs of the attention engine, run on token numbers instead of tensors: every pair once, every gradient home."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing.cluster import Cluster
from balancing.sequences.engine import gather
from balancing.sequences.engine.compiler import make_program
from balancing.sequences.engine.program import (
    Compute,
    Messages,
    PeerRows,
    Program,
    ProgramStep,
    Start,
    Task,
    TransferGroup,
    Wait,
    layout_change,
)
from balancing.sequences.engine.routing import internode_traffic, route, routes
from balancing.sequences.engine.row_indices import Added, CallRows, MessageRows, make_table, rows_on_device
from balancing.sequences.planners.linear_layout import linear_layout, token_targets
from balancing.sequences.rounds import MOST_TURNS, TurnTokens
from balancing.sequences.sequence_plan import SequencePlan, Shard, in_window
from balancing.sequences.traffic import TokenTraffic, kv_traffic
from tests.support.sequence_plans import nodes_of, random_plan, zigzag_plan

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=6)
EXCHANGES = st.sampled_from(["ring", "gather", "mixed"])
RANKS = st.sampled_from([1, 2, 4, 6])
MANY = TurnTokens(1, 1)  # of turns, as many as there may be
LEAST = st.sampled_from([1, 12, 1000]).map(lambda tokens: TurnTokens(tokens, tokens))  # tokens of a turn


def _program(plan: SequencePlan, rank: int, cluster: Cluster | None = None, least: TurnTokens = MANY) -> Program:
    return make_program(plan, rank, cluster or nodes_of(plan.ranks, 1), least)


@pytest.fixture(scope="module", autouse=True)
def short_turns() -> Iterator[None]:
    """Prefixes are cut at so few tokens here that short sequences come in several turns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "TILE", 4)
        yield


class Simulated:
    """A rank whose keys are token numbers and whose gradients are sums of the numbers of queries that saw them."""

    def __init__(self, plan: SequencePlan, program: Program) -> None:
        first = np.concatenate(([0], np.cumsum(plan.lengths)))
        own = [np.arange(s.start, s.stop) + first[s.sequence] for s in program.shards]
        self.own = np.concatenate([np.zeros(0, int), *own])
        self.keys = np.full(program.rows, -1)
        self.keys[: len(self.own)] = self.own
        self.gradients = np.zeros(program.rows, int)
        self.pairs: list[tuple[int, int]] = []
        self.merged: set[int] = set()
        self.program = program

    def rows(self, group: TransferGroup) -> np.ndarray:
        return self.gradients if group.kind.endswith("return") else self.keys

    def compute(self, step: Compute) -> None:
        if step.clear is not None:
            self.gradients[slice(*step.clear)] = 0
        for task in step.tasks:
            for place, row in enumerate(range(*task.queries)):
                rows = np.concatenate([np.arange(*keys) for keys in task.all_keys])
                if task.causal:
                    rows = rows[: len(rows) - (task.queries[1] - task.queries[0]) + place + 1]
                if task.window is not None:
                    rows = rows[-task.window - 1 :]
                query = int(self.own[row])
                self.gradients[rows] += query + 1
                self.pairs += [(query, int(key)) for key in self.keys[rows]]
                assert task.merges == (row in self.merged)
                self.merged.add(row)


def _simulate(ranks: list[Simulated], *, backward: bool) -> None:
    """Run all programs at once. What is sent must not change until it has been waited for."""
    sent: dict[tuple[TransferGroup, int, int], list[np.ndarray]] = {}
    steps = [0] * len(ranks)

    def contents(rank: int, group: TransferGroup) -> dict[int, list[np.ndarray]]:
        rows = ranks[rank].rows(group)
        exchange = ranks[rank].program.messages[group]
        return {m.peer: [rows[slice(*r)].copy() for r in m.rows] for m in exchange.sends}

    def run(rank: int) -> Iterator[None]:
        one = ranks[rank]
        for step in one.program.backward if backward else one.program.forward:
            steps[rank] += 1
            if isinstance(step, Compute):
                one.compute(step)
                continue
            if isinstance(step, Start):
                for peer, rows in contents(rank, step.group).items():
                    sent[step.group, rank, peer] = rows
                continue
            exchange = one.program.messages[step.group]
            while any((step.group, m.peer, rank) not in sent for m in exchange.receives):
                yield
            for peer, rows in contents(rank, step.group).items():
                assert all((a == b).all() for a, b in zip(rows, sent[step.group, rank, peer], strict=True))
            for message in exchange.receives:
                came = np.concatenate(sent[step.group, message.peer, rank])
                assert len(came) == message.tokens
                into = one.rows(step.group)
                for start, stop in message.rows:
                    into[start:stop] = came[: stop - start] + (into[start:stop] if exchange.adds else 0)
                    came = came[stop - start :]

    running = {rank: run(rank) for rank in range(len(ranks))}
    while running:
        before = sum(steps)
        running = {rank: program for rank, program in running.items() if next(program, "done") != "done"}
        assert not running or sum(steps) > before, f"ranks {list(running)} wait in a circle"


@settings(max_examples=60)
@given(LENGTHS, RANKS, st.integers(0, 1000), EXCHANGES, st.booleans(), st.booleans(), LEAST)
def test_every_pair_once_and_every_gradient_home(lengths, ranks, seed, exchange, zigzag, nodes, least) -> None:
    plan = (
        zigzag_plan(lengths, ranks, exchange="gather" if exchange == "gather" else "ring")
        if zigzag
        else random_plan(lengths, ranks, seed, exchange=exchange, linear="same")
    )
    _check_programs(plan, nodes_of(ranks, 2) if nodes and ranks > 1 else None, least)


def test_few_keys_are_waited_for_and_one_call_computes_everything() -> None:
    """On one node: a transfer, a call, and nothing to merge. Not if latents are sent, or turns are shorter."""
    plan = zigzag_plan((80, 40, 3), 4, exchange="gather")
    for program in _check_programs(plan, None, TurnTokens(1000, 1000)):
        assert program.in_one_call and not program.merges
        starts = [step.group.kind for step in program.backward if isinstance(step, Start)]
        assert starts == ["gather", "return"]
    for least, waits in ((1000, False), (10, True)):
        turns = nodes_of(4, 1), TurnTokens(least, least)
        others = [make_program(plan, rank, *turns, waits=waits) for rank in range(4)]
        assert all(program.merges for program in others)


@settings(max_examples=60)
@given(LENGTHS, RANKS, st.integers(0, 1000), st.sampled_from([0, 1, 3, 10, 39]), st.booleans(), LEAST)
def test_windows_hold_every_pair_once_and_nothing_is_merged(lengths, ranks, seed, window, nodes, least) -> None:
    plan = in_window(random_plan(lengths, ranks, seed, exchange="gather", linear="random"), window)
    if max(lengths) <= window + 1:
        assert plan.window is None, "every token sees all before it"
        return
    cluster = nodes_of(ranks, 2) if nodes and ranks > 1 else None
    for program in _check_programs(plan, cluster, least):
        tasks = [task for call in (program.forward, program.backward) for step in call for task in _tasks(step)]
        assert not any(task.merges for task in tasks)
        assert sum(task.area for task in tasks) == 2 * plan.area[program.rank]
    received = [_program(plan, rank).rows - plan.tokens[rank] for rank in range(ranks)]
    visible, holder = _visible(plan), np.empty(sum(lengths), int)
    for rank in range(ranks):
        holder[Simulated(plan, _program(plan, rank)).own] = rank
    assert received == [(visible[holder == rank].any(0) & (holder != rank)).sum() for rank in range(ranks)]
    assert sum(received) == kv_traffic(plan).tokens.sum()


def _tasks(step: ProgramStep) -> tuple[Task, ...]:
    return step.tasks if isinstance(step, Compute) else ()


def _visible(plan: SequencePlan) -> np.ndarray:
    """bool [query, key], by number of token."""
    document = np.repeat(np.arange(len(plan.lengths)), plan.lengths)
    visible = (document[:, None] == document) & np.tri(len(document), dtype=bool)
    return visible if plan.window is None else visible & ~np.tri(len(document), k=-plan.window - 1, dtype=bool)


def _check_programs(plan: SequencePlan, cluster: Cluster | None, least: TurnTokens) -> list[Program]:
    """The programs of all ranks, after each visible pair was found once, and each gradient at home."""
    programs = [_program(plan, rank, cluster, least) for rank in range(plan.ranks)]
    tokens, visible = sum(plan.lengths), _visible(plan)
    for backward in (False, True):
        simulated = [Simulated(plan, program) for program in programs]
        _simulate(simulated, backward=backward)
        seen = np.zeros((tokens, tokens), int)
        for query, key in (pair for one in simulated for pair in one.pairs):
            seen[query, key] += 1
        assert (seen == visible).all()
        if backward:
            wanted = (np.arange(tokens)[:, None] + 1) * visible
            for one in simulated:
                assert (one.gradients[: len(one.own)] == wanted.sum(0)[one.own]).all()
    for program in programs:
        _check_calls(program)
    return programs


def _check_calls(program: Program) -> None:
    """A step is one call, whose rows are those of its tasks; in number as few as transfers allow."""
    table = make_table(program.calls, program.messages, program.rows)
    rows, messages = rows_on_device(program.calls, table, torch.device("cpu"))[0]
    _check_gradients(program, table.sums, rows, messages)
    every = np.arange(program.rows)
    for steps in (program.forward, program.backward):
        computes = [step for step in steps if isinstance(step, Compute) and step.call is not None]
        kinds = "gather", "ring"
        waits = [
            step
            for step in steps
            if isinstance(step, Wait) and step.group.kind in kinds and program.messages[step.group].receives
        ]
        assert len(computes) <= len(waits) + 2
        assert sum(program.calls[step.call].merges for step in computes) <= len(waits)
        for step in computes:
            one = rows[step.call]
            ends = [[(task.queries,) for task in step.tasks], [task.all_keys for task in step.tasks]]
            for of_tasks, index in zip(ends, (one.queries, one.keys), strict=True):
                wanted = [row for ranges in of_tasks for rows in ranges for row in range(*rows)]
                assert every[_numbers(index)].tolist() == wanted
            lengths = [[sum(stop - start for start, stop in ranges) for ranges in of_tasks] for of_tasks in ends]
            assert [list(one.pieces.queries), list(one.pieces.keys)] == lengths
            assert [np.diff(ends).tolist() for ends in one.pieces.ends] == lengths
            assert (one.pieces.causal, one.merges) == step.tasks[0][2:4]
            assert one.pieces.window == step.tasks[0].window


def _check_gradients(
    program: Program, sums: int, calls: list[CallRows], messages: dict[TransferGroup, MessageRows]
) -> None:
    """Every key's gradient of a call is added once, and all those of a row at the same time: to the row's sum, or to
    its place in the messages that return it. What is not from a call there is from the sums."""
    every, row_of = np.arange(program.rows), dict[int, int]()  # row of the workspace -> of sums
    sent = {group: _sent(one.sends) for group, one in program.messages.items()}
    filled = {group: np.zeros(len(rows), int) for group, rows in sent.items()}

    def pairs(added: Added, number: int) -> list[tuple[int, int]]:
        into = np.arange(program.rows)[_numbers(added.rows)]
        assert len(set(into.tolist())) == len(into)
        terms = np.arange(number)[None] if added.terms is None else added.terms.numpy()
        return [(int(row), int(one)) for of_term in terms for row, one in zip(into, of_term, strict=True) if one >= 0]

    for call in calls:
        keys = every[_numbers(call.keys)]
        places = []
        for added in call.gradients:
            for row, place in pairs(added, len(keys)):
                places.append(place)
                if added.group is None:
                    assert row_of.setdefault(int(keys[place]), row) == row
                else:
                    assert sent[added.group][row] == keys[place]
                    filled[added.group][row] = 1
        assert sorted(places) == list(range(len(keys)))
    for group, of_group in messages.items():
        exchange = program.messages[group]
        if exchange.adds and (received := _sent(exchange.receives)).size:
            assert of_group.added is not None
            for row, place in pairs(of_group.added, len(received)):
                assert row_of.setdefault(int(received[place]), row) == row
    for group, of_group in messages.items():
        if group.kind == "return":
            assert of_group.sends == slice(0, len(sent[group]))
            if of_group.summed is not None:
                for row, place in pairs(of_group.summed, sums):
                    assert row_of[int(sent[group][row])] == place
                    filled[group][row] += 1
            assert (filled[group] == 1).all()
    assert len(set(row_of.values())) == len(row_of) and max(row_of.values(), default=0) < max(1, sums)
    assert all(row_of.get(row, row) == row for row in range(program.tokens))


def _sent(messages: Sequence[PeerRows]) -> np.ndarray:
    return np.array([row for one in messages for rows in one.rows for row in range(*rows)], int)


def _numbers(index: slice | torch.Tensor) -> slice | np.ndarray:
    return index if isinstance(index, slice) else index.numpy()


@settings(max_examples=30)
@given(LENGTHS, st.integers(0, 1000), EXCHANGES, LEAST)
def test_two_ranks_start_their_common_stages_in_one_order(lengths, seed, exchange, least) -> None:
    """A communicator that runs messages in the order of their start, as NCCL's, would otherwise stand still. All ranks
    take part in what is a collective: keys that are gathered, and their gradients."""
    plan = random_plan(lengths, 6, seed, exchange=exchange)
    programs = [_program(plan, rank, nodes_of(6, 3), least) for rank in range(6)]
    for name in ("forward", "backward"):
        orders = [[s.group for s in getattr(program, name) if isinstance(s, Start)] for program in programs]
        assert len({tuple(s for s in one if s.kind in ("gather", "return")) for one in orders}) == 1
        for one in orders:
            for other in orders:
                assert [s for s in one if s in other] == [s for s in other if s in one]


def test_ring_is_double_buffered_and_gathering_comes_in_turns() -> None:
    ring = _program(zigzag_plan((80,), 8), 3)
    assert ring.rows == ring.tokens + 2 * 10
    program = _program(zigzag_plan((800,), 8, exchange="gather"), 3)
    turns = [one for group, one in program.messages.items() if group.kind == "gather"]
    received = [sum(message.tokens for message in one.receives if message.peer != 3) for one in turns]
    assert sum(received) == 600 - 50  # the second chunk of rank 3 begins at token 600
    assert len(turns) == MOST_TURNS, "it computes while the rest is under way"
    share = 550 / (MOST_TURNS - 1)
    assert max(received) <= 1.2 * share
    assert all(received[end] <= 0.7 * share for end in (0, -1)), "there may be nothing to compute then"
    computes = [step for step in program.backward if isinstance(step, Compute)]
    assert len(computes) == 1 + MOST_TURNS


@settings(max_examples=60)
@given(LENGTHS, st.sampled_from([(2, 3), (3, 2), (2, 4), (1, 4), (4, 1)]), st.integers(0, 1000), st.booleans())
def test_a_key_enters_a_node_once_over_equally_loaded_ranks(lengths, shape, seed, zigzag) -> None:
    """And its gradient leaves it once: one sum, after all copies' gradients have come back."""
    nodes, per_node = shape
    ranks, node = nodes * per_node, [rank // per_node for rank in range(nodes * per_node)]
    make = zigzag_plan if zigzag else partial(random_plan, seed=seed)
    plan = make(lengths, ranks, exchange="gather")
    found = gather.gathering(plan, node, MANY)
    entered: dict[tuple[int, int, int], int] = {}  # (node, sequence, token) -> round of its keys
    returned: dict[tuple[int, int, int], int] = {}
    received = np.zeros(ranks, int)
    for one in found.transfers:
        for token in range(one.begin, one.stop):
            key = node[one.target], one.sequence, token
            if node[one.source] != node[one.target]:
                assert key not in entered
                entered[key], returned[key] = one.round, one.back
                received[one.target] += 1
            elif key in entered:
                assert one.round == entered[key] + 1 and one.back == returned[key] - 1
    loads = received.reshape(nodes, per_node)
    assert (loads.max(1) - loads.sum(1) / per_node <= gather.TILE).all()
    copied = any(
        one.round != entered.get((node[one.target], one.sequence, one.begin), one.round) for one in found.transfers
    )
    assert copied == found.copies


def test_a_copy_is_sent_under_the_next_transfer() -> None:
    """Both ranks of node 1 need the 32 tokens of node 0, in two turns: each receives a part and copies it to the
    other."""
    shards = (Shard(0, 0, 32, 0), Shard(0, 32, 40, 2), Shard(0, 40, 48, 3))
    plan = SequencePlan((48,), 4, "test", shards, shards, ("gather",))
    program = _program(plan, 2, nodes_of(4, 2), TurnTokens(1, 4))
    assert program.chained == tuple(TransferGroup("gather", True, turn) for turn in range(3))
    lines = str(program).splitlines()
    backward = lines.index("backward:")
    assert lines[2:backward] == [
        "  start gather inter-node: 0-4 to 3, 8-16 from 0",
        "  compute 0-8 x 0-8 causal",
        "  wait for gather inter-node",
        "  start gather inter-node round 1: 8-16+4-8 to 3, 16-24 from 0, 24-32 from 3",
        "  wait for gather inter-node round 1",
        "  start gather inter-node round 2: 16-24 to 3, 32-40 from 3",
        "  compute 0-8 x 8-16+24-32",
        "  wait for gather inter-node round 2",
        "  compute 0-8 x 16-24+32-40",
    ]
    assert [line for line in lines[backward:] if "start return" in line] == [
        "  start return inter-node: 24-32 to 3, 0-4+8-16 from 3",
        "  start return inter-node round 1: 8-16 to 0, 32-40 to 3, 4-8+16-24 from 3",
        "  start return inter-node round 2: 16-24 to 0",
    ]


def test_order_of_the_forward_pass() -> None:
    """Sequence 0 over both nodes, 1 inside a node, 2 and 3 local: the slowest transfers start first."""
    shards = [Shard(0, 10 * r, 10 * r + 10, r) for r in range(4)]
    shards += [Shard(1, 0, 9, 0), Shard(1, 9, 20, 1), Shard(2, 0, 7, 0), Shard(3, 0, 7, 0)]
    plan = SequencePlan((40, 20, 7, 7), 4, "test", tuple(shards), tuple(shards), ("ring", "ring", "local", "local"))
    lines = str(_program(plan, 0, nodes_of(4, 2))).splitlines()
    assert lines[2:7] == [
        "  start ring inter-node round 1: 0-10 to 1, 43-53 from 3",
        "  start ring intra-node round 1: 10-19 to 1, 53-64 from 1",
        "  compute 0-10 x 0-10 causal, 10-19 x 10-19 causal, 19-26 x 19-26 causal",
        "  wait for ring inter-node round 1",
        "  start ring inter-node round 2: 43-53 to 1, 33-43 from 3",
    ]


@settings(max_examples=60)
@given(LENGTHS, st.sampled_from([(1, 3), (2, 2), (3, 2), (2, 4)]), st.integers(0, 1000))
def test_linear_layout_is_equal_and_moves_the_least_between_nodes(lengths, shape, seed) -> None:
    ranks = shape[0] * shape[1]
    plan, cluster = random_plan(lengths, ranks, seed, linear="same"), nodes_of(ranks, shape[0])
    linear = linear_layout(plan.attention, cluster)
    remapped = SequencePlan(plan.lengths, ranks, "test", plan.attention, linear, plan.exchange)
    held, targets = plan.tokens, np.array(token_targets(plan.tokens.tolist(), cluster))
    assert targets.max() - targets.min() <= 1
    assert (remapped.linear_tokens == targets).all()
    moved = np.zeros((ranks, ranks), int)
    for rank in range(ranks):
        for message in _remapped(remapped, rank).sends:
            moved[rank, message.peer] = message.tokens
    away = moved - np.diag(np.diag(moved))
    assert away.sum() == np.maximum(held - targets, 0).sum()
    node = np.arange(ranks) // shape[1]
    crossing = away[node[:, None] != node].sum()
    by_node = [(held - targets)[node == one].sum() for one in range(shape[0])]
    assert crossing == np.maximum(by_node, 0).sum()
    # Ranks that round up are best those of nodes that have too much, as far as there are such.
    each, more = divmod(sum(lengths), ranks)
    over = [max(0, held[node == one].sum() - shape[1] * each) for one in range(shape[0])]
    assert crossing == sum(over) - min(more, sum(min(shape[1], tokens) for tokens in over))
    assert linear_layout(linear, cluster) == linear


def _remapped(plan: SequencePlan, rank: int) -> Messages:
    return layout_change(plan.attention, plan.linear, plan.shards(rank), plan.shards(rank, linear=True))


# Routing.

FLOWS = st.dictionaries(
    st.tuples(st.integers(0, 11), st.integers(0, 11)).filter(lambda flow: flow[0] != flow[1]),
    st.integers(1, 5000),
    max_size=12,
)
CLUSTERS = st.sampled_from([(3, 4, 2), (3, 4, 4), (2, 6, 3), (12, 1, 1), (3, 4, 8)])


@settings(max_examples=80)
@given(FLOWS, CLUSTERS, st.sampled_from(["auto", "off", 1, 2, 3, 64]))
def test_route_brings_every_row_once_over_different_nics(messages, shape, routing) -> None:
    cluster = Cluster(*shape, 100e9, 10e9, 1e12, 1e9)
    messages = {flow: rows for flow, rows in messages.items() if not cluster.same_node(*flow)}
    moved = _moved(messages)
    found = route(moved, 4096, cluster, routing)
    rows: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank in range(cluster.world_size):
        for piece in found.of(rank, moved):
            assert (piece.path[0], piece.path[-1]) == piece.flow
            hops = list(itertools.pairwise(piece.path))
            assert sum(not cluster.same_node(*hop) for hop in hops) == 1
            if rank == piece.path[-1]:
                rows[piece.flow] += range(piece.start, piece.stop)
    assert set(rows) == (set(messages) if found.proxies > 1 else set())
    for flow in rows:
        assert sorted(rows[flow]) == list(range(messages[flow]))
        paths = [part.path for part in found.parts(flow, messages[flow])]
        crossing = [hop for path in paths for hop in itertools.pairwise(path) if not cluster.same_node(*hop)]
        for end in zip(*crossing, strict=True):
            assert len({cluster.nic(rank) for rank in end}) == len(crossing)
    if routing in ("off", 1) or shape[1] == 1:
        assert found.proxies == 1
    if routing == "auto":
        assert found.seconds <= min(route(moved, 4096, cluster, number).seconds for number in (1, 2, 3)) + 80e-6


def _moved(messages: dict[tuple[int, int], int]) -> TokenTraffic:
    table = np.array([(*flow, rows) for flow, rows in messages.items()], dtype=np.int64).reshape(-1, 3)
    return TokenTraffic(*table.T)


def test_number_of_proxies_follows_from_the_model() -> None:
    cluster = nodes_of(16, 2, nics=4)
    one = _moved({(7, 8): 100_000})
    alone = route(one, 4096, cluster)
    assert alone.proxies == 4
    assert route(one, 4096, cluster, "off").seconds / alone.seconds > 3
    assert route(_moved({(7, 8): 1}), 4096, cluster).proxies == 1, "nothing to gain"
    documents = TokenTraffic(*(np.full(500, value) for value in (7, 8, 200)))
    assert route(documents, 4096, cluster).proxies == 4, "one message of many documents"
    busy = _moved({(rank, 8 + rank): 100_000 for rank in range(8)})
    assert route(busy, 4096, cluster).proxies == 1, "all NICs are busy as it is"
    slow_inside = Cluster(2, 8, 4, 5e9, 10e9, 1e12, 1e9)
    assert route(one, 4096, slow_inside).proxies < 4, "the node's own links are the limit"


@pytest.mark.parametrize("routing", [0, -1, "fast", True])
def test_unknown_routing_is_refused(routing) -> None:
    with pytest.raises(ValueError, match="is none of 'auto', 'off' and a number"):
        route(_moved({}), 1, nodes_of(4, 2), routing)


@settings(max_examples=40)
@given(LENGTHS, st.integers(0, 1000), EXCHANGES)
def test_flows_are_what_programs_send_between_nodes(lengths, seed, exchange) -> None:
    plan, cluster = random_plan(lengths, 6, seed, exchange=exchange, linear="random"), nodes_of(6, 3)
    sent: dict[TransferGroup, dict[tuple[int, int], int]] = defaultdict(dict)
    for rank in range(6):
        messages = dict(_program(plan, rank, cluster).messages)
        messages[TransferGroup("to linear", True)] = _remapped(plan, rank)
        messages[TransferGroup("to attention", True)] = Messages(
            _remapped(plan, rank).receives, _remapped(plan, rank).sends
        )
        for group, one in messages.items():
            for message in one.sends:
                if not cluster.same_node(rank, message.peer):
                    sent[group][rank, message.peer] = message.tokens
    found: dict[TransferGroup, dict[tuple[int, int], int]] = defaultdict(lambda: defaultdict(int))
    for group, moved in internode_traffic(plan, cluster, MANY).items():
        for source, target, rows in zip(*(column.tolist() for column in moved), strict=True):
            found[group][source, target] += rows
    assert found == {group: one for group, one in sent.items() if one}


def test_a_proxy_takes_part_in_rounds_of_a_ring_it_is_not_in() -> None:
    shards = (Shard(0, 0, 50, 0), Shard(0, 50, 100, 2), Shard(1, 0, 5, 1), Shard(2, 0, 5, 3))
    plan = SequencePlan((100, 5, 5), 4, "test", shards, shards, ("ring", "local", "local"))
    cluster = nodes_of(4, 2, nics=2)
    relays = list(routes(plan, 1, cluster, lambda group: 4096, 2, turn_tokens=MANY))
    assert relays
    program = make_program(plan, 1, cluster, MANY, relays=relays)
    assert {step.group for step in (*program.forward, *program.backward) if isinstance(step, Start)} == set(relays)


def test_all_ranks_take_part_where_keys_are_gathered() -> None:
    """A transfer group is a collective: ranks without rows start it, too."""
    plan = SequencePlan((8,), 4, "gather", *[(Shard(0, 0, 4, 0), Shard(0, 4, 8, 2))] * 2, ("gather",))
    programs = [_program(plan, rank, Cluster(2, 2, 2, 1e9, 1e9, 1e12, 1e9)) for rank in range(4)]
    keys, gradients = (TransferGroup(kind, True, 0) for kind in ("gather", "return"))
    for program in programs:
        forward, backward = (
            [step.group for step in steps if isinstance(step, Start)] for steps in (program.forward, program.backward)
        )
        assert forward == [keys] and backward == [keys, gradients]
    assert [bool(one.messages[keys].receives) for one in programs] == [False, False, True, False]
