"""Gains that forecasts promise beside gains that others measured.

The models and layouts of those runs are not published in full, so these are the nearest jobs. UltraEP names its models
and EP64, "further scaled by DP or PP", in one NVLink domain. Taken is GB200 in bf16, whose even steps have the TFLOP/s
that it publishes, and the layers, batch and micro-batches of Megatron-Bridge's recipes for that machine.
"""

from dataclasses import dataclass, replace

from balancing_tools.whatif.forecast import forecast
from balancing_tools.whatif.job import read_flags
from balancing_tools.whatif.step import StepModel
from benchmarks.whatif.published import forecast_step, machine, read_published

__all__ = ["GAINS", "Gain", "compare_gains"]

MIXTRAL = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --swiglu --vocab-size 32000 --seq-length 8192 --micro-batch-size 1 --global-batch-size 128 "
    "--num-experts 8 --moe-token-dispatcher-type alltoall --expert-tensor-parallel-size 1 --use-distributed-optimizer "
    "--expert-model-parallel-size 4"
)
LLAMA13 = (
    "--num-layers 40 --hidden-size 5120 --ffn-hidden-size 13824 --num-attention-heads 40 --swiglu --vocab-size 32000 "
    "--seq-length 131072 --micro-batch-size 1 --global-batch-size 64 --context-parallel-size 8 "
    "--sequence-micro-batches --pipeline-model-parallel-size 8 --use-distributed-optimizer "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
)
GLM106 = (
    "--num-layers 46 --moe-layer-freq [0]+[1]*45 --hidden-size 4096 --ffn-hidden-size 10944 --num-attention-heads 96 "
    "--kv-channels 128 --group-query-attention --num-query-groups 8 --swiglu --num-experts 128 --moe-router-topk 8 "
    "--moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 1408 --vocab-size 151552 --seq-length 4096 "
    "--untie-embeddings-and-output-weights --micro-batch-size 1 --global-batch-size 1024 --use-distributed-optimizer "
    "--overlap-grad-reduce --overlap-param-gather --moe-token-dispatcher-type flex --expert-tensor-parallel-size 1 "
    "--expert-model-parallel-size 64"
)

# What was measured, the job and machine nearest to it, skew of experts, lengths of documents, the published gain in
# times faster, and how many times faster even routing was. A job is flags, or a row of published.json made as wide as
# UltraEP's.
_WIDE = {"expert_model_parallel_size": 64, "pipeline_model_parallel_size": 4}
GAINS = (
    ("LAER-MoE, 24 settings, 32 A100", MIXTRAL, "a800-4x200g", 32, "laer", None, "1.11 to 1.69, mean 1.48", None),
    ("UltraEP, GLM4.5-106B", GLM106, "gb200-72x400g", 64, "ultraep-glm", None, "1.39", 1.44),
    ("UltraEP, Qwen3-235B", "q235_gb200_bf16_256", "gb200-72x400g", 256, "ultraep-qwen3", None, "1.66", 1.82),
    ("UltraEP, DeepSeek-V3", "ds_gb200_bf16_256", "gb200-72x400g", 256, "ultraep-low", None, "1.20", 1.25),
    ("dynamic CP, Llama 13B, PP 8 CP 8", LLAMA13, "h100-8x400g", 64, "even", "web", "1.25 to 1.48", None),
)


@dataclass(frozen=True)
class Gain:
    """One row of `GAINS`.

    none, balanced, even: forecast seconds of a step without the balancer, with it, and with even routing.
    published: the gain of the balancer, in words.
    published_even: times that even routing was faster; None where not published.
    imbalance: busiest over mean, without and with.
    """

    name: str
    none: float
    balanced: float
    even: float
    published: str
    published_even: float | None
    imbalance: tuple[float, float]

    @property
    def error(self) -> float | None:
        """The forecast gain of even routing over the published one, less 1."""
        return None if self.published_even is None else self.none / self.even / self.published_even - 1


def compare_gains() -> list[Gain]:
    """All rows of `GAINS`."""
    known, rows = {row.name: row.job for row in read_published()}, []
    for name, flags, preset, gpus, routing, lengths, published, published_even in GAINS:
        balancer = "experts" if lengths is None else "sequences"
        job = replace(known[flags], **_WIDE) if flags in known else read_flags(flags.split()).on(gpus)
        cluster = machine(preset, gpus)
        found = {one.balancer: one for one in forecast(job, cluster, routing=routing, lengths=lengths)}
        none, one = found["none"], found[balancer]
        imbalance = getattr(none, balancer), getattr(one, balancer)
        even = forecast_step(StepModel(job, cluster))
        rows.append(Gain(name, none.step_seconds, one.step_seconds, even, published, published_even, imbalance))
    return rows
