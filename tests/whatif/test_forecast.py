"""What forecasts say of each balancer, and that they say so where nothing is to gain."""

import json

import numpy as np
import pytest

from balancing.cluster import Cluster
from balancing_tools.load_trace import LoadTrace, write_load_trace
from balancing_tools.whatif import SCENARIOS, forecast, read_flags, verdict
from balancing_tools.whatif.command import main
from balancing_tools.whatif.forecast import schedule_seconds, shorter
from balancing_tools.whatif.gains import ROUTING, expert_loads
from balancing_tools.whatif.routing import gini_popularity
from balancing_tools.whatif.step import StepModel
from benchmarks.layers.hybrid import MODELS, command_line
from benchmarks.whatif.gains import compare_gains
from tests.support.made_up_run import Job as MadeUp
from tests.support.made_up_run import write_run

MODEL = (
    "--num-layers 16 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --swiglu --vocab-size 128256 --micro-batch-size 1 --global-batch-size 128 "
    "--use-distributed-optimizer --untie-embeddings-and-output-weights"
)
EXPERTS = (
    f"{MODEL} --seq-length 4096 --num-experts 32 --moe-router-topk 4 --moe-token-dispatcher-type alltoall "
    "--moe-ffn-hidden-size 3584 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1"
)
LONG = f"{MODEL} --seq-length 131072 --context-parallel-size 16 --recompute-granularity full --recompute-method uniform"


def told(flags: str, gpus: int, preset: str = "h100-8x400g", **more):
    job = read_flags(flags.split()).on(gpus)
    return {one.balancer: one for one in forecast(job, Cluster.from_spec(preset, gpus), **more)}


def test_hot_experts_gain_and_even_ones_do_not():
    hot = told(EXPERTS, 16, routing="ultraep-high")
    assert hot["none"].experts == pytest.approx(4.0, abs=0.05) and hot["experts"].experts < 1.05
    assert hot["experts"].step_seconds < 0.75 * hot["none"].step_seconds
    assert hot["all"].step_seconds <= hot["experts"].step_seconds
    assert "--balance-experts" in verdict([*hot.values()]) and "not worth it" not in verdict([*hot.values()])
    even = told(EXPERTS, 16, routing="even")
    assert "not worth it" in verdict([*even.values()])
    assert even["experts"].step_seconds <= even["none"].step_seconds


def test_weight_gradients_fill_a_short_pipeline():
    """One micro-batch a stage waits most, many hardly at all, and parts of layers in turn leave nothing to fill."""
    pipeline = f"{MODEL} --seq-length 4096 --pipeline-model-parallel-size 8 --micro-batch-size 1"
    short, long = (told(f"{pipeline} --global-batch-size {count}", 8) for count in (8, 512))
    saved = [1 - each["fill"].step_seconds / each["none"].step_seconds for each in (short, long)]
    assert saved[0] > 0.15 and 0 < saved[1] < 0.02
    assert short["all"].step_seconds <= short["fill"].step_seconds
    assert short["fill"].bubble < short["none"].bubble
    assert "--fill-with-weight-gradients" in verdict([*short.values()])
    parts = told(f"{EXPERTS} --pipeline-model-parallel-size 4 --overlap-moe-expert-parallel-comm", 32)
    assert "in turn" in parts["fill"].off and parts["fill"].step_seconds == parts["none"].step_seconds


def test_even_routing_gains_what_was_published():
    """UltraEP's three models, within 15 %; nothing was fitted to them."""
    rows = [row for row in compare_gains() if row.error is not None]
    assert len(rows) == 3
    for row in rows:
        assert abs(row.error) < 0.15, row
        # Tokens come out even, and each replica costs its rank the rows of one more group.
        assert 0.99 * row.even <= row.balanced <= 1.02 * row.even and row.imbalance[1] < 1.05, row


