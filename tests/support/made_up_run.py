"""A synthetic training run of known imbalance, timed by an exact 1F1B schedule, as input of the tests of the report."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from balancing.report import EventLog, IterationRecord, RankRecord, Span, TraceLog, observe


@dataclass(frozen=True)
class Job:
    """A made-up training job whose unevenness is known: 1F1B over `stages`, `replicas` that share their experts."""

    stages: int = 4
    replicas: int = 2
    layers: int = 8
    micro_batches: int = 8
    experts: int = 8
    forward: float = 0.010  # seconds of a layer on one micro-batch; backward takes twice as long
    embedding: float = 0.0
    head: float = 0.0
    slow: dict = field(default_factory=dict)  # layer -> factor
    hot: dict = field(default_factory=dict)  # (layer, expert) -> factor
    long: dict = field(default_factory=dict)  # replica -> tokens of one long document
    memory: dict = field(default_factory=dict)  # rank -> bytes
    moved: dict = field(default_factory=dict)  # layer -> stage, where that is not an equal part of the layers
    rank_slow: dict = field(default_factory=dict)  # rank -> factor
    tokens: int = 8192
    noise: float = 0.01
    recompute: bool = False

    def record(self, iteration: int) -> IterationRecord:
        draw = np.random.default_rng(iteration)
        names = ["embedding"] * (self.embedding > 0) + list(range(self.layers)) + ["head"] * (self.head > 0)
        stage_of = {n: 0 if n == "embedding" else self.stages - 1 if n == "head" else n * self.stages // self.layers
                    for n in names} | self.moved  # fmt: skip
        routed = {}
        for layer in range(self.layers if self.experts else 0):
            share = draw.dirichlet(np.full(self.experts, 200.0), size=self.replicas)
            for (hot_layer, expert), factor in self.hot.items():
                share[:, expert] *= factor if hot_layer == layer else 1.0
            routed[layer] = np.round(share / share.sum(1, keepdims=True) * self.tokens).astype(int)
        seconds = {}  # (layer, replica) -> busy seconds of one forward
        for name in names:
            base = {"embedding": self.embedding, "head": self.head}.get(name, self.forward) * self.slow.get(name, 1.0)
            for replica in range(self.replicas):
                rank = stage_of[name] * self.replicas + replica
                load = 1.0
                if name in routed and self.replicas > 1:
                    home = routed[name].sum(0).reshape(self.replicas, -1).sum(1)
                    load = 0.4 + 0.6 * home[replica] / home.mean()
                jitter = 1 + self.noise * draw.standard_normal()
                seconds[name, replica] = base * load * jitter * self.rank_slow.get(rank, 1.0)
        ranks, end = [], 0.0
        for replica in range(self.replicas):
            mine = [[n for n in names if stage_of[n] == stage] for stage in range(self.stages)]
            wall = {n: max(seconds[n, r] for r in range(self.replicas)) if n in routed else seconds[n, replica]
                    for n in names}  # fmt: skip
            for stage, calls in enumerate(self.schedule([sum(wall[n] for n in part) for part in mine])):
                spans = []
                for kind, micro_batch, start, length in calls:
                    spans.append(Span(f"{kind}-step", "", 0, micro_batch, start, length, length))
                    for name in mine[stage] if kind == "forward" else mine[stage][::-1]:
                        parts = [("forward", 1.0)] if kind == "forward" else [("backward", 2.0)]
                        if kind == "backward" and self.recompute:
                            parts = [("recompute", 1.0), ("backward", 2.0)]
                        for phase, scale in parts:
                            took = wall[name] * scale
                            spans.append(Span(phase, name, 0, micro_batch, start, took, seconds[name, replica] * scale))
                            start += took
                rank = stage * self.replicas + replica
                busy = sum(s.busy for s in spans if s.layer != "")
                end = max(end, *(call[2] + call[3] for call in calls))
                lengths = draw.lognormal(6.5, 0.6, 40).astype(int) + 1
                lengths = [*lengths[np.cumsum(lengths) <= self.tokens - self.long.get(replica, 0)]]
                lengths += [self.long[replica]] if replica in self.long else []
                lengths += [self.tokens - int(sum(lengths))]
                area = sum(int(n) * (int(n) + 1) // 2 for n in lengths)
                ranks.append(
                    RankRecord(
                        rank=rank, stage=stage, node=rank // 4, data=replica, tensor=0, expert=replica if routed else 0,
                        context=0, start=0.0, busy_seconds=busy, step_seconds=0.0,
                        memory_bytes=self.memory.get(rank, 8 << 30) + int(draw.integers(1 << 20)),
                        tokens=int(sum(lengths)), attention_area=area, longest_sequence=int(max(lengths)), spans=spans,
                        expert_tokens={n: routed[n][replica] for n in mine[stage] if n in routed},
                    )
                )  # fmt: skip
        step = end + 0.02
        for rank_record in ranks:
            rank_record.step_seconds = step
            rank_record.spans.append(Span("optimizer", "", 0, 0, end, 0.01, 0.0))
        return IterationRecord(iteration, step, ranks)

    def schedule(self, forward: list[float]) -> list[list[tuple[str, int, float, float]]]:
        """Exact times of 1F1B: for each stage (kind, micro-batch, start, seconds)."""
        stages, m = len(forward), self.micro_batches
        back = 3.0 if self.recompute else 2.0
        order = []
        for stage in range(stages):
            warm = min(stages - stage - 1, m)
            steady = [x for i in range(m - warm) for x in (("forward", warm + i), ("backward", i))]
            order.append([("forward", i) for i in range(warm)] + steady + [("backward", i) for i in range(m - warm, m)])
        done: dict[tuple[str, int, int], float] = {}
        calls: list[list[tuple[str, int, float, float]]] = [[] for _ in forward]
        clock, at = [0.0] * stages, [0] * stages
        while any(at[s] < 2 * m for s in range(stages)):
            for stage in range(stages):
                while at[stage] < 2 * m:
                    kind, i = order[stage][at[stage]]
                    before = (kind, stage - 1, i) if kind == "forward" else (kind, stage + 1, i)
                    if 0 <= before[1] < stages and before not in done:
                        break
                    start = max(clock[stage], done.get(before, 0.0))
                    length = forward[stage] * (1.0 if kind == "forward" else back)
                    clock[stage] = done[kind, stage, i] = start + length
                    calls[stage].append((kind, i, start, length))
                    at[stage] += 1
        return calls


def write_run(directory: Path, job: Job, iterations: int) -> Path:
    trace = TraceLog(directory)
    with EventLog(directory) as log:
        for iteration in range(1, iterations + 1):
            record = job.record(iteration)
            log.write(observe(record))
            trace.add(record)
    trace.write()
    return directory
