"""`--balance` switches on what has something to balance, says once what stays off, and refuses what the user named."""

import contextlib
import io

import pytest

from tests.support.corpus import heavy_tailed, write_documents
from tests.support.refusals import started_anew
from tests.support.settings import settings
from tests.support.training import EXACT, MOCK_DATA, MODEL, MOE, train

BASE = [*MODEL, *MOCK_DATA, *MOE, "--attention-dropout", "0", "--hidden-dropout", "0"]
NO_CP = "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2"
ALL = f"--context-parallel-size 2 {NO_CP}"
NAMES = ("experts", "sequences", "layers")


Told = tuple[tuple[object, list[str], bool], list[str]]


def _balancers(argv: list[str]) -> tuple[tuple[object, list[str], bool], list[str]]:
    """The exit code, "none" if the flags were accepted, the balancers in force and whether weight gradients fill waits;
    and the lines that tell of balancers."""
    from megatron.balanced.trainer.arguments import parse_arguments

    said = io.StringIO()
    code, on, fills = "none", [], False
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            _, config = parse_arguments(argv)
            on = [name for name in NAMES if getattr(config, name).enabled]
            fills = config.fill_with_weight_gradients
        except SystemExit as stop:
            code = stop.code
    return (code, on, fills), [line for line in said.getvalue().splitlines() if "--bal" in line or "error" in line]


@pytest.fixture(scope="module")
def parsed(pool) -> dict[str, Told]:
    """What four ranks say of all flags below, one after the other; a line of one rank is a line of all."""
    every = [flags for table in (CASES, FILLED, REFUSED) for flags, *_ in table.values()]
    ranks = pool.run(4, started_anew, [[*BASE, *flags.split()] for flags in every], _balancers)
    told = {}
    for flags, of_ranks in zip(every, zip(*ranks, strict=True), strict=True):
        assert all(found == of_ranks[0][0] for found, _ in of_ranks), of_ranks
        told[flags] = of_ranks[0][0], [line for _, lines in of_ranks for line in lines]
    return told


# flags, balancers in force, words of what is said of the others
CASES = {
    "everything": (f"{ALL} --balance all", "experts sequences layers", ()),
    "a list": (f"{NO_CP} --balance experts,layers", "experts layers", ()),
    "beside a flag": (f"{ALL} --balance experts --balance-sequences", "experts sequences", ()),
    "all but what has nothing to balance": (
        "--pipeline-model-parallel-size 2 --balance all",
        "layers",
        ("--expert-model-parallel-size 1", "--context-parallel-size 1"),
    ),
    "all but what cannot run": (
        f"{ALL} --balance all --moe-routing-trace-path trace",
        "experts sequences",
        ("--balance all leaves layers off", "--moe-routing-trace-path trace", "use --balance-report"),
    ),
    "what sees no step": (f"{ALL} --balance all --skip-train", "sequences", ("--skip-train trains no step",)),
    "layers once": (f"{ALL} --balance all --balance-layers-once", "experts sequences layers", ()),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_in_force(parsed, case):
    flags, expected, words = CASES[case]
    (code, on, _), lines = parsed[flags]
    assert (code, on) == ("none", expected.split()), lines
    off = set(NAMES) - set(on) if "all" in flags.split() else set()
    told = [line for line in lines if "nothing to balance" in line or "--balance all leaves" in line]
    assert len(told) == len(off), "once for all ranks"
    for word in words:
        assert any(word in line for line in told), told


# flags, whether waits are filled
FILLED = {
    "few micro-batches a stage": (f"{NO_CP} --balance all --global-batch-size 8", True),
    "many": (f"{NO_CP} --balance all --global-batch-size 64", False),
    "a list": (f"{NO_CP} --balance experts,layers --global-batch-size 8", False),
    "messages overlapped": (
        f"{NO_CP} --balance all --global-batch-size 8 --moe-token-dispatcher-type alltoall "
        "--overlap-moe-expert-parallel-comm",
        False,
    ),
    "no pipeline": ("--expert-model-parallel-size 2 --balance all --global-batch-size 8", False),
}


@pytest.mark.parametrize("case", FILLED)
def test_waits_are_filled_where_that_pays(parsed, case):
    flags, expected = FILLED[case]
    (_, _, fills), lines = parsed[flags]
    assert fills == expected
    assert any("--balance all switches on --fill-with-weight-gradients" in line for line in lines) == expected


def test_a_validation_alone_is_that_of_a_run_without(pool, tmp_path):
    """Experts and layers stay off, sequences are spread."""
    documents = write_documents(tmp_path / "documents", heavy_tailed(400, seed=1))
    documents[documents.index("100,0,0")] = "50,50,0"
    base = [*MODEL, *documents, *MOE, *EXACT, "--dataloader-inter-document-masking", "--skip-train"]
    base += "--eval-interval 1 --eval-iters 2 --expert-model-parallel-size 2 --pipeline-model-parallel-size 2".split()
    reference = train(pool, 4, base=base)
    assert len(reference.validation) == 1 and not reference.losses
    validation = train(pool, 4, "--balance experts,layers,sequences", base=base).validation
    assert validation == pytest.approx(reference.validation, rel=1e-12, abs=0)


REFUSED = {
    "no balancer": ("--balance expert", "--balance expert: 'expert' is not a balancer; use all"),
    "nothing": ("--balance ,", "'' is not a balancer"),
    "named, and cannot run": (f"{ALL} --balance sequences --qk-clip", "--balance-sequences is incompatible with"),
    "its own flag, and cannot run": (f"{ALL} --balance all --balance-sequences --qk-clip", "is incompatible with"),
    "settings of what cannot run": (
        f"{ALL} --balance all {settings('sequences', planner='ring')} --qk-clip",
        "only if none of its settings is given",
    ),
    "wrong without it, too": ("--expert-model-parallel-size 4 --num-experts 6 --balance all", "not a multiple of"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(parsed, case):
    flags, words = REFUSED[case]
    (code, *_), lines = parsed[flags]
    (line,) = [line for line in lines if "error" in line] or lines
    assert code == 2 and words in line
