"""The buffers of `--moe-token-dispatcher-type flex` over gloo, in torch: DeepEP's, HybridEP's and NCCL EP's.

`Buffer` stands in for `deep_ep.Buffer` (deepseek-ai/DeepEP, deep_ep/buffer.py), `HybridEPBuffer` for
`deep_ep.HybridEPBuffer` (its branch hybrid-ep, deep_ep/hybrid_ep_buffer.py), `NcclEp` for the module
`transformer_engine.pytorch.ep`, as far as megatron-core calls them: the same parameters and layouts of rows and
indices. Handles are opaque to megatron-core but for the last item of HybridEP's, which tells whether rows were dropped.
Probabilities are float32, as there; rows keep their precision, so that runs in float64 can be compared.
"""

import importlib
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.replaced import replace_name

__all__ = ["Buffer", "HybridEPBuffer", "NcclEp", "install_flex", "train_flex"]


def _exchange(rows: torch.Tensor, send: list[int], receive: list[int], group: Any) -> torch.Tensor:
    """Rows of each rank in the order of ranks. rows: [sum(send), ...]."""
    out = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
    return out


def _of_all_ranks(counts: torch.Tensor, group: Any) -> torch.Tensor:
    """[rank, ...] from each rank's counts."""
    parts = [torch.empty_like(counts) for _ in range(group.size())]
    dist.all_gather(parts, counts.contiguous(), group=group)
    return torch.stack(parts)


class EventHandle:
    pass


class EventOverlap:
    def __init__(self, event: EventHandle | None = None) -> None:
        self.event = event

    def current_stream_wait(self) -> None:
        assert self.event is not None, "nothing was started asynchronously"


