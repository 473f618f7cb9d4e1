"""The few numbers of an iteration that are worth a curve in TensorBoard or W&B.

They say whether something is uneven and of which kind. Only the effect of replicas is reported per layer, under a
prefix of its own. The event log has all other numbers.
"""

from collections.abc import Iterable
from typing import Any

from balancing.report.events import imbalance, observe
from balancing.report.record import IterationRecord

__all__ = ["scalars"]

_OF_REPLICAS = {
    "imbalance-before": "imbalance_before",
    "imbalance-after": "imbalance_after",
    "replicas": "replicas",
    "late-copies": "late_copies",
    "moved-bytes": "moved_bytes",
    "plan-ms": "plan_ms",
    "exposed-ms": "apply_ms",
}


def scalars(observed: IterationRecord | Iterable[dict[str, Any]]) -> dict[str, float]:
    """Name -> value of one iteration, from its record or from the events that `observe` made of it.

    All are max / mean (1.0 is perfect), except the bubble fraction. Only measured values are returned: a dense model
    has no expert curves.

    balance/stage-imbalance        busy time of pipeline stages
    balance/rank-imbalance         busy time of ranks
    balance/layer-imbalance        time of layers, embedding and head left out
    balance/bubble-fraction        share of rank time that was idle, from 0 to 1
    balance/token-imbalance        tokens of ranks
    balance/area-imbalance         causal attention area of ranks
    balance/expert-imbalance       tokens of experts, in the worst MoE layer
    balance/expert-rank-imbalance  tokens of expert-parallel ranks, in the worst MoE layer

    After a round of trials, balance-gain/NAME: seconds of a step without the balancer over those with it.

    With balanced experts, for each MoE layer balance-experts/NAME/layer-N, N from 0:

    imbalance-before, imbalance-after  tokens of expert-parallel ranks, without and with replicas
    replicas, late-copies              number over all ranks; of late copies, also over micro-batches
    moved-bytes                        of weights and gradients, sent by all ranks
    plan-ms, exposed-ms                milliseconds of planning, and of waiting for transfers
    """
    events = observe(observed) if isinstance(observed, IterationRecord) else observed
    values: dict[str, float] = {}
    for line in events:
        if line["action"] == "trial":
            values[f"balance-gain/{line['balancer']}"] = line["gain"]
            continue
        if line["action"] != "observe":
            if (line["balancer"], line["unit"]) == ("experts", "layer"):
                for name, key in _OF_REPLICAS.items():
                    values[f"balance-experts/{name}/layer-{line['layer']}"] = line[key]
            continue
        match line["balancer"], line["unit"]:
            case "layers", "stage":
                values["balance/stage-imbalance"] = line["imbalance_before"]
                values["balance/rank-imbalance"] = imbalance(line["rank_busy_s"])
                values["balance/bubble-fraction"] = line["bubble_fraction"]
            case "layers", "layer":
                values["balance/layer-imbalance"] = line["imbalance_before"]
            case "sequences", "rank":
                values["balance/token-imbalance"] = line["token_imbalance"]
                values["balance/area-imbalance"] = line["imbalance_before"]
            case "experts", "rank":
                for name, key in (("expert", "expert_imbalance"), ("expert-rank", "imbalance_before")):
                    name = f"balance/{name}-imbalance"
                    values[name] = max(values.get(name, 1.0), line[key])
    return values
