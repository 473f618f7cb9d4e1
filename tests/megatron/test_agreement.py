"""Ranks that would do different things are refused in one line before they exchange anything."""

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import balancing
from benchmarks.emulated.ports import reserved_ports
from megatron.balanced.trainer import agreement
from megatron.balanced.trainer.agreement import _difference
from tests.support.command import run_command
from tests.support.refusals import started_anew
from tests.support.settings import settings
from tests.support.training import MOCK_DATA, MODEL, MOE

ROOT = Path(__file__).parents[2]
BASE = [*MODEL, *MOCK_DATA]


def _start(argv: list[str], own: dict[int, str]) -> tuple[object, str]:
    """Run the command on this rank with flags of its own. Returns its exit code and stderr."""
    return run_command([*argv, *own.get(int(os.environ["RANK"]), "").split()])


def _line(results: list[tuple[object, str]]) -> str:
    """The only line that ranks said, all of which were refused."""
    assert [code for code, _ in results] == [2] * len(results), results
    (line,) = "".join(text for _, text in results).splitlines()
    return line


DIFFERENT = {
    "report on one rank": ({0: "--balance-report FOLDER"}, "--balance-report is True on rank 0 and False on rank 1"),
    "layers": ({0: "--num-layers 4", 1: "--num-layers 6"}, "--num-layers is 4 on rank 0 and 6 on rank 1"),
    "steps": ({1: "--train-iters 6"}, "--train-iters is 4 on rank 0 and 6 on rank 1"),
    "learning rate": ({1: "--lr 5e-3"}, "--lr is 0.001 on rank 0 and 0.005 on rank 1"),
    "a balancer": ({0: "--balance-experts"}, "--balance-experts is True on rank 0 and False on rank 1"),
    "balancers": ({0: "--balance all", 1: "--balance experts"}, "--balance is 'all' on rank 0 and 'experts' on rank 1"),
    "launch": (
        {0: "--balance-experts", 1: "--balance-experts UNSET"},
        "CUDA_DEVICE_MAX_CONNECTIONS is 1 on rank 0 and not set on rank 1",
    ),
    "seed": ({1: "--seed 4"}, "--seed is 1234 on rank 0 and 4 on rank 1"),
    "slots of a balancer": (
        {0: "--balance-experts", 1: "--balance-experts --expert-replica-slots 1"},
        "--expert-replica-slots is 2 on rank 0 and 1 on rank 1",
    ),
    "planner of a balancer": (
        {
            rank: f"--balance-experts {settings('experts', planner=name)}"
            for rank, name in enumerate(("quota", "prophet"))
        },
        "--experts.planner is 'quota' on rank 0 and 'prophet' on rank 1",
    ),
}


def _start_each(argv: list[str], cases: list[dict[int, str]], folder: str) -> list[tuple[object, str]]:
    """Run the command on this rank once a case, with flags of its own."""
    rank = int(os.environ["RANK"])
    each = [[*argv, *own.get(rank, "").replace("FOLDER", folder).split()] for own in cases]
    return started_anew(each, _run_unset)


def _run_unset(argv: list[str]) -> tuple[object, str]:
    connections = os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
    if "UNSET" in argv:
        del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
    try:
        return run_command([flag for flag in argv if flag != "UNSET"])
    finally:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = connections


def test_flags_that_differ_are_named_with_ranks_and_values(pool, tmp_path):
    argv = [*BASE, *MOE, "--expert-model-parallel-size", "2"]
    cases = [own for own, _ in DIFFERENT.values()]
    results = zip(*pool.run(2, _start_each, argv, cases, str(tmp_path)), strict=True)
    for (_, words), said in zip(DIFFERENT.values(), results, strict=True):
        assert _line(list(said)).startswith(f"pretrain_gpt.py: error: ranks differ: {words}"), said


def _other_code(argv: list[str], change: str) -> tuple[object, str]:
    """The last rank has another version of the code, of torch, or another device."""
    if os.environ["RANK"] == "2":
        if change == "version":
            balancing.__version__ = "9.9.9"
        elif change == "source":
            agreement._source = lambda: "another"
        elif change == "torch":
            torch.__version__ = "1.0"
        else:
            settle = agreement._values

            def on_a_gpu(args: object, config: object) -> dict[str, str]:
                return settle(args, config) | {"--device": "'cuda'"}

            agreement._values = on_a_gpu
    return _start(argv, {})


