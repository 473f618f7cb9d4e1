"""Balanced attention takes the model and the batches that a loop has: no number changes, or one line says why not.

Each case trains with a `SequenceBalancer` and without, on the same ranks in float64. The micro-batches of a step have
equal tokens on each rank, so that the plan of another one would fit.
"""

import contextlib
import copy
import io
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

VOCABULARY, LONGEST = 50, 768
# [step][micro-batch][data-parallel rank]: tokens of the sequences over 6. Rank 0 has the same ones twice.
BATCHES = [
    [[[96, 8], [12, 4, 8]], [[96, 8], [8, 16]]],
    [[[8, 8], [100, 4]], [[4, 12], [52, 52]]],
]
IMAGE = [40, 24]  # tokens of the images of a micro-batch

# Words of a case -> whether attention moves. Words of batches:
#   one object: all micro-batches have one PackedSeqParams, whose fields are set anew; one tensor: whose tensor is
#   kept: micro-batches with the same sequences have the same object
#   told: with lengths, of each micro-batch; stale: of the first one with so many sequences, in an object of its own
#   pairs: two micro-batches pass the model before one backward pass
CASES = {
    "one object": True, "one tensor": True, "one object, recompute": True, "one tensor, recompute": True,
    "one object, told": True, "one object, stale": True, "kept": True, "kept, recompute": True,
    "pairs": True, "pairs, recompute": True, "pairs, kept, recompute attention": True,
    "some unpacked": True, "dense mask beside": True,
    "no_mask": False, "padding": False, "padding_causal": False, "first no_mask": True, "capped": False,
    "in 8 bits": False, "no 8 bits": True,
    "tower": True, "tower, frozen": True, "tower, frozen, recompute, input trains": True,
    "hooks": True, "frozen qkv": True, "frozen first": True, "scale": True,
    "latents, hooks": True, "latents, frozen qkv": True,
}  # fmt: skip
ADAPTED = {"lora": True, "lora, recompute": True, "dora": True, "latents, lora": True}


def _capped() -> type:
    """A core attention of the loop's own, as of Gemma 2."""
    import torch

    from megatron.balanced.local.packed_attention import PackedDotProductAttention

    class Capped(PackedDotProductAttention):
        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return super().forward(*args, **kwargs).tanh()

    return Capped


