"""The balanced step of a job: seconds and bytes of its parts, from the model's sizes and fitted constants.

- Arithmetic is counted from the model's shapes: matrix products of attention projections, MLPs, experts and the head;
  attention by query-key pairs; everything else by bytes of memory read and written.
- Communication is counted in bytes and takes as long as its busiest link (`balancing.cluster.Cluster`).
- `Efficiency` says how far kernels stay below the speed of large matrix products, and how much communication stays
  exposed: one number for each kind of work, the same for all GPUs, fitted to published runs
  (`python -m benchmarks.whatif`). docs/whatif.md and every forecast state the error.

Not modelled: congestion of networks, optimizers and activations kept on the host, CUDA graphs, the time to recompute
single modules other than attention and experts. The host and the launches of kernels are two constants; jobs of many
small kernels are slower than forecast.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from balancing.cluster import Cluster
from balancing.cluster.links import exchange_seconds
from balancing.kernels.pairs import pair_flops
from balancing.layers.cost import LayerSeconds
from balancing.layers.memory import LayerMemory, stage_memory
from balancing.pipeline.stage_plan import StagePlan
from balancing_tools.whatif.job import Job, has_attention

__all__ = ["FITTED", "FITTED_ERROR", "Efficiency", "LayerWork", "StepModel"]

_BYTES = 2  # of bf16
# `Cluster` has no speed of device memory. It is computed from FLOP/s of large matrix products over bytes/s of memory:
# 225 on B200, 236 on H100, 250 on GB300; 125 on A100 and A800, whose products reach less than 400 TFLOP/s.
_FLOPS_OF_A_BYTE, _AMPERE_FLOPS_OF_A_BYTE, _AMPERE_FLOPS = 230.0, 125.0, 400e12
_ATTENTION_BACKWARD = 2.5  # over forward, of flash attention; linear layers take 2
# Times that device memory is read or written. _HIDDEN_TRIPS: by norms, residuals, rotary embedding and dropout of a
# layer, forward, over the bytes of an activation of width hidden. _FFN_TRIPS: by an MLP's activation function, over the
# bytes of the input of its second product. _SENT_TRIPS: copies of tokens are written before they are sent and read when
# they are back. _SORT_TRIPS: received tokens are sorted by expert and back, and read and written each time.
# _LOGIT_TRIPS: by the loss, over the bytes of the logits.
_HIDDEN_TRIPS, _FFN_TRIPS, _SENT_TRIPS, _SORT_TRIPS, _LOGIT_TRIPS = 14.0, 4.0, 2.0, 4.0, 6.0
# Of a Mamba layer: times that its values (_INNER_TRIPS) and the keys and queries of its groups (_STATE_TRIPS) are read
# or written by the convolution, the recurrence and the gated norm; tokens of a chunk of the recurrence.
_INNER_TRIPS, _STATE_TRIPS, _SCAN_CHUNK = 7.0, 3.0, 128
_SCORE_TRIPS = 4.0  # times that scores are read or written without flash attention: dropout, softmax, mask, products
_OPTIMIZER_BYTES = 28.0  # that Adam reads and writes for a parameter: master, two moments, gradient, bf16 weight
_GRADIENT_BYTES = 12.0  # of a weight and its float32 gradient that a micro-batch reads and writes


@dataclass(frozen=True)
class Efficiency:
    """Constants fitted to published runs.

    linear, attention, experts, memory: achieved speed over the speed of the cluster: of matrix products, of attention,
        of experts' grouped products, of work that is bound by memory.
    fp8: how many times faster matrix products are in FP8.
    tensor_exposed, expert_exposed, data_exposed: exposed seconds of communication over the seconds that its bytes take,
        for tensor, expert and data parallelism. Above 1 where links stay below their speed.
    overlapped: exposed communication of a job that overlaps it, over that of a job that does not.
    layer_seconds: seconds of a layer and micro-batch, forward and backward, in addition to its work.
    host_seconds: least seconds of an MoE layer and micro-batch, since the host starts many kernels.
    ampere: how many times more of its speed an A100 reaches in `linear` than later GPUs. It is not applied to experts:
        all published A100 runs are dense models, and with this factor experts would exceed the data sheet.
    """

    linear: float
    attention: float
    experts: float
    memory: float
    fp8: float
    tensor_exposed: float
    expert_exposed: float
    data_exposed: float
    overlapped: float
    layer_seconds: float
    host_seconds: float
    ampere: float


FITTED = Efficiency(
    linear=0.72,
    attention=0.48,
    experts=0.95,
    memory=0.65,
    fp8=2.0,
    tensor_exposed=1.2,
    expert_exposed=1.37,
    data_exposed=2.0,
    overlapped=0.05,
    layer_seconds=1.4e-3,
    host_seconds=9.4e-3,
    ampere=1.8,
)
# The error that python -m benchmarks.whatif prints for these constants.
FITTED_ERROR = (
    "on 71 published steps it is off by 8 % in the median and by 51 % at worst; with these steps left out of the fit, "
    "by 9 % and 52 %"
)


@dataclass(frozen=True)
class LayerWork:
    """Seconds of one layer for one micro-batch on one rank.

    attention: forward, of the attention kernel alone.
    experts: forward, of all work that grows with the tokens of the busiest rank: experts' matrix products and
        activation, sorting of tokens, and the all-to-alls.
    rest: forward, of everything else.
    backward: of the whole layer.
    """

    attention: float
    experts: float
    rest: float
    backward: float

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.attention + self.experts + self.rest + self.backward


class StepModel:
    """The parts of a job's step on a cluster.

    job: with its number of GPUs.
    cluster: the cluster of as many ranks.
    efficiency: constants; by default those fitted to published runs.
    """

    def __init__(self, job: Job, cluster: Cluster, efficiency: Efficiency = FITTED):
        self.job, self.cluster, self.efficiency = job, cluster, efficiency
        ampere = cluster.flops < _AMPERE_FLOPS
        gain = efficiency.fp8 if job.fp8_format and not ampere else 1.0
        self._flops = cluster.flops * efficiency.linear * (efficiency.ampere if ampere else gain)
        self._expert_flops = cluster.flops * efficiency.experts * gain
        of_a_byte = _FLOPS_OF_A_BYTE if cluster.flops > _AMPERE_FLOPS else _AMPERE_FLOPS_OF_A_BYTE
        self._memory = cluster.flops / of_a_byte * efficiency.memory
        self.tensor = job.tensor_model_parallel_size
        self._shards = self.tensor if job.sequence_parallel else 1  # of activations between matrix products

    # Parameters.

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's attention projections."""
        job, hidden, heads = self.job, self.job.hidden_size, self.job.num_attention_heads
        if not job.multi_latent_attention:
            return hidden * job.head_size * 2 * (heads + job.kv_heads)
        queries = heads * job.head_size
        queries = hidden * queries if job.q_lora_rank is None else job.q_lora_rank * (hidden + queries)
        keys = hidden * (job.kv_lora_rank + job.qk_pos_emb_head_dim)
        keys += job.kv_lora_rank * heads * (job.qk_head_dim + job.v_head_dim)
        return queries + keys + heads * job.v_head_dim * hidden

    @property
    def matrices(self) -> int:
        """Number of matrices of an MLP."""
        return 3 if self.job.swiglu else 2

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert."""
        job = self.job
        return self.matrices * (job.moe_latent_size or job.hidden_size) * job.expert_ffn

    @property
    def mamba_parameters(self) -> int:
        """Parameters of one Mamba layer's projections."""
        inner, states, heads = self._mamba
        return self.job.hidden_size * (3 * inner + 2 * states + heads)

    @property
    def _mamba(self) -> tuple[int, int, int]:
        """Sizes of a Mamba layer: width of its values, width of the keys of all groups, number of heads."""
        job, heads = self.job, self.job.mamba_heads
        return heads * job.mamba_head_dim, job.mamba_num_groups * job.mamba_state_dim, heads

    def dense_parameters(self, kind: str) -> int:
        """Parameters of one layer, without its routed experts, of all tensor-parallel ranks. kind: of `Job.kinds`."""
        job, found = self.job, 0
        if has_attention(kind):
            found += self.attention_parameters
        if "-" in kind:
            found += self.matrices * job.hidden_size * job.ffn
        if "M" in kind:
            found += self.mamba_parameters
        if "E" in kind:
            found += self.matrices * job.hidden_size * (job.moe_shared_expert_intermediate_size or 0)
            found += 2 * job.hidden_size * (job.moe_latent_size or 0) + job.hidden_size * (job.num_experts or 0)
        return found

    def layer_parameters(self, kind: str) -> float:
        """Parameters of one layer on one rank. kind: of `Job.kinds`."""
        job, own = self.job, self.dense_parameters(kind) / self.tensor
        if "E" in kind:
            ranks = job.expert_model_parallel_size * job.expert_tensor
            own += self.expert_parameters * (job.num_experts or 0) / ranks
        return own

    @property
    def end_parameters(self) -> float:
        """Parameters of the embedding, or of the head, on one rank."""
        return self.job.vocabulary * self.job.hidden_size / self.tensor

    # Seconds.

    def bandwidth(self, ranks: int) -> float:
        """Bytes/s of a rank in a ring over this many neighbouring ranks."""
        cluster = self.cluster
        if ranks <= cluster.ranks_per_node:
            return cluster.intra_node_bandwidth
        return min(cluster.intra_node_bandwidth, cluster.nic_bandwidth * cluster.nics_per_node / cluster.ranks_per_node)

    def pairs(self) -> float:
        """Query-key pairs of a micro-batch on one context-parallel rank, for sequences of one document."""
        job = self.job
        return job.micro_batch_size * job.seq_length * (job.seq_length + 1) / 2 / job.context_parallel_size

    def layer(
        self, kind: str, pairs: float | None = None, expert_seconds: tuple[float, float] | None = None
    ) -> LayerWork:
        """Seconds of one layer.

        kind: of `Job.kinds`.
        pairs: query-key pairs of the micro-batch on one rank, scaled up by the time of the exchange of keys. By default
            one document a sequence, with keys on a ring.
        expert_seconds: of experts and their all-to-alls, (forward, backward); by default with even routing.
        """
        job, eff, tokens, moe = self.job, self.efficiency, self.job.tokens, "E" in kind
        ring = pairs is None and has_attention(kind)
        pairs = self.pairs() if pairs is None else pairs
        if not has_attention(kind):
            pairs = 0.0
        attention = pairs * pair_flops(job.num_attention_heads, job.head_size, job.value_size) / self.tensor
        attention /= self.cluster.flops * eff.attention
        if job.attention_backend in ("unfused", "local"):  # computes the whole square and writes scores to memory
            squares = 2 * pairs * job.num_attention_heads / self.tensor
            attention = 2 * attention + squares * _BYTES * _SCORE_TRIPS / self._memory
        linear = 2 * tokens * self.dense_parameters(kind) / self.tensor / self._flops
        width = job.moe_shared_expert_intermediate_size or 0 if moe else job.ffn * ("-" in kind)
        share = len(kind) / 2  # of a layer of attention and an MLP
        moved = job.hidden_size * _HIDDEN_TRIPS * share / self._shards + width * _FFN_TRIPS / self.tensor
        moved *= tokens * _BYTES
        if "M" in kind:
            scan, more = self._scan()
            linear, moved = linear + scan, moved + more
        if moe:
            copies = job.moe_router_topk / self._shards
            moved += tokens * _BYTES * copies * (job.moe_latent_size or job.hidden_size) * _SENT_TRIPS
        elementwise = moved / self._memory
        weights = self.layer_parameters(kind) * _GRADIENT_BYTES / self._memory
        exchanges = len(kind) - (moe and job.expert_tensor == 1)
        gathered = self.tensor_seconds() * exchanges + ring * self.context_seconds(attention)
        experts, experts_back = (expert_seconds or self.expert_seconds()) if moe else (0.0, 0.0)
        forward = linear + elementwise + gathered + share * eff.layer_seconds / 3
        backward = 2 * (linear + elementwise) + weights + 1.25 * gathered + share * eff.layer_seconds * 2 / 3
        backward += _ATTENTION_BACKWARD * attention + experts_back
        if job.recompute_granularity == "full":
            again_share = 1.0
            if job.recompute_method == "block" and job.recompute_num_layers is not None:
                layers = job.num_layers / job.pipeline_model_parallel_size
                again_share = min(1.0, job.recompute_num_layers / layers)
            backward += again_share * (forward + attention + experts)
        elif job.recompute_granularity == "selective":
            again = job.recompute_modules or ["core_attn"]
            backward += attention if "core_attn" in again else 0.0
            backward += experts if "moe" in again else 0.0
        if moe:  # waits for the host, a third of them forward
            host = eff.host_seconds - (1 - share) * eff.layer_seconds
            wait = max(0.0, host - attention - experts - forward - backward)
            forward, backward = forward + wait / 3, backward + wait * 2 / 3
        return LayerWork(attention, experts, forward, backward)

    def _scan(self) -> tuple[float, float]:
        """Forward seconds of the recurrence of a Mamba layer, and bytes that it and the convolution read and write.

        As in Mamba-2 (arXiv 2405.21060, section 6): tokens attend within chunks, and chunks pass on states. Counted,
        not fitted, since no published step has such layers; the efficiency is assumed to be that of attention.
        """
        job, (inner, states, _) = self.job, self._mamba
        flops = 2 * _SCAN_CHUNK * (states + inner) + 4 * inner * job.mamba_state_dim  # of a token
        tokens = job.tokens / self.tensor
        moved = tokens * _BYTES * (inner * _INNER_TRIPS + 2 * states * _STATE_TRIPS)
        return tokens * flops / (self.cluster.flops * self.efficiency.attention), moved

    def expert_compute(self) -> float:
        """Forward seconds of a layer's experts on one rank with even routing, without the all-to-alls."""
        job = self.job
        products = 2 * self.expert_parameters * job.moe_router_topk * job.tokens / self.tensor / self._expert_flops
        width = (job.moe_latent_size or job.hidden_size) * _SORT_TRIPS + job.expert_ffn * _FFN_TRIPS
        return products + job.tokens * _BYTES * job.moe_router_topk / self._shards * width / self._memory

    def exchange_seconds(self) -> float:
        """Exposed seconds of one all-to-all of tokens with even routing."""
        job, ranks = self.job, self.job.expert_model_parallel_size
        if ranks == 1:
            return 0.0
        cluster = self.expert_cluster()
        near = far = job.moe_router_topk / ranks  # copies of a token for each rank
        if job.moe_token_dispatcher_type == "allgather":
            near = far = 1.0
        elif job.moe_token_dispatcher_type == "flex":  # a token crosses to another node once
            far = min(far, (1 - (1 - 1 / cluster.nodes) ** job.moe_router_topk) / cluster.ranks_per_node)
        node = np.arange(ranks) // cluster.ranks_per_node
        copies = np.where(node[:, None] == node[None, :], near, far)
        width = job.moe_latent_size or job.hidden_size
        table = copies * (job.tokens / self.tensor * width * _BYTES)
        return exchange_seconds(table, cluster) * self.expert_exposed

    @property
    def expert_exposed(self) -> float:
        """Exposed seconds of an all-to-all over the seconds that its bytes take."""
        eff = self.efficiency
        return eff.expert_exposed * (eff.overlapped if self.job.overlap_moe_expert_parallel_comm else 1.0)

    def expert_seconds(self) -> tuple[float, float]:
        """(forward, backward) seconds of experts and two all-to-alls with even routing; backward computes twice."""
        compute, exchanges = self.expert_compute(), 2 * self.exchange_seconds()
        return compute + exchanges, 2 * compute + exchanges

    def expert_cluster(self) -> Cluster:
        """The ranks of one expert-parallel group, which are neighbours."""
        ranks = self.job.expert_model_parallel_size
        per_node = max(1, min(ranks, self.cluster.ranks_per_node // self.job.expert_tensor))
        while ranks % per_node:
            per_node -= 1
        return self.cluster.relabel(ranks // per_node, per_node)

    def tensor_seconds(self) -> float:
        """Exposed seconds of tensor parallelism for one all-gather and one reduce-scatter of activations."""
        if self.tensor == 1:
            return 0.0
        moved = 2 * self.job.tokens * self.job.hidden_size * _BYTES * (self.tensor - 1) / self.tensor
        eff = self.efficiency
        exposed = eff.tensor_exposed * (eff.overlapped if self.job.tp_comm_overlap else 1.0)
        return moved / self.bandwidth(self.tensor) * exposed

    def context_seconds(self, attention: float) -> float:
        """Exposed forward seconds of a ring of keys and values: the part not hidden by attention, at least a fifth.

        attention: seconds of attention, forward.
        """
        job, ranks = self.job, self.job.context_parallel_size
        if ranks == 1:
            return 0.0
        width = job.kv_heads * (job.head_size + job.value_size) / self.tensor
        seconds = job.tokens * (ranks - 1) * width * _BYTES / self.bandwidth(ranks * self.tensor)
        return max(0.2 * seconds, seconds - attention)

    def head(self) -> tuple[float, float]:
        """Forward and backward seconds of the head with the loss."""
        rows = self.job.tokens * self.job.vocabulary / self.tensor
        linear = 2 * rows * self.job.hidden_size / (self.cluster.flops * self.efficiency.linear)
        logits = rows * _BYTES * _LOGIT_TRIPS / self._memory
        return linear + logits, 2 * linear + logits + self.end_parameters * _GRADIENT_BYTES / self._memory

    def embedding(self) -> tuple[float, float]:
        """Forward and backward seconds of the embedding."""
        seconds = self.job.tokens * self.job.hidden_size * _BYTES * 3 / self._memory
        return seconds, seconds + self.end_parameters * 4 / self._memory

    def works(
        self, pairs: float | None = None, expert_seconds: Sequence[tuple[float, float] | None] = (None,)
    ) -> list[LayerWork]:
        """Seconds of each layer of the model. pairs: as in `layer`. expert_seconds: of MoE layers, used cyclically."""
        kinds, order = self.job.kinds, np.cumsum(self.job.is_moe) - 1
        of_experts = [at % max(len(expert_seconds), 1) if "E" in kind else 0
                      for kind, at in zip(kinds, order, strict=True)]  # fmt: skip
        known = {
            (kind, at): self.layer(kind, pairs, expert_seconds[at] if "E" in kind else None)
            for kind, at in {*zip(kinds, of_experts, strict=True)}
        }
        return [known[each] for each in zip(kinds, of_experts, strict=True)]

    def costs(self, works: Sequence[LayerWork]) -> LayerSeconds:
        """Seconds of all layers and of embedding and head. Frozen layers, and the embedding before them, have no
        backward.

        works: of each layer.
        """
        forward = np.array([work.total - work.backward for work in works])
        backward = np.array([work.backward for work in works])
        head, tail = self.head(), (0.0, 0.0)
        if count := self.job.tail_layers:
            # A layer of the tail has a projection from two widths to one, and another head.
            joined = 4 * self.job.tokens * self.job.hidden_size**2 / self.tensor / self._flops
            tail = (
                count * (float(forward[-1]) + joined + head[0]),
                count * (float(backward[-1]) + 2 * joined + head[1]),
            )
        embedding = self.embedding()
        if self.job.freeze_layers:
            backward[: self.job.freeze_layers] = 0.0
            embedding = embedding[0], 0.0
        return LayerSeconds(forward, backward, embedding, head, tail)

    def data_parallel_seconds(self, plan: StagePlan) -> float:
        """Exposed seconds of data-parallel communication (gradients, parameters) and of the optimizer, in a step."""
        job, eff = self.job, self.efficiency
        kinds, slowest = job.kinds, 0.0
        ranks = job.data_parallel * job.context_parallel_size
        expert_ranks = job.gpus // job.pipeline_model_parallel_size
        expert_ranks //= job.expert_model_parallel_size * job.expert_tensor
        gradient, weight = (2 if job.grad_reduce_in_bf16 else 4), _BYTES
        if not job.use_distributed_optimizer:
            weight = gradient  # an all-reduce
        for stage in range(plan.stages):
            layers = [layer for chunk in plan.chunks[stage] for layer in chunk if layer >= job.freeze_layers]
            dense = sum(self.dense_parameters(kinds[layer]) for layer in layers) / self.tensor
            experts = sum(self.layer_parameters(kinds[layer]) for layer in layers) - dense
            dense += self.end_parameters * ((stage == 0 and not job.freeze_layers) + (stage == plan.stages - 1))
            seconds, owned = 0.0, 0.0
            for parameters, group, apart in ((dense, ranks, self.tensor), (experts, expert_ranks, ranks * self.tensor)):
                if group > 1:
                    # Members of an expert-data-parallel group are far apart; data-parallel ranks are neighbours.
                    rate = self.bandwidth(group * apart if apart == self.tensor else job.gpus)
                    for sent, overlaps in ((gradient, job.overlap_grad_reduce), (weight, job.overlap_param_gather)):
                        exposed = eff.data_exposed * (eff.overlapped if overlaps else 1.0)
                        seconds += parameters * sent * (group - 1) / group / rate * exposed
                owned += parameters / (group if job.use_distributed_optimizer else 1)
            slowest = max(slowest, seconds + owned * _OPTIMIZER_BYTES / self._memory)
        return slowest

    def transfer_seconds(self) -> float:
        """Seconds of one message between neighbouring pipeline stages."""
        job = self.job
        if job.pipeline_model_parallel_size == 1:
            return 0.0
        moved = job.tokens * job.hidden_size * _BYTES / self._shards
        return moved / self.bandwidth(job.gpus) + self.cluster.message_seconds

    # Bytes.

    def memory(self, plan: StagePlan) -> np.ndarray:
        """float [stage]: bytes of the fullest rank of each stage: model state and activations, without library buffers.

        Frozen layers keep their state, but no activations.
        """
        job, kinds = self.job, self.job.kinds
        static = np.array([self._state(kind) for kind in kinds])
        activation = np.array([self._activation(kind) for kind in kinds])
        activation[: job.freeze_layers] = 0.0
        ends = self.end_parameters * self._state_bytes(job.data_parallel * job.context_parallel_size)
        head = 4.0 * job.tokens * job.vocabulary / self.tensor
        tail = job.tail_layers * (static[-1] + activation[-1])
        tied = not job.untie_embeddings_and_output_weights and job.pipeline_model_parallel_size == 1
        parts = LayerMemory(static, activation, ends, 0.0 if tied else ends, 0.0, 0.0, tail)
        peak = stage_memory(plan, parts, job.micro_batches, job.schedule)
        peak[-1] += head  # one micro-batch's logits at a time
        return peak

    def _state_bytes(self, ranks: int) -> float:
        """Bytes of a parameter's weight, gradient and optimizer state on each of `ranks` data-parallel ranks."""
        return _BYTES + 4 + 12 / (ranks if self.job.use_distributed_optimizer else 1)

    def _state(self, kind: str) -> float:
        job, dense = self.job, self.dense_parameters(kind) / self.tensor
        experts = self.layer_parameters(kind) - dense
        ranks = job.gpus // job.pipeline_model_parallel_size // (job.expert_model_parallel_size * job.expert_tensor)
        return dense * self._state_bytes(job.data_parallel * job.context_parallel_size) + experts * self._state_bytes(
            max(ranks, 1)
        )

    def _activation(self, kind: str) -> float:
        """Activation bytes that a micro-batch keeps of one layer until its backward, with flash attention, no dropout.

        They are the inputs and outputs of both norms, queries, keys, values and output of attention, and the MLP's
        inner activations (Korthikanti et al., arXiv 2205.05198, section 4, without the terms of softmax and dropout),
        without those that --recompute-modules recompute.
        """
        job = self.job
        if job.recompute_granularity == "full":
            return job.tokens * job.hidden_size * _BYTES / self._shards
        again = set(job.recompute_modules or ["core_attn"]) if job.recompute_granularity == "selective" else set()
        kept = len(kind) * (1 if "layernorm" in again else 2) * job.hidden_size / self._shards
        projected = (job.num_attention_heads + job.kv_heads) * job.head_size + job.kv_heads * job.value_size
        if "mla_up_proj" in again:  # latents instead of queries, keys and values
            projected = self.tensor * (job.q_lora_rank or job.hidden_size) + self.tensor * job.kv_lora_rank
        if has_attention(kind):
            kept += (projected + job.num_attention_heads * job.value_size) / self.tensor
        # The gate, the input and output of the convolution, and the output; states of chunks are recomputed.
        if "M" in kind:
            inner, states, heads = self._mamba
            kept += (4 * inner + 4 * states + heads) / self.tensor
        matrices = self.matrices - ("moe_act" in again)  # the output of the activation function is recomputed
        if "E" in kind and "moe" not in again:
            shared = 0 if "shared_experts" in again else job.moe_shared_expert_intermediate_size or 0
            copies = job.moe_router_topk / self.tensor
            kept += self.matrices * shared / self.tensor
            kept += copies * (2 * (job.moe_latent_size or job.hidden_size) + matrices * job.expert_ffn)
        elif "-" in kind and "mlp" not in again:
            kept += self.matrices * job.ffn / self.tensor
        return job.tokens * kept * _BYTES