@pytest.mark.parametrize("change", ["version", "source", "torch", "device"])
def test_code_and_device_are_compared(pool, change):
    line = _line(pool.run(3, _other_code, [*BASE, "--global-batch-size", "3"], change))
    name = {"version": "the version of Megatron-Balance is ", "source": "the hash of its source is "}
    assert name.get(change, change) in line and " on ranks 0-1 and " in line and " on rank 2; " in line


def test_the_source_is_hashed_whole(tmp_path, monkeypatch):
    """A changed file of either package changes the hash."""
    for package in ("balancing", "megatron/balanced"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    hashes = [agreement._source()]
    for module in (balancing, agreement):
        monkeypatch.setattr(module, "__file__", str(tmp_path / Path(module.__file__).relative_to(ROOT)))
    assert agreement._source() == hashes[0]
    for changed in ("balancing/layers/plan.py", "megatron/balanced/layers/mover.py"):
        with (tmp_path / changed).open("a") as file:
            file.write("# changed\n")
        hashes.append(agreement._source())
    assert len({*hashes}) == 3, hashes


def test_paths_may_differ(pool, tmp_path):
    """Each host may keep its files where it wants."""
    own = {rank: f"--tensorboard-dir {tmp_path / str(rank)}" for rank in range(2)}
    results = pool.run(2, _start, [*BASE, "--train-iters", "1"], own)
    assert [code for code, _ in results] == [0, 0], results


def test_a_rank_that_fails_before_ends_the_others(pool):
    """They would wait ten minutes for it."""
    results = pool.run(2, _start, BASE, {1: "--balance nothing"})
    assert results[1][0] == 2
    told = [line for line in "".join(text for _, text in results).splitlines() if "error:" in line]
    assert len(told) == 1 and "--balance nothing" in told[0] and "(rank 1 of 2)" in told[0], told


def test_few_differences_are_shown_those_of_the_command_line_first():
    values = [{f"--flag-{number}": str(rank) for number in range(9)} | {"--lr": str(rank)} for rank in range(2)]
    answers = [{"values": known, "given": ["--lr"]} for known in values]
    line = _difference([[0, 2, 3], [1]], answers)
    assert line.startswith("ranks differ: --lr is 0 on ranks 0, 2-3 and 1 on rank 1; --flag-0 is 0 on ")
    assert "(and 7 more)" in line and "--flag-8" not in line


def _many_ranks(count: int) -> tuple[list[object], float]:
    """Ranks as threads against one store: what each is told, and requests to the store a rank, without those that ask
    again for what is not there yet, of which there are more on a busy machine."""
    agreement.rank = lambda: local.rank
    agreement.world_size = lambda: count
    agreement._comparisons = iter([0] * count)
    local, requests = threading.local(), []

    class Counted(dist.PrefixStore):
        pass

    for name in ("set", "get", "check", "multi_get"):

        def counted(store: Any, *args: Any, name: str = name) -> Any:
            answer = getattr(super(Counted, store), name)(*args)
            if name != "check" or answer:
                requests.append(name)
            return answer

        setattr(Counted, name, counted)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agreement.open_store = lambda name, *, anew=False: server
    agreement.dist.PrefixStore = Counted

    def one(rank: int) -> object:
        local.rank = rank
        return agreement._compare({"--lr": "2" if rank == count - 1 else "1"}, {"--lr"})

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(one, range(count))), len(requests) / count


def test_many_ranks(pool):
    """No rank but the first asks for what all the others have posted."""
    ((told, requests),) = pool.run(1, _many_ranks, 200)
    assert {*told} == {"ranks differ: --lr is 1 on ranks 0-198 and 2 on rank 199"}
    assert requests < 10


def _meet(port: int) -> float:
    """Open the job's store before torch does, without a launcher's; the process groups then meet in it."""
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(port)}
    from megatron.balanced.trainer import rendezvous

    rendezvous.join_job()
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    return float(total)


def test_process_groups_meet_in_the_same_store(pool):
    with reserved_ports(1) as (port,):
        assert pool.run(3, _meet, port) == [3.0] * 3
