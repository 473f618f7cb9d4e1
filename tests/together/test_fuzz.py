"""Random command lines: a seed draws its own again, and nothing that goes wrong is passed over."""

import pytest

from tests.support.fuzz import STEPS, Case, Option, Runs, draw, judge

KNOWN = [
    Option("--one", "switch", count=0),
    Option("--two", "int", default=3),
    Option("--three", "choice", ("a", "b")),
    Option("--four", "text"),
]
CASE = Case(0, 2, ("--num-layers", "4"), False)
REFUSED = "pretrain_gpt.py: error: --micro-batch-size 3 is wrong; use 2"
TRACEBACK = "Traceback (most recent call last):\n  ...\nKeyError: 'x'"


def test_a_seed_draws_its_command_line_again():
    cases = [draw(seed, KNOWN) for seed in range(200)]
    assert cases == [draw(seed, KNOWN) for seed in range(200)]
    assert len({case.flags for case in cases}) == 200
    for flag in ("--one", "--two", "--three", "--four", "--balance-layers", "--balance-experts", "--balance-sequences"):
        assert any(flag in case.flags for case in cases), flag


@pytest.mark.parametrize(
    ("done", "said", "outcome"),
    [
        ([(0, STEPS), (0, STEPS)], "iteration 2/2", "trained"),
        ([(2, 0), (2, 0)], f"a warning\n{REFUSED}", "refused"),
        ([(2, 0), (2, 0)], f"{REFUSED}\n{REFUSED}", "failed"),
        ([(2, 0), (2, 0)], "no word", "failed"),
        ([(0, STEPS), (2, 0)], REFUSED, "failed"),
        ([(1, 1), (1, 1)], f"pretrain_gpt.py: ranks 0-1 of 2 failed:\n{TRACEBACK}", "failed"),
        ([(0, STEPS), (0, STEPS)], TRACEBACK, "failed"),
        ([(0, 1), (0, 1)], "", "failed"),
    ],
)
def test_what_goes_wrong_is_a_failure(done, said, outcome):
    assert judge(CASE, done, said)[0] == outcome


def test_a_run_that_is_asked_to_end_early_may():
    early = Case(0, 1, ("--exit-interval", "1"), False)
    assert judge(early, [(0, 1)], "")[0] == "ended"


def test_command_lines_train_or_are_refused(pool, tmp_path):
    runs = Runs(pool, tmp_path)
    assert len(runs.known) > 500 and any(option.flag == "--balance-experts" for option in runs.known)
    small = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --micro-batch-size 1 --global-batch-size 2"
    assert runs.check(Case(0, 2, tuple(small.split()), False)) == ("trained", "")
    outcome, said = runs.check(Case(0, 2, tuple(f"{small} --bf16 --fp16".split()), False))
    assert outcome == "refused" and "Megatron-LM demands: not args.bf16" in said