def test_a_hot_rank_takes_longer_by_all_that_it_receives():
    """Exchanges, products, activation and sorting of tokens; a host that is slower than the device hides it."""
    job = read_flags(EXPERTS.split()).on(8)
    model = StepModel(job, Cluster.sheet("h100-8x400g"))
    counts = np.full((2, 8, 1, 1, 32), 512)
    counts[..., :4] *= 3  # the first rank's experts: 3 / 1.25 times the mean, within one node
    trace = LoadTrace(counts, np.arange(2), np.arange(1))
    ((hot, _),) = expert_loads(model, trace, np.random.default_rng(0)).seconds
    forward, backward = model.expert_seconds()
    assert sum(hot) == pytest.approx(2.4 * (forward + backward), rel=0.01)
    of_products = 2 * model.expert_parameters * 4 * job.tokens / (model.cluster.flops * model.efficiency.experts)
    assert model.expert_compute() > 1.2 * of_products


def test_replicas_take_memory():
    hot = told(EXPERTS, 16, routing="laer")
    assert hot["experts"].memory - hot["none"].memory == 2 * 3 * 4096 * 3584 * 8


def test_documents_of_data_parallel_ranks():
    """With one context-parallel rank, the data-parallel ranks share micro-batches, as runs do."""
    flags = f"{MODEL} --seq-length 32768 --tensor-model-parallel-size 4"
    shared = told(flags, 128, lengths="prolong")
    assert not shared["sequences"].off and shared["sequences"].step_seconds < 0.95 * shared["none"].step_seconds
    assert shared["none"].sequences > 1.5 and shared["sequences"].sequences < 1.05
    apart = told(f"{flags} --sequence-domain context", 128, lengths="prolong")
    assert apart["sequences"].off == "one rank for each micro-batch"
    assert apart["none"].step_seconds == shared["none"].step_seconds


def test_the_quicker_domain_is_forecast():
    """Of many replicas the slowest has far more than the mean; two share hardly more than they send."""
    flags = f"{MODEL} --seq-length 131072 --context-parallel-size 8 --global-batch-size 64"
    given = {
        (gpus, domain): told(f"{flags} --sequence-domain {domain}", gpus, lengths="prolong")["sequences"].step_seconds
        for gpus in (16, 512)
        for domain in ("auto", "context", "data")
    }
    for gpus in (16, 512):
        quicker = min(given[gpus, "context"], given[gpus, "data"])
        assert given[gpus, "auto"] <= 1.02 * quicker
    assert given[512, "data"] < 0.9 * given[512, "context"]


def test_dealt_micro_batches_do_not_wait_for_the_longest():
    flags = f"{MODEL} --seq-length 32768 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4"
    drawn, dealt = (told(f"{flags}{more}", 8, lengths="prolong") for more in ("", " --sequence-micro-batches"))
    assert drawn["sequences"].off == "one rank for each micro-batch" and not dealt["sequences"].off
    assert dealt["sequences"].step_seconds < 0.995 * drawn["none"].step_seconds


def test_an_uneven_pipeline_gets_another_layout():
    flags = f"{MODEL} --seq-length 4096 --pipeline-model-parallel-size 8"
    given = told(f"{flags} --pipeline-model-parallel-layout Ettttt|t|t|t|t|t|tt|ttttL", 8)
    assert given["layers"].layers < given["none"].layers and given["layers"].bubble < given["none"].bubble
    assert given["layers"].step_seconds < 0.75 * given["none"].step_seconds
    assert told(f"{MODEL} --seq-length 4096", 8)["layers"].off == "one pipeline stage"


def test_frozen_layers_idle_the_first_stages_until_layers_move():
    flags = f"{MODEL} --num-layers 32 --vocab-size 1024 --seq-length 4096 --pipeline-model-parallel-size 8"
    flags += " --train-iters 100 --freeze-layers"
    trains, frozen = told(f"{flags} 0", 8), told(f"{flags} 24", 8)
    assert frozen["none"].step_seconds < trains["none"].step_seconds, "six stages have no backward pass"
    # Frozen layers cost a third: 24 of them are as much as the other eight, and half of the stages take either.
    assert frozen["layers"].step_seconds < 0.7 * frozen["none"].step_seconds
    assert frozen["layers"].step_seconds < 0.7 * trains["layers"].step_seconds
    assert frozen["none"].memory >= trains["none"].memory, "a run begins with all layers training"
    assert frozen["none"].gpu_hours is None and trains["none"].gpu_hours is not None
    model = StepModel(read_flags(f"{flags} 24".split()).on(8), Cluster.from_spec("h100-8x400g", 8))
    few = shorter(model, 0.4)
    assert few is not None and few.stages < 8 and few.throughput >= 0.4
    assert shorter(model, 0.99) is None
    with pytest.raises(ValueError, match="--freeze-layers 33 is more than --num-layers 32"):
        told(f"{flags} 33", 8)


