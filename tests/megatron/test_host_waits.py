"""In a steady training step the host waits for the device only where Megatron-LM does, and where a list says why."""

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.sampled import sampled
from tests.support.settings import EARLY_EXIT, HASH_ATTENTION, PLASTICITY, scheme_flags, settings
from tests.support.training import MOCK_DATA, MODEL, MOE, train_rank

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = "--train-iters 4 --attention-dropout 0 --hidden-dropout 0".split()
FIRST, LAST = 2, 4  # iterations that are counted, from the end of the one before; in the first ones, tables are made

PP2 = "--pipeline-model-parallel-size 2"
EP2 = f"{' '.join(MOE)} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
DOCUMENTS = "--dataloader-inter-document-masking"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
EXPERTS = f"--balance-experts {settings('experts', min_gain=0)}"
REPORT = "--balance-report report"

# What Megatron-LM waits for is measured without balancers.
MEGATRON = {
    "pipelines": (2, PP2),
    "experts": (2, f"{EP2} {OVERLAPS}"),
    "documents, tensor-parallel": (2, f"{TP2} {OVERLAPS} {DOCUMENTS}"),
}
# ranks, flags
RUNS = {
    "experts": (2, f"{EP2} {OVERLAPS} {EXPERTS}"),
    "experts, shared slots, report": (
        2,
        f"{EP2} {EXPERTS} --bf16 {settings('experts', replica_mode='shared')} --cluster a800-4x200g {REPORT}",
    ),
    "sequences": (2, f"--context-parallel-size 2 --balance-sequences {DOCUMENTS} {OVERLAPS}"),
    "sequences, tensor-parallel, report": (
        4,
        f"--context-parallel-size 2 {TP2} --balance-sequences {DOCUMENTS} {REPORT}",
    ),
    "sequences, micro-batches": (2, f"{PP2} --balance-sequences --sequence-micro-batches {DOCUMENTS}"),
    "layers": (2, f"{PP2} --balance-layers --layer-balance-interval 100 {OVERLAPS}"),
    "layers, documents": (2, f"{PP2} --balance-layers --layer-balance-interval 100 {DOCUMENTS}"),
    "layers, experts, report": (4, f"{PP2} --balance-layers --layer-balance-interval 100 {EP2} {EXPERTS} {REPORT}"),
    "early exit": (2, f"{PP2} {EARLY_EXIT} {scheme_flags(early_exit_layers=[1, 2], early_exit_threshold=0.5)}"),
    "pruning, mixture of depths, sparse attention": (
        2,
        f"{PP2} {scheme_flags(prune_sparsity=0.8, prune_end=1, prune_interval=1, prune_sparse_density=0.6)} "
        f"{scheme_flags(mixture_of_depths=0.5)} {HASH_ATTENTION}",
    ),
    "freezing by plasticity": (
        2,
        f"{PP2} --untie-embeddings-and-output-weights --freeze-layers 2 --freeze-layers-interval 1 {PLASTICITY}",
    ),
}
MEASUREMENT = "a measurement of plasticity, every --freeze-layers-interval iterations"
# Where this package waits, what for, and why.
ALLOWED: dict[tuple[str, str], str] = {
    (
        "balancing/experts/engine/slots.py:ReplicaSlots.take_statistics",
        "synchronize event",
    ): "with --balance-report, for a time in the backward pass, which the gradient norm has waited for",
    (
        "balancing/sequences/engine/transport.py:Statistics.exposed_seconds",
        "synchronize event",
    ): "likewise",
    (
        "megatron/balanced/local/packed_attention.py:PackedDotProductAttention.forward",
        "tolist",
    ): "without Transformer Engine each document is attended to by itself",
    (
        "megatron/balanced/trainer/data.py:_packed_parameters",
        "item",
    ): "kernels for packed documents take the longest one as a number; Megatron-LM's entry script waits for it, too",
    (
        "examples/dynamic_models/schemes/gather_tokens.py:tokens_of",
        "item",
    ): "the number of tokens left is a shape; once an exit",
    ("examples/dynamic_models/schemes/freezing.py:similarity_loss", "item"): MEASUREMENT,
    ("examples/dynamic_models/plasticity.py:Plasticity.end_step", "copy to the device"): MEASUREMENT,
    ("examples/dynamic_models/plasticity.py:Plasticity.end_step", "tolist"): MEASUREMENT,
}


def _waits(argv: list[str]) -> Counter[tuple[str, str]]:
    """The waits of one rank, on the paths of a GPU."""
    from balancing.clock import CudaClock
    from megatron.balanced.experts import moe_layer
    from megatron.balanced.observe import observer
    from megatron.balanced.shared.callbacks import StepCallback
    from tests.support.checkers.host_waits import WaitCounter
    from tests.support.stand_ins import split_kernels

    counter = WaitCounter().install()
    moe_layer.is_cpu = lambda: False
    split_kernels.install()
    observer.CpuClock = CudaClock

    class Window(StepCallback):
        """From the end of a step to that of another."""

        def begin_step(self, iteration: int, config: Any) -> None:
            self.iteration = iteration

        def end_step(self) -> None:
            counter.on = FIRST - 1 <= self.iteration < LAST - 1

    assert train_rank(argv, False, callbacks=[Window()]).replicas != 0, "no expert had a replica"
    return counter.waits


