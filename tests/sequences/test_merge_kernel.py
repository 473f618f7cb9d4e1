"""The kernel that merges partial results on a GPU: interpreted by Triton, equal to the reference; and compiled.

What it does on a GPU is tested with the kernels of attention, where there is one.
"""

import subprocess
import sys

import pytest
import torch

from balancing.sequences.engine import merging
from balancing.sequences.engine.merging import merge_rows
from tests.support.patience import PATIENCE
from tests.support.pool import single_threaded

pytest.importorskip("triton")


def test_the_kernel_merges_like_torch() -> None:
    """In a process of its own: Triton decides when it is imported whether kernels are interpreted."""
    code = "from tests.sequences.test_merge_kernel import compare; print(compare(), 'merges agree')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=single_threaded() | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert "8 merges agree" in done.stdout


def compare() -> int:
    """Merge with the kernel and with operations of torch, on the CPU, twice the same. How many merges there were."""
    from balancing.sequences.engine.merge_kernel import merge_rows_fused

    draw = torch.Generator().manual_seed(0)
    merges = 0
    for rows in (slice(3, 40), torch.randperm(50, generator=draw)[:37].int()):
        for size, more_type in ((16, torch.float32), (24, torch.float32), (64, torch.bfloat16), (128, torch.bfloat16)):
            out, more = (torch.randn(tokens, 3, size, generator=draw) for tokens in (50, 37))
            logsumexp, more_logsumexp = (8 * torch.randn(3, tokens, generator=draw) for tokens in (50, 37))
            more = more.to(more_type)
            found, again, expected = ((out.clone(), logsumexp.clone()) for _ in range(3))
            merge_rows_fused(*found, more, more_logsumexp, rows)
            merge_rows_fused(*again, more, more_logsumexp, rows)
            merge_rows(*expected, more, more_logsumexp, rows)
            assert all(torch.equal(*pair) for pair in zip(found, again, strict=True))
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
            merges += 1
    return merges


def test_operations_of_torch_take_over_where_the_kernel_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, without a device; on a device a kernel that merges wrongly is not used either."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    merging._fused.cache_clear()
    with pytest.warns(UserWarning, match="merged by operations of torch") as caught:
        assert merging.choose_merge(torch.device("cuda")) is merge_rows
    assert "\n" not in str(caught[0].message)
    merging._fused.cache_clear()
    assert merging.choose_merge(torch.device("cpu")) is merge_rows


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_the_kernel_compiles_for_gpus_without_spills(
    architecture: int, listed: bool, capsys: pytest.CaptureFixture[str], record_property: object
) -> None:
    from triton import compile
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from balancing.sequences.engine.merge_kernel import launch_options, merge_kernel

    if "nvidia" not in backends:
        pytest.skip("this Triton does not compile for Nvidia's GPUs")
    options = launch_options(128)
    constants = {name: options[name] for name in ("SIZE", "WIDTH", "TOKENS")} | {"LISTED": listed}
    pointers = {"out": "*fp32", "logsumexp": "*fp32", "more_out": "*bf16", "more_logsumexp": "*fp32", "rows": "*i32"}
    types = {name: pointers.get(name, "constexpr" if name in constants else "i32") for name in merge_kernel.arg_names}
    target = GPUTarget("cuda", architecture, 32)
    compiled = compile(
        ASTSource(merge_kernel, types, constexprs=constants),
        target=target,
        options={"num_warps": options["num_warps"]},
    )
    registers, spills = resources(compiled.asm["cubin"])
    with capsys.disabled():
        print(f"\nmerge kernel, sm_{architecture}, rows {'listed' if listed else 'adjacent'}: ", end="")
        print(f"{registers} registers, {spills} bytes spilled")
    assert spills == 0 and registers <= 128


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread and bytes of its stack, by the tool that Triton brings."""
    import tempfile

    from triton.knobs import nvidia

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        dumped = subprocess.run(
            [nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE,
        ).stdout
    (line,) = (line for line in dumped.splitlines() if "REG:" in line)
    fields = dict(part.split(":", 1) for part in line.split() if ":" in part)
    return int(fields["REG"]), int(fields["STACK"]) + int(fields["LOCAL"])