def test_long_schedules_are_those_of_the_simulator():
    flags = f"{MODEL} --seq-length 4096 --pipeline-model-parallel-size 4"
    chunks = " --num-layers-per-virtual-pipeline-stage 2"
    groups = f"{chunks} --microbatch-group-size-per-virtual-pipeline-stage 8 --overlap-moe-expert-parallel-comm"
    for more, count in (("", 37), (chunks, 40), (groups, 44)):
        job = read_flags((flags + more).split()).on(4)
        model = StepModel(job, Cluster.from_spec("h100-8x400g", 8))
        costs = model.costs(model.works())
        seconds, bubble = schedule_seconds(costs, job.plan, count, 1e-4, job.schedule)
        exact = costs.simulate(job.plan, count, transfer=1e-4, schedule=job.schedule)
        idle = 1 - (exact.end - exact.start).sum(axis=1).mean() / exact.step_time
        assert seconds == pytest.approx(exact.step_time, rel=1e-3) and bubble == pytest.approx(idle, abs=2e-3)


def test_skews_are_as_published():
    random = np.random.default_rng(0)
    for name, (kind, value) in ROUTING.items():
        if kind == "gini":
            shares = np.sort(gini_popularity(64, value, random))
            pairs = np.abs(shares[:, None] - shares[None, :]).mean() / 2 / shares.mean()
            assert pairs == pytest.approx(value, abs=1e-6), name
    assert [gini_popularity(8, 0.0, random)[0]] == [pytest.approx(1 / 8)]
    with pytest.raises(ValueError, match="must be at least 0 and less than"):
        gini_popularity(8, 1.5, random)


# The command.

FLAGS = ["--cluster", "h100-8x400g", "--gpus", "16,32", "--", *EXPERTS.split(), "--train-iters", "1000"]