@pytest.fixture(scope="module")
def waits(pool, tmp_path_factory):
    """Gives the waits of a run, by ranks and flags: the most of any rank."""

    @cache
    def of(ranks: int, flags: str) -> Counter[tuple[str, str]]:
        folder = tmp_path_factory.mktemp("report")
        argv = [*MODEL, *MOCK_DATA, *STEPS, *flags.replace(REPORT, f"--balance-report {folder}").split()]
        most: Counter[tuple[str, str]] = Counter()
        for rank in pool.run(ranks, _waits, argv):
            most |= rank
        return most

    return of


def _of_megatron(waits: Counter[tuple[str, str]]) -> set[tuple[str, str]]:
    return {key for key in waits if key[0].startswith("Megatron-LM ")}


@pytest.mark.parametrize(
    "case",
    sampled(RUNS, "experts, shared slots, report", "sequences", "sequences, micro-batches", "layers", "early exit"),
)
def test_waits_in_a_steady_step(waits, case):
    theirs = set().union(*(_of_megatron(waits(*run)) for run in MEGATRON.values()))
    assert ("Megatron-LM core/optimizer/clip_grads.py:get_grad_norm_fp32", "item") in theirs
    found = waits(*RUNS[case])
    assert _of_megatron(found) - theirs == set(), "Megatron-LM waits for what it is given"
    ours = {key: count for key, count in found.items() if key not in theirs and key not in ALLOWED}
    assert ours == {}


@pytest.mark.exhaustive
def test_the_list_has_nothing_that_is_gone(waits):
    found = set().union(*(waits(*run) for run in RUNS.values()))
    assert ALLOWED.keys() - found == set()


# What is counted of statements on `device`, float [4] on the device, and `host` and `pinned`, float [4] of the host.
WAITS = {
    "device.sum().item()": "item",
    "bool(device.any())": "item",
    "int(device[0])": "item",
    "float(device[0] + host[0])": "item",
    "device.tolist()": "tolist",
    "device.cpu()": "copy to the host",
    "device.to('cpu')": "copy to the host",
    "host.copy_(device)": "copy to the host",
    "host.cuda()": "copy to the device",
    "host.to('cuda')": "copy to the device",
    "host.to(device.device, non_blocking=True)": "copy to the device",  # from ordinary memory
    "torch.tensor([1.0], device='cuda')": "copy to the device",
    "device.copy_(host)": "copy to the device",
    "device[torch.tensor([0, 1])]": "copy to the device",
    "device.nonzero()": "nonzero",
    "device[device > 1]": "nonzero",
    "torch.bincount(device.long())": "bincount",
    "device.repeat_interleave(device.long())": "repeat_interleave",
    "torch.cuda.synchronize()": "synchronize device",
    "torch.cuda.current_stream().synchronize()": "synchronize stream",
    "torch.cuda.Event().synchronize()": "synchronize event",
    "host.sum().item(); host.tolist(); host.cpu(); host[host > 1]": None,
    "pinned.to('cuda', non_blocking=True) + device": None,
    "device.copy_(pinned, non_blocking=True)": None,
    "device.to('cpu', non_blocking=True)": None,
    "device.to(torch.float64).sum() + torch.zeros(4, device='cuda')": None,
    "device[device.long()].where(device > 1, 0.0)": None,
    "device.repeat_interleave(device.long(), output_size=6)": None,
}


def _planted(statements: list[str]) -> list[dict[tuple[str, str], int]]:
    """The waits of each statement, as if it stood in this package."""
    import torch

    from tests.support.checkers.host_waits import WaitCounter

    counter = WaitCounter().install()
    host, found = torch.tensor([0.0, 1.0, 2.0, 3.0]), []
    for statement in statements:
        known = {"torch": torch, "host": host.clone(), "pinned": host.clone().pin_memory(), "device": host.cuda()}
        code = f"def planted():\n    {statement}\nplanted()"
        counter.waits.clear()
        counter.on = True
        exec(compile(code, str(REPOSITORY / "balancing/planted.py"), "exec"), known)
        counter.on = False
        found.append(dict(counter.waits))
    return found


def test_planted_waits_are_counted(pool):
    (found,) = pool.run(1, _planted, list(WAITS))
    for (statement, kind), counted in zip(WAITS.items(), found, strict=True):
        assert counted == ({} if kind is None else {("balancing/planted.py:planted", kind): 1}), statement