def _model(case: str) -> Any:
    """The model, before data parallelism. With a tower, images are put before the tokens."""
    import torch
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    from megatron.balanced.local.packed_attention import (
        PackedDotProductAttention,
        PackedLatentDotProductAttention,
        packed_layers,
    )

    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    latent = "latents" in case
    settings: dict[str, Any] = {"num_query_groups": 2, "kv_channels": 8}
    if latent:
        settings = {
            "multi_latent_attention": True, "rope_type": "rope", "q_lora_rank": 12, "kv_lora_rank": 8,
            "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 6,
        }  # fmt: skip
    if "recompute attention" in case:
        settings |= {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    elif "recompute" in case:
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

    def of(kind: type, **more: Any) -> Any:
        return kind(
            num_layers=2, hidden_size=32, num_attention_heads=4, params_dtype=torch.float64, attention_dropout=0.0,
            hidden_dropout=0.0, transformer_impl="local", calculate_per_token_loss=True,
            normalization="RMSNorm", persist_layer_norm=False, **more,
        )  # fmt: skip

    def spec(config: Any, core: type, mask: str) -> Any:
        layers = packed_layers(config, None, core)
        for layer in layers.layer_specs:
            layer.submodules.self_attention.params = {"attn_mask_type": AttnMaskType[mask]}
        return layers

    config = of(MLATransformerConfig if latent else TransformerConfig, **settings)
    config.fp8_dot_product_attention = "8 bits" in case  # which these layers do not look at
    core = PackedLatentDotProductAttention if latent else _capped() if "capped" in case else PackedDotProductAttention
    masks = [word for word in case.split(", ") if word in AttnMaskType.__members__]
    model = GPTModel(config, spec(config, core, masks[0] if masks else "causal"), VOCABULARY, LONGEST).double()
    layers = model.decoder.layers
    if "first no_mask" in case:
        first = GPTModel(config, spec(config, core, "no_mask"), VOCABULARY, LONGEST).double()
        layers[0] = first.decoder.layers[0]
    if "hooks" in case:
        attention = layers[0].self_attention
        attention.core_attention.register_forward_hook(lambda module, given, output: output * 1.25)
        up = attention.linear_kv_up_proj if latent else attention.linear_qkv
        up.register_forward_hook(lambda module, given, output: (output[0] * 1.5, output[1]))
        up.weight.register_hook(lambda gradient: gradient * 0.5)
    if "in 8 bits" in case:
        for layer in layers:
            layer.self_attention.config = copy.copy(config)
            layer.self_attention.config.fp8 = "hybrid"
    if "input trains" in case:  # as Megatron-Bridge has it where adapters alone train
        run = model.decoder.forward
        model.decoder.forward = lambda hidden_states, **rest: run(
            hidden_states if hidden_states.requires_grad else hidden_states.detach().requires_grad_(), **rest
        )
    if "scale" in case:
        layers[0].self_attention.core_attention.softmax_scale = 0.7
    for word, names in {
        "frozen qkv": ("linear_qkv", "linear_kv"), "frozen first": ("embedding", "layers.0."), "frozen": ("",)
    }.items():  # fmt: skip
        if word in case.split(", "):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not any(part in name for part in names))
    if "lora" in case or "dora" in case:
        from megatron.bridge.peft.dora import DoRA
        from megatron.bridge.peft.lora import LoRA

        names = ["linear_q_up_proj", "linear_kv_up_proj", "linear_proj"] if latent else ["linear_qkv", "linear_proj"]
        adapt = LoRA if "lora" in case else DoRA
        model = adapt(target_modules=names, dim=4, alpha=8, lora_B_init_method="xavier")(model, training=True).double()
    if "tower" not in case:
        return model

    class Mixed(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config)
            causal = case == "tower causal"  # as the language model's layers are
            own = of(TransformerConfig, **settings if causal else {"kv_channels": 12})
            mask = "causal" if causal else "no_mask"
            layers = spec(own, PackedDotProductAttention, mask)
            self.tower = TransformerBlock(own, layers, post_layer_norm=False).double()
            self.language, self.model_type = model, model.model_type

        def set_input_tensor(self, tensor: Any) -> None:
            self.language.set_input_tensor(tensor)

        def forward(self, tokens: Any, places: Any, mask: Any, packed: Any, images: Any, **rest: Any) -> Any:
            states = self.language.embedding(tokens, places).clone()
            if images is not None:
                pixels, bounds = images
                states[: len(pixels)] += self.tower(pixels, None, packed_seq_params=bounds)
            return self.language(tokens, places, mask, decoder_input=states, packed_seq_params=packed, **rest)

    return Mixed()


class _Packed:
    """Gives PackedSeqParams as a loop of this case does."""

    def __init__(self, case: str) -> None:
        self._case, self._one, self._kept = case, None, {}

    def __call__(self, lengths: Sequence[int]) -> Any:
        import torch
        from megatron.core.packed_seq_params import PackedSeqParams

        lengths = tuple(lengths)
        if "kept" in self._case and lengths in self._kept:
            return self._kept[lengths]
        bounds = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
        packed: Any = PackedSeqParams(qkv_format="thd")
        if "one" in self._case:
            packed = self._one = self._one or packed
        if "one tensor" in self._case:  # a fixed buffer, whose last bounds are empty sequences
            bounds = torch.nn.functional.pad(bounds, (0, 5 - len(bounds)), value=int(bounds[-1]))
            bounds = bounds if packed.cu_seqlens_q is None else packed.cu_seqlens_q.copy_(bounds)
        packed.cu_seqlens_q = packed.cu_seqlens_kv = bounds
        packed.max_seqlen_q = packed.max_seqlen_kv = max(lengths)
        if "told" in self._case:
            packed.lengths = list(lengths)
        if "stale" in self._case:
            packed.lengths = self._kept.setdefault(len(lengths), list(lengths))
        return self._kept.setdefault(lengths, packed) if "kept" in self._case else packed