def test_the_command_prints_and_writes(tmp_path, capsys):
    data = tmp_path / "data.json"
    assert main(["--routing", "laer", "--json", str(data), *FLAGS]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("On 16 GPUs balancing saves") and "On 32 GPUs" in text and "GPU-hours" in text
    assert "they overstate it, up to 2.35 times" in text and "a forecast, not a measurement" in text
    content = json.loads(data.read_text())
    assert [one["balancer"] for one in content["forecasts"]] == [*SCENARIOS] * 2
    one = content["forecasts"][0]
    assert one["gpu_hours"] == pytest.approx(one["step_seconds"] * 1000 * 16 / 3600)


def test_recorded_loads_and_lengths(tmp_path, capsys):
    counts = np.full((3, 8, 2, 1, 32), 512)
    counts[..., :4] *= 6  # the first rank's experts
    write_load_trace(LoadTrace(counts, np.arange(3), np.arange(2)), tmp_path / "loads.npz")
    np.savez(tmp_path / "lengths.npz", lengths=np.array([300, 4000, 90]))
    files = ["--routing", str(tmp_path / "loads.npz"), "--lengths", str(tmp_path / "lengths.npz")]
    assert main([*files, *FLAGS]) == 0
    row = next(line.split() for line in capsys.readouterr().out.splitlines() if line.split()[1:2] == ["none"])
    assert f"{6 * 8 / 13:.2f}" in row


def test_documents_are_spread_for_the_kernel_that_flags_name(tmp_path, capsys):
    steps = {}
    for backend in ("auto", "flash", "fused"):
        given = f"--cluster h100-8x400g --gpus 64 --lengths prolong -- {LONG} --attention-backend {backend}"
        assert main(["--json", str(tmp_path / "told.json"), *given.split()]) == 0
        rates = "cuDNN by Transformer Engine" if backend == "fused" else "FlashAttention 2"
        assert f"Documents are spread for the rates of {rates}" in " ".join(capsys.readouterr().out.split())
        rows = {one["balancer"]: one for one in json.loads((tmp_path / "told.json").read_text())["forecasts"]}
        steps[backend] = rows["sequences"]["step_seconds"] / rows["none"]["step_seconds"]
    assert steps["auto"] == steps["flash"] != steps["fused"]


def test_a_report_is_forecast(tmp_path, capsys):
    write_run(tmp_path, MadeUp(slow={0: 3.0, 1: 3.0}, hot={(2, 3): 4.0}), iterations=8)
    assert main([str(tmp_path), "--gpus", "8,16", "--iterations", "100", "--json", str(tmp_path / "told.json")]) == 0
    assert "Measured: 8 ranks" in capsys.readouterr().out
    rows = json.loads((tmp_path / "told.json").read_text())["forecasts"]
    none, layers, _, experts, fill, together = rows[:6]
    assert fill["step_seconds"] == none["step_seconds"], "the first stage is the slowest by far, and never waits"
    assert together["step_seconds"] < layers["step_seconds"], "even stages have waits to fill"
    assert layers["step_seconds"] < none["step_seconds"] and layers["layers"] < none["layers"]
    assert experts["experts"] < none["experts"] and together["step_seconds"] <= layers["step_seconds"]
    assert rows[6]["gpus"] == 16 and rows[6]["step_seconds"] < none["step_seconds"] and rows[6]["gpu_hours"] > 0


@pytest.mark.parametrize(
    "arguments, says",
    [
        ([], "give either DIR or"),
        (["missing"], "missing is not a directory"),
        (["--", *EXPERTS.split()], "which machine"),
        (["--cluster", "h100-8x400g", "--", *EXPERTS.split()], "how many GPUs"),
        (["--cluster", "h100-8x400g", "--gpus", "many", "--", *EXPERTS.split()], "--gpus many"),
        (["--cluster", "h99", "--gpus", "16", "--", *EXPERTS.split()], "h99"),
        (["--routing", "hot", *FLAGS], "unknown routing 'hot'"),
        (["--lengths", "short", *FLAGS], "unknown --lengths 'short'"),
        (["--cluster", "h100-8x400g", "--gpus", "12", "--", *EXPERTS.split()], "12 GPUs"),
        (["--iterations", "-5", *FLAGS], "-5 must be a whole number from 1"),
        (["--iterations", "5", *FLAGS, "--freeze-layers", "2"], "--iterations 5 has no effect with --freeze-layers 2"),
        (["--gpus", "1000000000000", "--cluster", "h100-8x400g", "--", *EXPERTS.split()], "from 1 to 1,000,000"),
        (["--routing", "laer", "--cluster", "h100-8x400g", "--gpus", "16", "--", *LONG.split()], "without experts"),
        (["DIR", "--lengths", "prolong"], "--lengths prolong has no effect on a recorded run"),
        (["DIR", "--routing", "dodoco-mha"], "--routing dodoco-mha has no effect on a recorded run"),
        (["DIR", "--cluster", "c.json"], "--cluster c.json has no effect on a recorded run"),
    ],
)
def test_bad_input_is_one_line(arguments, says, capsys):
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


def test_files_of_lengths(tmp_path, capsys):
    np.save(tmp_path / "square.npy", np.ones((3, 3)))
    np.save(tmp_path / "objects.npy", np.array([{}, None], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "empty.npz")
    for name, says in (
        ("square.npy", "has shape (3, 3)"),
        ("objects.npy", "holds Python objects"),
        ("empty.npz", "has shape (0,)"),
        ("none.npy", "cannot be read: No such file"),
    ):
        assert main(["--lengths", str(tmp_path / name), *FLAGS]) == 2
        said = capsys.readouterr().err
        assert says in said and str(tmp_path / name) in said and said.count("\n") == 1


def test_layers_of_a_pattern_are_cut_by_what_they_cost():
    """Nemotron 3 Nano: a layer of experts costs two or three of Mamba, and the head several."""
    found = told(command_line(MODELS["nemotron-3-nano"], stages=4, seq_length=8192), 64)
    assert found["layers"].step_seconds < 0.9 * found["none"].step_seconds
    assert found["layers"].layers < 1.1 < found["none"].layers
