"""The parts of the acceptance run on the CPU device, so that on a GPU nothing but the GPU is new."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.gpu.__main__ import run_part
from tests.gpu.costs import kind_of
from tests.gpu.parts import PARTS
from tests.gpu.routes import first_flip, flipped
from tests.gpu.training import REORDERED, Comparison, Told
from tests.gpu.trial import Machine, Notes, Trial
from tests.support.patience import PATIENCE
from tests.support.pool import REPOSITORY


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_a_part_on_the_cpu_device(part, request, tmp_path):
    """te-context needs Transformer Engine's own Python over stand-ins for its kernels."""
    pool = request.getfixturevalue("engine" if part.name == "te-context" else "pool")
    results = tmp_path / "results.jsonl"
    word, said, runs, _ = run_part(part, pool, Machine(), Notes(part.name, results), 3 * PATIENCE)
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    if word == "not run":
        pytest.skip(said)
    assert word == "passed", "\n".join([said, *(line["detail"] for line in lines if "detail" in line)])
    assert any("figure" in line for line in lines) and runs <= sum("at" in line for line in lines)


def test_what_starts_the_parts_does_not_import_torch():
    """Which takes long beside a GPU, and the server that ranks are forks of has it."""
    modules = sorted({f"tests.gpu.{part.test.partition('.')[0]}" for part in PARTS if ":" not in part.test})
    modules += ["tests.gpu.__main__", "tests.gpu.machine"]
    code = f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\n"
    code += "sys.exit(' '.join({'torch', 'megatron.core', 'pytest'} & {*sys.modules}) or 0)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr


class _Trial(Trial):
    """That only takes notes."""

    def __init__(self, results: Path) -> None:
        super().__init__(None, Machine(1), Notes("experts", results), results.parent)  # type: ignore[arg-type]


def test_a_comparison_shows_each_iteration_and_its_own_noise(tmp_path):
    """Of both runs; a loss out of bounds fails, in fp32 also a product in TF32, and a run in TF32 is only shown."""
    results = tmp_path / "results.jsonl"
    trial, reference, again = _Trial(results), [Told([5.0, 4.0]), Told()], [Told([5.0, 4.000004]), Told()]
    seen = Comparison(trial, "fp32", reference, again, [5.0, 4.00004])
    seen.check("shared", [Told([5.0, 4.0002]), Told()])
    with pytest.raises(AssertionError, match=r"resident, fp32: a loss differs by 1.8e-04 .* 0 1.8e-04 by .* 0 1.0e-06"):
        seen.check("resident", [Told([5.0, 4.00072]), Told()])
    seen.figure()
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert lines[0]["detail"] == ("fp32, the reference 5.000000 4.000000; a CPU's 5.000000 4.000040, apart 0 1.0e-05")
    shared = "losses 5.000000 4.000200, the reference's 5.000000 4.000000, apart 0 5.0e-05"
    assert lines[1]["detail"].endswith(f"{shared}, the reference once more 0 1.0e-06")
    assert lines[-1]["figure"] == "fp32: losses within 1.8e-04 (resident), noise 1.0e-06, a CPU's within 1.0e-05"
    with pytest.raises(AssertionError, match="from a CPU's losses"):
        Comparison(trial, "fp32", reference, again, [5.1, 4.0])
    reference[1].rounding = ("Transformer Engine",)
    with pytest.raises(AssertionError, match=r"Transformer Engine.* multiplies in TF32"):
        Comparison(trial, "fp32", reference, again)
    seen.check("free", [Told([5.0, 4.4]), Told()], iterations=1)  # a route flipped in the second
    with pytest.raises(AssertionError, match=r"fixed, fp32: a loss differs by 5.0e-05"):
        seen.check("fixed", [Told([5.0, 4.0002]), Told()], within=REORDERED)


