"""Release of the last stages during training: no number changes, and the job can grow again."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from balancing.layers import release_of
from tests.dynamics.test_moves import FREEZE
from tests.sequences.test_packed_documents import PACKED, Packed
from tests.support.events import events_in
from tests.support.moving import _state_of, _whole, at_end_of_step, move_at
from tests.support.patience import answers_come_from
from tests.support.program import parse
from tests.support.sampled import sampled
from tests.support.settings import EARLY_EXIT, HASH_ATTENTION, scheme_flags, settings
from tests.support.training import (
    EXACT,
    MOCK_DATA,
    MODEL,
    MOE,
    RankRun,
    Run,
    assert_same,
    differences,
    join,
    train,
    train_rank,
    watch,
)

PP2 = "--pipeline-model-parallel-size 2"
PP4 = "--pipeline-model-parallel-size 4"
RELEASE = "--balance-layers --repack-throughput-floor 0.5"
EXACTLY = " ".join(EXACT)
EP2 = f"{' '.join(MOE)} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
SINGLE = "--attention-dropout 0 --hidden-dropout 0 --clip-grad 0"
VALIDATED = "--eval-interval 2 --eval-iters 1"
BASE = [*MODEL, *MOCK_DATA, *"--init-method-std 0.1".split()]


def _rank(argv: list[str], plans: Any, stay: int) -> tuple[RankRun, dict[str, Any], int | None]:
    """Train until the end or a release. Returns the run, the final optimizer state, and the exit code if released."""
    args, config, start = parse(argv)

    from megatron.balanced.shared.optimizer_state import states_of

    state: dict[str, Any] = {}

    def see(balancer: Any) -> None:
        if balancer.iteration == balancer._planner._iterations - 1:
            state.update(_state_of(balancer.mover, states_of(balancer.run.optimizer)))

    if plans:
        move_at(plans)
    at_end_of_step(see)
    finish = watch(args.rank < stay)
    code = None
    try:
        start(args, config)
    except SystemExit as left:
        code = left.code
    return finish(), state, code


def _train(
    pool: Any, ranks: int, stay: int, flags: str, plans: Any, base: list[str] = BASE
) -> tuple[Run, dict[str, np.ndarray]]:
    """Train on `ranks`, of which `stay` are left in the end: all of them without plans."""
    done = pool.run(ranks, _rank, [*base, *RELEASE.split(), *flags.split()], plans, stay)
    assert [code for _, _, code in done] == [None] * stay + [0] * (ranks - stay)
    losses: dict[int, float] = {}  # a rank has them of the steps in which it was on the last stage, up to its last one
    validation: list[float] = []
    for run, _, _ in reversed(done):
        first = len(run.grad_norms) - len(run.losses)
        for iteration, loss in enumerate(run.losses, first):
            assert losses.setdefault(iteration, loss) == loss
        if run.validation != validation[-len(run.validation) :]:  # else a replica has reported it
            validation += run.validation
    parameters = join([RankRun(pieces=run.pieces) for run, _, _ in done]).parameters
    run = Run([losses[iteration] for iteration in sorted(losses)], [], validation, parameters)
    return run, _whole([state for _, state, _ in done[:stay]])


HYBRID = "--mamba-state-dim 8 --mamba-head-dim 8 --mamba-num-groups 2 --hybrid-layer-pattern"

# ranks, those that stay, flags, plans
CASES = {
    "PP 2 to 1, DP 2, both overlaps, validated": (4, 2, f"{PP2} {EXACTLY} {OVERLAPS} {VALIDATED}", {2: ((4,),)}),
    "PP 4 to 3 to 1": (4, 1, f"{PP4} {EXACTLY}", {1: ((1,), (2,), (1,)), 2: ((4,),)}),
    "PP 2 to 1, EP 2": (4, 2, f"{PP2} {EXACTLY} {EP2} --use-distributed-optimizer", {2: ((4,),)}),
    # The final norm of a hybrid model has a name of its own.
    "PP 2 to 1, EP 2, hybrid": (
        4,
        2,
        f"{PP2} {EXACTLY} {EP2} {OVERLAPS} {HYBRID} M-*E|M-*E",
        {1: ((1,), (7,)), 2: ((8,),)},
    ),
    "PP 4 to 3 to 1, hybrid, untied": (
        4,
        1,
        f"{PP4} {EXACTLY} --untie-embeddings-and-output-weights {HYBRID} M-*M|*-|M|-",
        {1: ((1,), (5,), (2,)), 2: ((8,),)},
    ),
    "PP 4 to 2, bf16, untied": (
        4,
        2,
        f"{PP4} {SINGLE} --bf16 --untie-embeddings-and-output-weights --use-distributed-optimizer",
        {2: ((3,), (1,))},
    ),
    "PP 4 to 2 to 1, early exit": (
        4,
        1,
        f"{PP4} {EXACTLY} {EARLY_EXIT} --train-iters 5",
        {2: ((1,), (3,)), 3: ((4,),)},
    ),
    "PP 4 to 2, frozen layers": (4, 2, f"{PP4} {EXACTLY} {FREEZE} --use-distributed-optimizer", {3: ((2,), (2,))}),
    "PP 4 to 2, pruning, mixture of depths, sparse attention": (
        4,
        2,
        f"{PP4} {EXACTLY} {scheme_flags(prune_sparsity=0.8, prune_start=1, prune_end=3, prune_interval=1)} "
        f"{scheme_flags(prune_sparse_density=0.6, mixture_of_depths=0.25)} {HASH_ATTENTION} --train-iters 5",
        {2: ((1,), (3,))},
    ),
}


@pytest.mark.parametrize(
    "case",
    sampled(
        CASES, "PP 2 to 1, DP 2, both overlaps, validated", "PP 2 to 1, EP 2, hybrid", "PP 4 to 2 to 1, early exit"
    ),
)
def test_nobody_misses_the_ranks_that_left(pool, case):
    ranks, stay, flags, plans = CASES[case]
    run, state = _train(pool, ranks, stay, flags, plans)
    reference, expected = _train(pool, ranks, ranks, flags, {})
    _assert_same(run, reference)
    _assert_same_state(state, expected)


def _assert_same_state(state: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, whole in state.items():  # tied weights had state on both ends of the pipeline
        np.testing.assert_allclose(whole, expected[name], rtol=1e-12, atol=1e-14, err_msg=name)


def _assert_same(run: Run, reference: Run) -> None:
    assert run.losses == pytest.approx(reference.losses, rel=1e-12)
    assert run.validation == pytest.approx(reference.validation, rel=1e-12)
    assert differences(run, reference)[1] <= 1e-12


def _events(folder: Path, balancer: str) -> list[dict[str, Any]]:
    return events_in(folder, balancer=balancer)


@pytest.mark.exhaustive
def test_replicas_of_experts_go_on(pool, tmp_path):
    """Hot experts have replicas before and after. The layers that arrive get theirs on the stages that stay."""
    flags = f"{PP2} {EXACTLY} {EP2} {OVERLAPS} --train-iters 6"
    both = f"{flags} --balance-experts {settings('experts', min_gain=0)} --balance-report {tmp_path}"
    run, state = _train(pool, 4, 2, both, {3: ((4,),)})
    reference, expected = _train(pool, 4, 4, flags, {})
    _assert_same(run, reference)
    _assert_same_state(state, expected)
    replicated = {
        (line["iteration"], line["layer"]) for line in _events(tmp_path, "experts") if line["action"] == "replicate"
    }
    assert {layer for iteration, layer in replicated if iteration <= 3} & {2, 3}
    assert {layer for iteration, layer in replicated if iteration > 3} >= {2, 3}


@pytest.mark.exhaustive
def test_documents_stay_spread(pool, tmp_path):
    """Documents are spread over the context-parallel ranks of the stages that stay as they were before."""
    model = Packed(pool, tmp_path)
    documents = f"{PACKED} --eod-mask-loss"
    reference = model.train(1, documents)
    layout = f"{PP2} --context-parallel-size 2 --use-distributed-optimizer"
    base = model.from_start(f"{documents} {layout} --balance-sequences --balance-report {tmp_path}")
    run, _ = _train(pool, 4, 2, "", {2: ((4,),)}, base)
    _assert_same(run, reference)
    spread = [line["iteration"] for line in _events(tmp_path, "sequences") if line["action"] == "spread"]
    assert spread == [1, 1, 2, 2, 3, 4]  # a line of each stage


def test_saved_by_few_ranks_it_grows_back(pool, tmp_path):
    flags = f"{PP4} {EXACTLY}"
    save = f"{flags} --save {tmp_path} --save-interval 3"
    shrunk, _ = _train(pool, 4, 2, save, {2: ((1,), (3,))})
    load = f"{flags} --load {tmp_path} --ckpt-step 3 --no-load-rng"
    grown = train(pool, 4, load, base=BASE, parameters=True)
    assert grown.losses == pytest.approx(shrunk.losses[3:], rel=1e-12)
    assert differences(replace(grown, losses=shrunk.losses), shrunk)[1] <= 1e-12


def _killed_in_a_release(argv: list[str], victim: int, rebuilding: bool) -> str:
    """Stages leave before the fourth iteration, but the victim dies: before it sends a layer, or when it has all of its
    new ones and the ranks that leave are gone.

    Returns what ended the training of this rank. The victim is a process of its own: of a rank that ended badly, the
    pool would not wait for what the others have to say.
    """
    from megatron.balanced.layers import layer_tensors, mover
    from megatron.balanced.trainer.watchdog.failure import report_failures_once

    def die(*unused: Any, **also_unused: Any) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    move_at({3: ((1,), (3,))})
    answers_come_from({*range(4)} - {victim} - ({2, 3} if rebuilding else set()))
    if int(os.environ["RANK"]) == victim:
        if (process := os.fork()) != 0:
            return signal.Signals(os.WTERMSIG(os.waitpid(process, 0)[1])).name
        if rebuilding:
            mover.LayerMover._wrap = die
        else:
            layer_tensors.run_transfers = die
    ended = "the end"
    try:
        with report_failures_once():
            train_rank(argv, False)
    except SystemExit as error:
        ended = f"{type(error).__name__}: {error}"
    if int(os.environ["RANK"]) == victim:
        os._exit(1)
    return ended


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "victim, rebuilding", [(1, False), (3, False), (1, True)], ids=["stays", "leaves", "stays alone"]
)
def test_a_rank_killed_while_others_leave(pool, tmp_path, victim, rebuilding):
    """The others stop well before their timeout and name it, and the run resumes from the last checkpoint."""
    argv = [*BASE, *PP4.split(), *EXACT]
    save = [*RELEASE.split(), "--save", str(tmp_path), "--save-interval", "2", "--distributed-timeout-minutes", "10"]
    ended = pool.run(4, _killed_in_a_release, [*argv, *save], victim, rebuilding)
    assert ended[victim] == "SIGKILL"
    left = {2, 3} if rebuilding else set()
    assert {ended[rank] for rank in left} <= {"Released: 0"}
    assert all(ended[rank] == "SystemExit: 1" for rank in {*range(4)} - {victim} - left), ended
    output = "".join(pool.output)
    assert output.count("pretrain_gpt.py: error:") == 1, output[-3000:]
    assert f"rank {victim} died or stopped answering" in output
    resumed = train(pool, 4, f"--load {tmp_path}", base=argv, parameters=True)
    whole = train(pool, 4, "", base=argv, parameters=True)
    assert resumed.losses == whole.losses[2:]
    assert_same(replace(resumed, losses=whole.losses, grad_norms=whole.grad_norms), whole)


def test_who_leaves():
    # world, stages before and after, ranks of a node -> first rank that leaves, nodes that get free, nodes left
    for given, first, nodes, left in [
        ((4, 4, 2, 1), 2, range(2, 4), 2),
        ((32, 8, 6, 8), 24, range(3, 4), 3),
        ((32, 8, 7, 8), 28, range(4, 4), 4),  # half a node stays busy
        ((16, 4, 1, 8), 4, range(1, 2), 1),
        ((8, 4, 1, 8), 2, range(1, 1), 1),
    ]:
        release = release_of(*given)
        assert (release.ranks, release.nodes, release.nodes_left) == (range(first, given[0]), nodes, left)
        assert (release.stages, release.stay) == (given[2], first)
        gone = {rank // given[3] for rank in release.ranks} - {rank // given[3] for rank in range(first)}
        assert gone == set(nodes)


@pytest.mark.parametrize("stages", [0, 4, 5])
def test_nothing_to_release(stages):
    with pytest.raises(ValueError, match="nothing to release"):
        release_of(8, 4, stages, 2)


def _chosen(asked: dict[str, Any], peak: int) -> list[Any]:
    """What is left of four stages of which only the first and the last have much to do, now and in later iterations."""
    from balancing.layers import LayerSeconds, StagePlan
    from balancing.layers.config import LayerConfig
    from megatron.balanced.layers import shrink

    config = LayerConfig(enabled=True, **asked)
    repacker = shrink.Repacker(config, log_interval=10)
    seconds = np.array([1.0, 1.0, 0.1, 0.1, 0.1, 0.1, 1.0, 1.0])
    plan = StagePlan.from_counts(((2,),) * 4)
    ask = LayerSeconds(seconds, seconds), plan, np.full(4, peak), 8, 4, np.inf
    if not repacker.consider(*ask):
        return [None, None, None]
    assert not repacker.consider(*ask)  # one choice at a time
    due = [repacker.due(iteration) for iteration in (15, 20, 30)]
    return [None if each is None else each.counts for each in due]


def _choices(asks: list[tuple[dict[str, Any], int]]) -> list[list[Any]]:
    return [_chosen(*ask) for ask in asks]


def test_a_choice_waits_for_the_log(pool):
    asks = [
        ({"repack_throughput_floor": 0.9}, 0, 2),
        ({"repack_throughput_floor": 0.9, "repack_min_stages": 3}, 0, 3),
        ({"repack_throughput_floor": 0.3}, 0, 1),
        ({"repack_throughput_floor": 0.9, "repack_min_stages": 4}, 0, None),
        ({}, 0, None),
        ({"repack_memory_limit": 1.0}, 10**6, 1),
        ({"repack_memory_limit": 1.0}, 450 * 10**6, 2),  # two stages' layers fit, four do not
        ({"repack_memory_limit": 1.0}, 900 * 10**6, None),
    ]
    (found,) = pool.run(1, _choices, [ask[:2] for ask in asks])
    for (asked, peak, stages), (early, due, late) in zip(asks, found, strict=True):
        assert early is None and late is None
        assert (None if due is None else len(due)) == stages, (asked, peak, due)


def _destroying_rank(argv: list[str]) -> list[tuple[str, tuple[int, ...]]]:
    """Name and ranks of each group that this rank destroys in a release, in order."""
    import torch.distributed as dist

    from megatron.balanced.trainer import release

    destroyed: list[tuple[str, tuple[int, ...]]] = []
    move_at({1: ((4,),)})
    destroy, finish = dist.destroy_process_group, release.Departure.finish

    def noted(group: Any = None) -> None:
        groups = [group]
        if group is None or group is dist.group.WORLD:  # all that are left, as torch orders them
            names = dist.distributed_c10d._world.pg_names
            groups = sorted(names, key=lambda each: names[each], reverse=True)
        destroyed.extend((f"{each.group_desc} {each.group_name}", _ranks_of(each)) for each in groups)
        destroy(group)

    def finish_(self: Any, *args: Any) -> None:
        dist.destroy_process_group = noted
        try:
            finish(self, *args)
        finally:
            dist.destroy_process_group = destroy

    def _ranks_of(group: Any) -> tuple[int, ...]:
        return tuple(dist.get_process_group_ranks(group))

    release.Departure.finish = finish_
    try:
        train_rank(argv, False)
    except SystemExit as left:
        assert left.code == 0
    return destroyed


def test_groups_are_destroyed_in_one_order_on_all_their_ranks(pool):
    """NCCL waits for the ranks of a node when it destroys a communicator: two orders hang."""
    flags = f"{PP2} {EXACTLY} {EP2} {OVERLAPS} {scheme_flags(early_exit_layers=[1, 2])} --train-iters 3 {RELEASE}"
    ranks = pool.run(4, _destroying_rank, [*BASE, *flags.split()])
    members = dict(ranks[0] + ranks[2])
    assert any(name.startswith("INTRA_DISTRIBUTED_OPTIMIZER") for name in members), sorted(members)
    assert any(name.startswith("PIPELINE") for name in members)
    for one in range(4):
        for other in range(one):
            orders = [[name for name, held in ranks[rank] if {one, other} <= set(held)] for rank in (one, other)]
            assert orders[0] == orders[1]
    leave = {2, 3}
    for name, held in members.items():
        if leave & set(held) and not leave >= set(held):
            assert all(name in dict(ranks[rank]) for rank in held), f"{name} is left on a rank"


def _groups_of_steps(argv: list[str]) -> list[list[tuple[str, tuple[int, ...]]]]:
    """What each process group of this rank is for, and its ranks, at the end of each step."""
    import torch.distributed as dist

    from megatron.balanced.shared.callbacks import StepCallback

    found = []

    class Groups(StepCallback):
        def end_step(self) -> None:
            groups = dist.distributed_c10d._world.pg_names
            found.append([(group.group_desc, tuple(dist.get_process_group_ranks(group))) for group in groups])

    if "--balance-layers" in argv:
        move_at({1: ((4,),)})
    try:
        train_rank(argv, False, callbacks=[Groups()])
    except SystemExit as left:
        assert left.code == 0
    return found


def test_a_release_keeps_the_groups_that_it_can(pool):
    """A second communicator of the same ranks would keep its memory until the job ends."""
    flags = f"{EXACTLY} {EP2} --use-distributed-optimizer --train-iters 2"
    (before, after), *_ = pool.run(4, _groups_of_steps, [*BASE, *f"{flags} {PP2} {RELEASE}".split()])
    (alone, _), *_ = pool.run(2, _groups_of_steps, [*BASE, *flags.split()])
    megatrons = [sorted(group for group in groups if group[0].isupper()) for groups in (after, alone)]
    assert megatrons[0] == megatrons[1] and len(megatrons[0]) > 10
    ours = [sum(not group[0].isupper() for group in groups) for groups in (before, after)]
    assert ours[0] == ours[1]