def _train(case: str, balanced: bool, fault: Callable[..., Any] | None = None) -> tuple[list[float], dict, int, str]:
    """The losses of this rank, the weights, bytes that moved, and what was printed.

    fault: changes (model, tokens, places, packed) of each call, told (step, micro-batch) as well.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    from balancing.cluster import Cluster
    from balancing.sequences.config import SequenceConfig
    from megatron.balanced.loop import Balancers, SequenceBalancer
    from megatron.balanced.shared.job import Job

    model = _model(case)
    config = model.config
    of_data = DistributedDataParallelConfig(overlap_grad_reduce="tower" not in case, bucket_size=5000)
    model = DistributedDataParallel(config, of_data, model)
    config.finalize_model_grads_func, config.no_sync_func = finalize_model_grads, model.no_sync
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    replica = parallel_state.get_data_parallel_rank()
    run, events, said, packs = get_forward_backward_func(), [], io.StringIO(), _Packed(case)
    balancers = None
    if balanced:
        cluster = Cluster(1, 2, 1, 1e12, 1e12, 1e6, 1e9)  # so slow that even these short sequences are worth a move
        asked, job = SequenceConfig(enabled=True), Job(LONGEST, 1, 5)
        with contextlib.redirect_stdout(said):
            made = SequenceBalancer([model], asked, job=job, cluster=cluster, report=events.append)
        balancers = Balancers(made)
        run = balancers.schedule(run)

    def one(model: Any, step: int, at: int) -> Any:
        lengths = [6 * length for length in BATCHES[step][at][replica]]
        draw = np.random.default_rng((step, at, replica))
        tokens, labels = torch.from_numpy(draw.integers(0, VOCABULARY, (2, 1, sum(lengths))))
        counts = torch.from_numpy(draw.random(sum(lengths)))
        places = torch.from_numpy(np.concatenate([np.arange(length) for length in lengths]))[None]
        packed = None if "unpacked" in case and at else packs(lengths)
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool) if "dense mask" in case else None
        if fault is not None:
            model, tokens, places, packed = fault(model, tokens, places, packed, step=step, at=at)
        rest: dict[str, Any] = {"packed_seq_params": packed}
        if "tower" in case:
            pixels = torch.from_numpy(draw.random((sum(IMAGE), 1, 32))).requires_grad_()
            images = (pixels, _Packed("")(IMAGE)) if replica == 0 else None
            rest = {"packed": packed, "images": images}
        output = model(tokens, places, mask, labels=labels, **rest)
        return (output.flatten() * counts).sum(), sum(lengths)

    def forward_step(numbers: Any, model: Any) -> tuple[Any, Any]:
        parts = [one(model, *number) for number in next(numbers)]
        total, tokens = sum(part for part, _ in parts), sum(number for _, number in parts)
        return total, lambda output: (output, torch.tensor(tokens), {"loss": output.detach()})

    losses = []
    for step, batches in enumerate(BATCHES):
        numbers = [[(step, at)] for at in range(len(batches))]
        numbers = [[number for one in numbers for number in one]] if "pairs" in case else numbers
        model.zero_grad_buffer()
        try:
            with contextlib.redirect_stdout(said):
                given = run(
                    forward_step_func=forward_step, data_iterator=iter(numbers), model=[model],
                    num_microbatches=len(numbers), seq_length=LONGEST, micro_batch_size=1, forward_only=False,
                )  # fmt: skip
        except ValueError:
            if balancers is not None:
                balancers.close()
            raise
        losses += [float(each["loss"]) for each in given]
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = parameter.main_grad
        optimizer.step()
    if balancers is not None:
        balancers.close()
    weights = {name: parameter.detach().numpy() for name, parameter in model.module.named_parameters()}
    moved = sum(told["moved_bytes"] for told in (event() for event in events) if told["action"] != "measured")
    return losses, weights, moved, said.getvalue()


def _connect() -> None:
    from megatron.balanced.cpu.device import use_cpu

    use_cpu()
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()


def _compared(cases: Sequence[str]) -> dict[str, Any]:
    """Of each case: the largest relative difference of a loss or weight from the run without a balancer, bytes that
    moved, and what was printed; or the error."""
    _connect()
    found: dict[str, Any] = {}
    for case in cases:
        try:
            plain, balanced = _train(case, False), _train(case, True)
        except Exception:
            found[case] = traceback.format_exc()
            continue
        pairs = [(np.array(balanced[0]), np.array(plain[0]))]
        pairs += [(balanced[1][name], expected) for name, expected in plain[1].items()]
        worst = max(np.linalg.norm(one - whole) / (np.linalg.norm(whole) or 1) for one, whole in pairs)
        found[case] = float(worst), *balanced[2:]
    return found


@pytest.fixture(scope="module")
def compared(pool) -> list[dict[str, Any]]:
    return pool.run(2, _compared, [*CASES])


@pytest.fixture(scope="module")
def adapted(bridge) -> list[dict[str, Any]]:
    return bridge.run(2, _compared, [*ADAPTED])


def _assert_same(case: str, ranks: list[dict[str, Any]], moves: bool) -> None:
    for rank in ranks:
        assert not isinstance(rank[case], str), rank[case]
        assert rank[case][0] <= 1e-12
    moved = max(moved for _, moved, _ in (rank[case] for rank in ranks))
    assert (moved > 0) == moves


@pytest.mark.parametrize("case", CASES)
def test_no_number_changes(compared, case):
    _assert_same(case, compared, CASES[case])


@pytest.mark.parametrize("case", ADAPTED)
def test_no_number_changes_with_adapters_of_bridge(adapted, case):
    _assert_same(case, adapted, ADAPTED[case])


ALONE = {
    "no_mask": "decoder.layers.0.self_attention and 1 more: attention with the mask no_mask, not causal",
    "first no_mask": "decoder.layers.0.self_attention: attention with the mask no_mask, not causal",
    "padding": "decoder.layers.0.self_attention and 1 more: attention with the mask padding, not causal",
    "padding_causal": "decoder.layers.0.self_attention and 1 more: attention with the mask padding_causal, not causal",
    "capped": "decoder.layers.0.self_attention and 1 more: Capped computes attention in a way of its own",
    "in 8 bits": "decoder.layers.0.self_attention and 1 more: attention in 8 bits (fp8_dot_product_attention)",
    "tower": "tower.layers.0.self_attention and 1 more: attention with the mask no_mask, not causal",
}


def test_layers_that_stay_are_named(compared):
    for case in CASES:
        said = [line for line in compared[0][case][2].splitlines() if "unbalanced" in line]
        expected = [ALONE[case.split(", ")[0]]] if case.split(", ")[0] in ALONE else []
        assert said == [f"> sequences: {line}; run as the loop has them, unbalanced" for line in expected], case


# Cases, if another than the plain one.
FAULTY = {
    "rewritten": "pairs, one object, recompute", "another layer": "tower causal",
    "recomputed": "tower, frozen, recompute", "recomputed attention": "tower, frozen, recompute attention",
}  # fmt: skip


def _refused(faults: Sequence[str]) -> dict[str, str]:
    """What each fault is told on this rank."""
    _connect()
    import torch.distributed as dist
    from megatron.core.transformer.enums import AttnMaskType

    rank = dist.get_rank()

    def change(word: str) -> Callable[..., Any]:
        def fault(model: Any, tokens: Any, places: Any, packed: Any, step: int, at: int) -> Any:
            here = rank == 1 and (step, at) == (1, 0)
            if word == "unpacked" and here:
                packed = None
            if word == "lengths" and here:
                packed.lengths = [8]
            if word == "other cp size" and here:
                packed.local_cp_size = 1
            if "call" in word and (step, at) == (1, 0):
                model.module.decoder.layers["later" in word].self_attention.attn_mask_type = AttnMaskType.no_mask
            return model, tokens, places, packed

        return fault

    told = {}
    for word in faults:
        try:
            _train(FAULTY.get(word, ""), True, change(word))
        except ValueError as error:
            told[word] = str(error)
    return told


REFUSED = {
    "unpacked": "ranks [1] got a micro-batch without PackedSeqParams, and ranks [0] one with them; pass them on every",
    "lengths": "lengths of 1 sequences are given with cu_seqlens of 2; pass one for each (ranks [1])",
    "other cp size": "micro-batches of different context-parallel sizes cannot be balanced; use one size (ranks [1])",
    "mask of a call": "decoder.layers.0.self_attention was called with the mask no_mask, and balanced attention is",
    "mask of a later call": "decoder.layers.1.self_attention was called with the mask no_mask, and balanced attention",
    "another layer": "different layers: ranks [0] are at tower.layers.0.self_attention, ranks [1] are at language.d",
    "recomputed": "layers.0.self_attention is recomputed on ranks [0] and not on ranks [1], where no gradient goes",
    "recomputed attention": "attention is recomputed on ranks [0] and not on ranks [1], where no gradient goes back to",
    "rewritten": "the PackedSeqParams of a micro-batch were set anew before decoder.layers.1.self_attention was recomp",
}


def test_ranks_agree_on_what_is_refused(pool):
    """Every rank says the same, at once: none waits for another until a timeout."""
    for told in pool.run(2, _refused, [*REFUSED]):
        assert told.keys() == REFUSED.keys()
        for fault, words in REFUSED.items():
            assert words in told[fault]