class _Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Buffer:
    """DeepEP's: a token goes once to each rank that has one of its experts, with the experts' numbers on that rank."""

    num_sms = 20

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0, "The SM count must be even"
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> _Config:
        return _Config()

    @staticmethod
    def get_combine_config(num_ranks: int) -> _Config:
        return _Config()

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]:
        assert topk_idx.dtype == torch.int64 and num_experts % self.group.size() == 0
        to_expert = torch.nn.functional.one_hot(topk_idx + 1, num_experts + 1)[:, :, 1:].sum(1)
        in_rank = to_expert.view(len(topk_idx), self.group.size(), -1).sum(-1) > 0
        event = EventOverlap(EventHandle() if async_finish else None)
        return in_rank.sum(0).int(), None, to_expert.sum(0).int(), in_rank, event

    def dispatch(
        self,
        x: torch.Tensor,
        handle: Any = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Any = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        assert x.dim() == 2 and x.is_contiguous()
        event = EventOverlap(EventHandle() if async_finish else None)
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            token, send, receive, _ = handle
            return _exchange(x[token], send, receive, self.group), None, None, None, None, event
        rank, token = is_token_in_rank.T.nonzero(as_tuple=True)
        send = num_tokens_per_rank.tolist()
        receive = _of_all_ranks(num_tokens_per_rank, self.group)[:, self.group.rank()].tolist()
        local = len(num_tokens_per_expert) // self.group.size()
        index = topk_idx[token] - rank[:, None] * local
        here = (index >= 0) & (index < local) & (topk_idx[token] >= 0)
        index = torch.where(here, index, -1)
        weights = torch.where(here, topk_weights[token], 0).to(torch.float32)
        index, weights = (_exchange(part, send, receive, self.group) for part in (index, weights))
        counts = torch.nn.functional.one_hot(index + 1, local + 1)[:, :, 1:].sum((0, 1)).tolist()
        handle = token, send, receive, len(x)
        return _exchange(x[token], send, receive, self.group), index, weights, counts, handle, event

    def combine(
        self,
        x: torch.Tensor,
        handle: Any,
        topk_weights: torch.Tensor | None = None,
        bias: Any = None,
        config: Any = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        token, send, receive, tokens = handle
        back = [
            None
            if part is None
            else part.new_zeros(tokens, part.shape[1]).index_add(0, token, _exchange(part, receive, send, self.group))
            for part in (x, topk_weights)
        ]
        return *back, EventOverlap(EventHandle() if async_finish else None)


class HybridEPBuffer:
    """HybridEP's: rows arrive sorted by local expert, each expert's padded to a multiple. All ranks have equally many
    tokens. Probabilities are [token, expert of all ranks], and [row] where they arrive."""

    def __init__(
        self,
        group: Any,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
    ) -> None:
        assert group.size() > 1 and not use_fp8
        self.group, self.num_local_experts = group, num_local_experts

    def dispatch_with_permute(
        self,
        *,
        hidden: torch.Tensor,
        num_of_experts_per_rank: int | None = None,
        routing_map: torch.Tensor | None = None,
        probs: torch.Tensor | None = None,
        scaling_factor: torch.Tensor | None = None,
        num_permuted_tokens: Any = None,
        pad_multiple: int | None = None,
        handle: Any = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, torch.Tensor, Any]:
        assert scaling_factor is None
        if handle is None:
            handle = self._handle(routing_map, num_of_experts_per_rank, pad_multiple, num_permuted_tokens)
        token, expert, send, receive, row, kept, counts, rows, _, _ = handle
        probs = None if probs is None else probs[token, expert].to(torch.float32)
        out = []
        for part in (hidden[token], probs):
            if part is None:
                out.append(None)
                continue
            arrived = _exchange(part, send, receive, self.group)
            out.append(arrived.new_zeros(rows, *part.shape[1:]).index_copy(0, row[kept], arrived[kept]))
        return *out, None, counts, handle

    def _handle(
        self, routing_map: torch.Tensor, local: int, pad_multiple: int | None, num_permuted_tokens: Any
    ) -> tuple[Any, ...]:
        assert routing_map.dtype == torch.bool and routing_map.shape[1] == local * self.group.size()
        tokens = _of_all_ranks(torch.tensor([len(routing_map)]), self.group)
        assert (tokens == len(routing_map)).all(), f"ranks have {tokens.flatten().tolist()} tokens"
        expert, token = routing_map.T.nonzero(as_tuple=True)
        sent = _of_all_ranks(routing_map.sum(0), self.group).view(self.group.size(), self.group.size(), local)
        received = sent[:, self.group.rank()]  # [source_rank, local expert]
        counts = received.sum(0)
        padded = counts if not pad_multiple else -(-counts // pad_multiple) * pad_multiple
        of_expert = torch.arange(local).repeat(self.group.size()).repeat_interleave(received.flatten())
        order = torch.argsort(of_expert, stable=True)
        place = torch.arange(len(order)) - (counts.cumsum(0) - counts)[of_expert[order]]
        row = torch.empty_like(order)
        row[order] = (padded.cumsum(0) - padded)[of_expert[order]] + place
        rows = int(padded.sum() if num_permuted_tokens is None else num_permuted_tokens)
        kept = row < rows
        send, receive = sent[self.group.rank()].sum(1).tolist(), received.sum(1).tolist()
        overflow = torch.tensor(int(not kept.all()))
        return token, expert, send, receive, row, kept, padded, rows, routing_map.shape, overflow

    def combine_with_unpermute(
        self,
        *,
        hidden: torch.Tensor,
        probs: torch.Tensor | None = None,
        handle: Any = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        token, expert, send, receive, row, kept, _, rows, shape, _ = handle
        assert len(hidden) == rows
        out = []
        for part in (hidden, probs):
            if part is None:
                out.append(None)
                continue
            arrived = part.new_zeros(len(row), *part.shape[1:])
            arrived[kept] = part[row[kept]]
            out.append(_exchange(arrived, receive, send, self.group))
        combined = hidden.new_zeros(shape[0], hidden.shape[1]).index_add(0, token, out[0])
        if probs is None:
            return combined, None
        return combined, probs.new_zeros(shape).index_put((token, expert), out[1])


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: Any, tokens: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor) -> Any:
        rows, weights, _, counts, handle = buffer.exchange.dispatch_with_permute(
            hidden=tokens,
            routing_map=routing_map,
            probs=probs,
            num_of_experts_per_rank=buffer.num_local_experts,
            pad_multiple=buffer.alignment,
            num_permuted_tokens=buffer.recv_capacity_per_rank,
        )
        assert not handle[-1], f"rank has more rows than {buffer.recv_capacity_per_rank}: NCCL EP traps"
        buffer.handle = ctx.handle = handle
        ctx.exchange = buffer.exchange
        ctx.mark_non_differentiable(counts)
        return rows, weights, counts

    @staticmethod
    def backward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, counts: Any) -> Any:
        return None, *ctx.exchange.combine_with_unpermute(hidden=rows, probs=weights, handle=ctx.handle), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: Any, rows: torch.Tensor) -> torch.Tensor:
        ctx.exchange, ctx.handle = buffer.exchange, buffer.handle
        return buffer.exchange.combine_with_unpermute(hidden=rows, handle=buffer.handle)[0]

    @staticmethod
    def backward(ctx: Any, tokens: torch.Tensor) -> Any:
        return None, ctx.exchange.dispatch_with_permute(hidden=tokens.contiguous(), handle=ctx.handle)[0]


class NcclEp:
    """Transformer Engine's module: started once for one number of experts; rows as HybridEP's, in a buffer of one size.

    megatron-core 0.19.2 does not give `num_topk`, which newer versions of `ep_bootstrap` demand.
    """

    _BOOTSTRAPPED = False
    group: Any = None
    num_experts = 0

    @classmethod
    def ep_bootstrap(
        cls,
        ep_group: Any,
        num_experts: int,
        max_tokens_per_rank: int,
        recv_capacity_per_rank: int,
        hidden_dim: int,
        max_num_sms: int = 0,
        zero_copy: bool = False,
    ) -> None:
        assert not cls._BOOTSTRAPPED and not zero_copy
        cls._BOOTSTRAPPED, cls.group, cls.num_experts = True, ep_group, num_experts

    class EpBuffer:
        def __init__(
            self,
            top_k: int,
            max_tokens_per_rank: int,
            recv_capacity_per_rank: int,
            hidden_dim: int,
            num_local_experts: int,
            alignment: int = 0,
        ) -> None:
            assert num_local_experts * NcclEp.group.size() == NcclEp.num_experts, "not what was started"
            self.num_local_experts, self.alignment = num_local_experts, alignment
            self.recv_capacity_per_rank = recv_capacity_per_rank
            self.exchange = HybridEPBuffer(NcclEp.group, hidden_dim, max_tokens_per_rank, num_local_experts)
            self.handle: Any = None

    @staticmethod
    def ep_dispatch(
        buffer: Any,
        tokens: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        recv_tokens: torch.Tensor | None = None,
        recv_topk_weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert topk_idx.dtype == torch.int64 and recv_tokens is None and recv_topk_weights is None
        dense = topk_weights.new_zeros(len(tokens), NcclEp.num_experts)
        routing_map = torch.zeros(dense.shape, dtype=torch.bool).scatter(1, topk_idx, True)
        return _Dispatch.apply(buffer, tokens, dense.scatter(1, topk_idx, topk_weights), routing_map)

    @staticmethod
    def ep_combine(
        buffer: Any, expert_out: torch.Tensor, *, num_local_tokens: int | None = None, grad_out: Any = None
    ) -> torch.Tensor:
        assert grad_out is None
        combined = _Combine.apply(buffer, expert_out)
        assert len(combined) == num_local_tokens
        return combined


def install_flex() -> dict[str, int]:
    """Have Megatron-LM find the stand-ins in this process, for good. Returns how often each kind dispatched."""
    from megatron.core.transformer.moe import fused_a2a, token_dispatcher

    calls = {"deepep": 0, "hybridep": 0, "ncclep": 0}

    def counted(original: Any, kind: str) -> Any:
        def dispatch(*args: Any, **kwargs: Any) -> Any:
            calls[kind] += 1
            return original(*args, **kwargs)

        return dispatch

    Buffer.dispatch = counted(Buffer.dispatch, "deepep")
    HybridEPBuffer.dispatch_with_permute = counted(HybridEPBuffer.dispatch_with_permute, "hybridep")
    NcclEp.ep_dispatch = staticmethod(counted(NcclEp.ep_dispatch, "ncclep"))
    engine = {"transformer_engine": {}, "transformer_engine.pytorch": {"ep": NcclEp}}
    before = {name: sys.modules[name] for name in engine if name in sys.modules}
    for name, members in (
        *engine.items(),
        ("deep_ep", {"Buffer": Buffer, "HybridEPBuffer": HybridEPBuffer}),
        ("deep_ep.utils", {"EventHandle": EventHandle, "EventOverlap": EventOverlap}),
    ):
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(members)
        sys.modules[name] = module
    importlib.reload(fused_a2a)  # it defines its functions where the packages can be imported
    for name in engine:
        del sys.modules[name]
    sys.modules |= before
    for name, value in vars(fused_a2a).items():
        if not name.startswith("_") and hasattr(token_dispatcher, name):
            replace_name(token_dispatcher, name, value)
    return calls


def train_flex(argv: list[str], keep_parameters: bool) -> Any:
    """As `tests.support.stand_ins.fused_moe.train_fused`, with the buffers. Fails if the chosen one was not called."""
    from tests.support.stand_ins.fused_moe import train_fused

    calls = install_flex()
    run = train_fused(argv, keep_parameters)
    assert calls[argv[argv.index("--moe-flex-dispatcher-backend") + 1]], calls
    return run