def test_routes_that_flip_are_counted_by_iteration():
    def told(*maps: list[list[int]]) -> Told:
        return Told(routes={1: [np.packbits(np.array(each, bool)).tobytes() for each in maps]})

    first, other = [[1, 0, 0], [0, 1, 0]], [[1, 0, 0], [0, 0, 1]]
    reference = [told(first, first, first, first), told(other, other, other, other)]
    assert flipped(reference, reference, 2) == ([0, 0], 8)
    later = [told(first, first, first, other), told(other, other, first, first)]
    assert flipped(later, reference, 2) == ([0, 3], 8)
    assert (first_flip(later, reference, 2), first_flip(reference, reference, 2)) == (1, 2)


def test_device_time_is_told_by_kind():
    """By names of kernels as a profile of an H200 has them."""
    kinds = {
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x4x1_cga1x1": "attention",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false>>": "attention",
        "void cudnn::fusion::compute_dot_do_o_ragged_specialized<true, 128>(void const*": "helpers of attention",
        "void cudnn::fusion::fmha_reduce_head_ragged<true>(void const*, void*)": "helpers of attention",
        "void pytorch_flash::flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits<128>>": "helpers of attention",
        "add_kernel": "sums",
        "merge_kernel": "merges",
        "Memset (Device)": "copies and fills",
        "void at::native::vectorized_elementwise_kernel<8, at::native::FillFunctor<float>>": "copies and fills",
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": "other",
    }
    assert {name: kind_of(name) for name in kinds} == kinds


def test_the_engine_is_imported_before_the_library_that_is_linked_against_it():
    """Alone, `transformer_engine_torch` lacks the symbols of the library that `transformer_engine` loads. Stand-ins do
    not show that."""
    seen = 0
    for path in [
        path for folder in ("balancing*", "megatron", "tests") for path in REPOSITORY.glob(f"{folder}/**/*.py")
    ]:
        tree = ast.parse(path.read_text())
        for scope in [node for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.FunctionDef))]:
            loaded = []
            for node in scope.body:
                if isinstance(node, ast.Import):
                    loaded += [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    loaded.append(node.module or "")
            if "transformer_engine_torch" in loaded:
                before = [name.partition(".")[0] for name in loaded[: loaded.index("transformer_engine_torch")]]
                where = f"{path.relative_to(REPOSITORY)}:{getattr(scope, 'name', '')}"
                assert "transformer_engine" in before or path.parent.name == "transformer_engine", where
                seen += "gpu" in path.parts
    assert seen == 1


def _one_key_too_many() -> tuple[float, float]:
    import torch

    from balancing.kernels.base import Pieces
    from tests.gpu.attention import BATCHES, TOLERANCE, _error, _inputs, _reference

    right = BATCHES["single tokens"]
    inputs = _inputs(right, 2, torch.device("cpu"), torch.float32, 64)
    wrong, found = (_reference(inputs, pieces) for pieces in (Pieces((1, 1, 1), (2, 8, 3), True), right))
    return _error(wrong[0], found[0]), TOLERANCE[torch.bfloat16]


def test_the_tolerance_finds_a_wrong_kernel(pool):
    """It is smaller than what one key too many does."""
    ((error, tolerance),) = pool.run(1, _one_key_too_many)
    assert error > 10 * tolerance


def _late_by_other_names() -> list[int]:
    """How often something was late in a gather: by torch's name, then by those that Megatron-LM keeps."""
    import torch
    import torch.distributed as dist
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.tensor_parallel import mappings

    from tests.gpu.late_streams import make_late
    from tests.gpu.training import Told

    dist.init_process_group("gloo")
    told = Told()
    make_late("main", told)
    counts = []
    kept = [module.dist_all_gather_func for module in (mappings, param_and_grad_buffer)]
    for gather in (dist.all_gather_into_tensor, *kept):
        before = told.late
        gather(torch.empty(4), torch.ones(4))
        counts.append(told.late - before)
    return counts


def test_messages_that_megatron_looked_up_before_are_late_too(pool):
    ((by_torchs_name, *by_kept_names),) = pool.run(1, _late_by_other_names)
    assert by_torchs_name > 0 and by_kept_names == [by_torchs_name] * 2
