"""Three balancers in one run: documents over ranks, replicas of hot experts, layers that move. No number changes."""

import json

from moving import Plans, move_at
from test_packed_documents import PACKED, TOLERANCE, Packed
from training import MOE, RankRun, differences, join, train_rank

OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
LAYOUT = f"--context-parallel-size 2 --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 {OVERLAPS}"
BALANCED = "--balance-sequences --balance-experts --expert-min-gain 0 --balance-layers"


def _train_moving(argv: list[str], plans: Plans) -> RankRun:
    move_at(plans)
    return train_rank(argv, True)


def test_all_at_once_equal_one_rank(pool, tmp_path):
    model = Packed(pool, tmp_path, f"{' '.join(MOE)} --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2")
    steps = "--eod-mask-loss --train-iters 6"
    reference = model.train(1, f"{PACKED} {steps} --calculate-per-token-loss")
    argv = model.from_start(f"{PACKED} {steps} {LAYOUT} {BALANCED} --balance-report {tmp_path}")
    run = join(pool.run(4, _train_moving, argv, {2: ((3,), (1,)), 4: ((1,), (3,))}))
    assert max(differences(run, reference)) <= TOLERANCE
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    for balancer in ("experts", "sequences"):  # layers were told to move, and did not decide to
        assert {line["iteration"] for line in lines if line["balancer"] == balancer} == set(range(1, 7))
    assert any(line["action"] == "replicate" and line["iteration"] > 4 for line in lines)
