"""A training job for a forecast: the flags of Megatron-LM that decide how long a step takes.

The flags are read without Megatron-LM, by one table with its names and defaults. All other flags are accepted and have
no effect. Flags of models that the forecast does not know are refused.
"""

import argparse
import ast
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn

import numpy as np

from balancing.model_sizes import check_sizes, flag_of
from balancing.pipeline.layout import from_layout
from balancing.pipeline.pattern import KINDS, Pattern, read_pattern
from balancing.pipeline.schedule import Schedule
from balancing.pipeline.stage_plan import StagePlan

__all__ = ["Job", "has_attention", "read_flags", "read_recipe_flags"]

# Flags of models that are not a stack of layers with full attention and an MLP or experts.
_UNKNOWN_MODELS = (
    "spec", "experimental_attention_variant", "window_size", "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json",
)  # fmt: skip
# Size of the vocabulary if a job leaves it to its tokenizer: that of Llama 3.
_VOCABULARY = 128256
# Names in files of Megatron-LM's arguments that differ from those of flags.
_OTHER_NAMES = {"fp8": "fp8_format"}


@dataclass(frozen=True)
class Job:
    """A job. Fields are Megatron-LM's flags with its defaults, except `gpus` and the last three.

    gpus: ranks of the job; 0 if not known yet.
    freeze_layers: number of frozen layers; the forecast step is one in which all of them are frozen.
    sequence_domain, sequence_micro_batches: flags of balanced sequences.

    Raises ValueError, in one line, for sizes that Megatron-LM would refuse: ranks that the parallel sizes do not
    divide, a global batch that micro-batches do not divide, layers that do not divide into chunks.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    seq_length: int
    micro_batch_size: int
    gpus: int = 0
    global_batch_size: int | None = None
    train_iters: int | None = None
    train_samples: int | None = None
    ffn_hidden_size: int | None = None
    swiglu: bool = False
    group_query_attention: bool = False
    num_query_groups: int = 1
    kv_channels: int | None = None
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 32
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    vocab_size: int | None = None
    make_vocab_size_divisible_by: int = 128
    untie_embeddings_and_output_weights: bool = False
    mtp_num_layers: int | None = None
    num_experts: int | None = None
    moe_router_topk: int = 2
    moe_ffn_hidden_size: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_latent_size: int | None = None
    moe_layer_freq: str = "1"
    moe_token_dispatcher_type: str = "allgather"
    hybrid_layer_pattern: str | None = None
    mamba_state_dim: int = 128
    mamba_head_dim: int = 64
    mamba_num_groups: int = 8
    mamba_num_heads: int | None = None
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    num_virtual_stages_per_pipeline_rank: int | None = None
    microbatch_group_size_per_virtual_pipeline_stage: int | None = None
    pipeline_model_parallel_layout: str | None = None
    decoder_first_pipeline_num_layers: int | None = None
    decoder_last_pipeline_num_layers: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    sequence_parallel: bool = False
    bf16: bool = False
    fp16: bool = False
    attention_backend: str = "auto"
    recompute_granularity: str | None = None
    recompute_num_layers: int | None = None
    recompute_method: str | None = None
    recompute_modules: tuple[str, ...] | None = None
    use_distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    tp_comm_overlap: bool = False
    overlap_moe_expert_parallel_comm: bool = False
    grad_reduce_in_bf16: bool = False
    fp8_format: str | None = None
    freeze_layers: int = 0
    sequence_domain: str = "auto"
    sequence_micro_batches: bool = False

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            least = 0 if each.name in ("gpus", "freeze_layers") else 1
            if isinstance(value, int) and not isinstance(value, bool) and value < least:
                raise ValueError(f"{flag_of(each.name)} {value} must be at least {least}")
        if self.pattern is not None:
            self._check_pattern(self.pattern)
        check_sizes(vars(self))
        if self.num_experts and not self.is_moe.any():
            raise ValueError(
                f"--moe-layer-freq {self.moe_layer_freq} leaves no layer for the experts of --num-experts "
                f"{self.num_experts}; drop one of them"
            )
        if self.expert_model_parallel_size > 1 and not self.num_experts:
            raise ValueError(f"--expert-model-parallel-size {self.expert_model_parallel_size} needs --num-experts")
        if self.bf16 and self.fp16:
            raise ValueError("--bf16 contradicts --fp16; drop one of them")
        if self.context_parallel_size > 1 and self.seq_length % (2 * self.context_parallel_size):
            raise ValueError(
                f"--seq-length {self.seq_length} must be a multiple of 2 x --context-parallel-size "
                f"{self.context_parallel_size}"
            )
        if self.sequence_domain not in ("auto", "context", "data"):
            raise ValueError(f"--sequence-domain {self.sequence_domain}; use auto, context or data")
        if self.freeze_layers > self.num_layers:
            raise ValueError(f"--freeze-layers {self.freeze_layers} is more than --num-layers {self.num_layers}")
        if not self.gpus:
            return
        layers = self.pipeline_model_parallel_size * self.tensor_model_parallel_size * self.context_parallel_size
        if self.gpus % layers:
            raise ValueError(f"{self.gpus} GPUs do not divide by tensor x pipeline x context parallel = {layers}")
        per_stage = self.gpus // self.pipeline_model_parallel_size
        if self.num_experts and per_stage % (self.expert_model_parallel_size * self.expert_tensor):
            raise ValueError(
                f"{per_stage} GPUs of a pipeline stage do not divide by expert x expert-tensor parallel = "
                f"{self.expert_model_parallel_size * self.expert_tensor}"
            )
        if self.num_experts and self.num_experts % self.expert_model_parallel_size:
            raise ValueError(
                f"--num-experts {self.num_experts} do not divide by {self.expert_model_parallel_size} ranks"
            )
        if self.batch % (self.micro_batch_size * self.data_parallel):
            raise ValueError(
                f"--global-batch-size {self.batch} does not divide by {self.data_parallel} data-parallel ranks x "
                f"--micro-batch-size {self.micro_batch_size}"
            )
        stages = self.plan.stages  # raises for layers that do not divide
        group = self.microbatch_group_size_per_virtual_pipeline_stage
        if self.chunks > 1 and group is None and self.micro_batches % stages:
            raise ValueError(
                f"{self.micro_batches} micro-batches a step are not a multiple of the {stages} pipeline stages, which "
                "stages of several chunks need"
            )
        if (
            self.chunks > 1
            and group
            and (not stages <= group <= self.micro_batches or 0 < self.micro_batches % group < stages)
        ):
            raise ValueError(
                f"--microbatch-group-size-per-virtual-pipeline-stage {group} does not go with {self.micro_batches} "
                f"micro-batches a step: no group, the last included, may have fewer than the {stages} pipeline stages"
            )

    def on(self, gpus: int) -> "Job":
        """The same job on another number of GPUs. Data parallelism changes, the global batch does not."""
        return replace(self, gpus=gpus, global_batch_size=self.batch if self.gpus else self.global_batch_size)

    @property
    def data_parallel(self) -> int:
        """Data-parallel ranks, without context parallelism."""
        model = self.pipeline_model_parallel_size * self.tensor_model_parallel_size * self.context_parallel_size
        return self.gpus // model

    @property
    def batch(self) -> int:
        """Samples of a step; by default one micro-batch for each data-parallel rank, as in Megatron-LM."""
        return self.global_batch_size or self.micro_batch_size * self.data_parallel

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step on each data-parallel rank."""
        return self.batch // (self.micro_batch_size * self.data_parallel)

    @property
    def iterations(self) -> int | None:
        """Steps of the training; None if neither iterations nor samples are given."""
        if self.train_iters is not None:
            return self.train_iters
        return None if self.train_samples is None else math.ceil(self.train_samples / self.batch)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one context-parallel rank."""
        return self.micro_batch_size * self.seq_length // self.context_parallel_size

    @property
    def ffn(self) -> int:
        """Width of the MLP, with Megatron-LM's default."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return int(4 * self.hidden_size * 2 / 3 / 64) * 64 if self.swiglu else 4 * self.hidden_size

    @property
    def expert_ffn(self) -> int:
        """Width of an expert."""
        return self.moe_ffn_hidden_size or self.ffn

    @property
    def expert_tensor(self) -> int:
        """Expert-tensor-parallel size; by default that of tensor parallelism."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def head_size(self) -> int:
        """Width of a head of queries and keys."""
        if self.multi_latent_attention:
            return self.qk_head_dim + self.qk_pos_emb_head_dim
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def value_size(self) -> int:
        """Width of a head of values."""
        return self.v_head_dim if self.multi_latent_attention else self.head_size

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        grouped = self.group_query_attention and not self.multi_latent_attention
        return self.num_query_groups if grouped else self.num_attention_heads

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding, padded as Megatron-LM pads them."""
        unit = self.make_vocab_size_divisible_by * self.tensor_model_parallel_size
        return math.ceil((self.vocab_size or _VOCABULARY) / unit) * unit

    def _check_pattern(self, pattern: Pattern) -> None:
        given = f"--hybrid-layer-pattern {self.hybrid_layer_pattern}"
        if len(pattern.symbols) != self.num_layers:
            raise ValueError(f"{given} has {len(pattern.symbols)} layers, and --num-layers is {self.num_layers}")
        for symbol in "GD":
            if pattern.has(symbol):
                raise ValueError(
                    f"{given} has {symbol} ({KINDS[symbol]}), a kind of layer that the forecast does not know"
                )
        if pattern.depths:
            raise ValueError(
                f"{given} has multi-token prediction after /, which the forecast does not know; leave it out"
            )
        if pattern.has("E") != bool(self.num_experts):
            raise ValueError(
                f"{given} and --num-experts {self.num_experts} do not go together: E is a layer of experts"
            )

    @property
    def pattern(self) -> Pattern | None:
        """The pattern of a hybrid model; None for other models."""
        return None if self.hybrid_layer_pattern is None else read_pattern(self.hybrid_layer_pattern)

    @property
    def mamba_heads(self) -> int:
        """Heads of a Mamba layer."""
        return self.mamba_num_heads or 2 * self.hidden_size // self.mamba_head_dim

    @property
    def kinds(self) -> tuple[str, ...]:
        """[layer]: symbols of `pipeline.pattern` for the parts of each layer; "*-" is attention and an MLP."""
        if self.pattern is not None:
            return tuple(self.pattern.symbols)
        return tuple("*E" if moe else "*-" for moe in self.is_moe)

    @property
    def is_moe(self) -> np.ndarray:
        """bool [layer]: which layers have experts."""
        if self.pattern is not None:
            return np.array([symbol == "E" for symbol in self.pattern.symbols])
        if not self.num_experts:
            return np.zeros(self.num_layers, dtype=bool)
        pattern = _pattern(self.moe_layer_freq)
        if isinstance(pattern, int):
            return np.arange(self.num_layers) % pattern == 0
        if len(pattern) != self.num_layers:
            raise ValueError(
                f"--moe-layer-freq {self.moe_layer_freq} has {len(pattern)} entries for {self.num_layers} layers"
            )
        return np.array(pattern, dtype=bool)

    @property
    def chunks(self) -> int:
        """Chunks of a pipeline stage, the virtual pipeline size."""
        if self.pipeline_model_parallel_layout is not None or self.pattern is not None:
            return self.plan.virtual
        if self.num_virtual_stages_per_pipeline_rank is not None:
            return self.num_virtual_stages_per_pipeline_rank
        each, stages = self.num_layers_per_virtual_pipeline_stage, self.pipeline_model_parallel_size
        if each is None or stages == 1:
            return 1
        counted = self.num_layers + self.account_for_embedding_in_pipeline_split
        counted += self.account_for_loss_in_pipeline_split
        if counted % (stages * each):
            raise ValueError(f"{counted} layers do not divide into {stages} stages of chunks of {each} layers")
        return counted // stages // each

    @property
    def schedule(self) -> Schedule:
        """The schedule of a pipeline with several chunks a stage."""
        return Schedule(
            group=self.microbatch_group_size_per_virtual_pipeline_stage, in_parts=self.overlap_moe_expert_parallel_comm
        )

    @property
    def tail_layers(self) -> int:
        """Layers behind those of the model's body (`StagePlan.tail_layers`)."""
        return self.mtp_num_layers or 0

    @property
    def plan(self) -> StagePlan:
        """The layers of each stage as Megatron-LM would place them."""
        stages = self.pipeline_model_parallel_size
        if self.pattern is not None:
            ends = self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers
            return self.pattern.plan(stages, first=ends[0], last=ends[1])
        if self.pipeline_model_parallel_layout is not None:
            return from_layout(self.pipeline_model_parallel_layout, stages, layers=self.num_layers)
        counts = self._counts(stages, self.chunks)
        plan = StagePlan.from_counts(tuple(tuple(row) for row in counts))
        return replace(plan, tail_layers=self.tail_layers)

    def _counts(self, stages: int, chunks: int) -> list[list[int]]:
        ends = self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers
        inner = stages - sum(end is not None for end in ends)
        if any(end is not None for end in ends) and stages > 1:
            left = self.num_layers - sum(end or 0 for end in ends)
            if inner < 0 or left < 0 or (inner and left % (inner * chunks)) or any((end or 0) % chunks for end in ends):
                raise ValueError(f"{left} layers do not divide into {inner} stages of {chunks} chunks")
            counts = [[left // max(inner, 1) // chunks] * chunks for _ in range(stages)]
            for at, end in zip((0, -1), ends, strict=True):
                if end is not None:
                    counts[at] = [end // chunks] * chunks
            return counts
        accounted = self.account_for_embedding_in_pipeline_split, self.account_for_loss_in_pipeline_split
        counted = self.num_layers + sum(accounted)
        if counted % (stages * chunks):
            raise ValueError(
                f"{counted} layers do not divide into {stages} pipeline stages of {chunks} chunks; give "
                "--pipeline-model-parallel-layout or --decoder-first-pipeline-num-layers"
            )
        counts = [[counted // stages // chunks] * chunks for _ in range(stages)]
        counts[0][0] -= accounted[0]
        counts[-1][-1] -= accounted[1]
        return counts


def has_attention(kind: str) -> bool:
    """Whether a layer of this kind, one of `Job.kinds`, has attention."""
    return "*" in kind or "+" in kind


# Reading flags.

_BOOLEANS = tuple(each.name for each in fields(Job) if each.type in (bool, "bool"))
_TEXTS = (
    "hybrid_layer_pattern", "moe_layer_freq", "moe_token_dispatcher_type", "pipeline_model_parallel_layout",
    "recompute_granularity", "recompute_method", "fp8_format", "attention_backend", "sequence_domain",
)  # fmt: skip


class _Flags(argparse.ArgumentParser):
    """Raises ValueError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def flag_table() -> _Flags:
    """A parser of the flags that a forecast reads. A test compares it with Megatron-LM's parser."""
    parser = _Flags(allow_abbrev=False, add_help=False)
    for each in fields(Job):
        if each.name == "gpus":
            continue
        if each.name in _BOOLEANS:
            parser.add_argument(flag_of(each.name), action="store_true")
        elif each.name == "recompute_modules":
            parser.add_argument(flag_of(each.name), nargs="+", default=None)
        else:
            kind = str if each.name in _TEXTS else int
            default = None if each.name in _REQUIRED else each.default
            parser.add_argument(flag_of(each.name), type=kind, default=default)
    for name in _UNKNOWN_MODELS:
        parser.add_argument(flag_of(name), nargs="*", default=None)
    return parser


_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size")


def read_flags(arguments: Sequence[str]) -> Job:
    """The job of a command line of pretrain_gpt.py, without its number of GPUs.

    Raises ValueError, in one line, for a missing flag, a value of the wrong kind, and models that the forecast does not
    know.
    """
    options, _ = flag_table().parse_known_args(list(arguments))
    values = vars(options)
    for name in _UNKNOWN_MODELS:
        if values.pop(name) is not None:
            raise ValueError(f"{flag_of(name)} makes a model that the forecast does not know: it knows full attention")
    values["recompute_modules"] = tuple(values["recompute_modules"] or ()) or None
    if values["hybrid_layer_pattern"] is not None:
        pattern = read_pattern(values["hybrid_layer_pattern"])
        values["num_layers"] = len(pattern.symbols)  # as Megatron-LM does
        values["multi_latent_attention"] |= pattern.has("+")
    missing = [flag_of(name) for name in _REQUIRED if values[name] is None]
    if missing:
        raise ValueError(f"the job lacks {', '.join(missing)}; give Megatron-LM's flags after --")
    return Job(**values)


def read_recipe_flags(flags: Mapping[str, Any]) -> Job:
    """The job of a recipe file of Megatron-LM. flags: name with underscores -> value."""
    arguments: list[str] = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        arguments.append(flag_of(_OTHER_NAMES.get(name, name)))
        if value is not True:
            several = value if isinstance(value, list | tuple) else [value]
            text = " ".join(str(each) for each in several)
            arguments += text.split() if name == "recompute_modules" else [text]
    return read_flags(arguments)


def _pattern(text: str) -> int | list[int]:
    """Megatron-LM's --moe-layer-freq: a number, or an expression of lists of numbers with + and *."""
    if re.fullmatch(r"\s*[1-9]\d*\s*", text):
        return int(text)
    try:
        found = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError) as error:
        raise ValueError(f"--moe-layer-freq {text!r} is neither a number nor lists of 0 and 1 with + and *") from error
    if not isinstance(found, list) or not all(number in (0, 1) for number in found):
        raise ValueError(f"--moe-layer-freq {text!r} is neither a number of at least 1 nor a list of 0 and 1")
    return found


def _value(node: ast.expr) -> Any:
    """A number, a list, or their sum or product."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.List):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _value(node.left) + _value(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _value(node.left) * _value(node.right)
    raise ValueError(ast.dump(node))
