"""What the papers publish, and the settings in which `benchmarks.headlines` looks for it."""

from dataclasses import dataclass

from benchmarks.experts import taot
from benchmarks.layers.plans import reach_settings
from benchmarks.layers.traces import TRACES

__all__ = ["HEADLINES", "NAMES", "QUESTIONS", "SETTINGS", "SKEW", "TABLE_IV", "TAOT_LEFT", "Headline"]

SKEW = 5.9  # busiest rank over the mean, of SmartMoE's record on 16 ranks


@dataclass(frozen=True)
class Headline:
    """A published figure.

    figure: how many times less time, imbalance or deviation than what `over` names.
    over: the column that it is over: "none", "paper", "rival" or "limit".
    source: where it stands.
    text: as a reader would say it; by default the figure.
    """

    figure: float
    over: str
    source: str
    text: str = ""

    def __str__(self) -> str:
        return self.text or f"{self.figure:.2f}"


_PROPHET = "arXiv 2411.10003"
# Models of Pro-Prophet's table IV: layers, hidden and inner size; times that FasterMoE and Pro-Prophet are faster than
# DeepSpeed-MoE with top-1, and with top-2.
TABLE_IV = {
    "S": (12, 512, 1024, (1.63, 1.98), (2.31, 2.62)),
    "M": (12, 1024, 2048, (1.99, 2.22), (1.82, 2.10)),
    "L": (12, 2048, 4096, (1.62, 1.80), (1.94, 2.23)),
    "DS": (24, 512, 1024, (1.34, 1.70), (1.77, 1.94)),
    "DM": (24, 1024, 2048, (1.68, 2.26), (1.84, 2.07)),
}
_TAOT, TAOT_LEFT = taot.PUBLISHED[32, 70]  # weighted transfers and points left by ECHO, LLEP, LPLB and TAOT
HEADLINES = {
    **{
        f"DynMo, {name}": Headline(figure, "none", "arXiv 2505.14864, abstract") for name, (_, figure) in TRACES.items()
    },
    "Zeppelin, mean": Headline(2.80, "none", "arXiv 2509.21841, abstract"),
    "Zeppelin, largest": Headline(6.60, "none", "arXiv 2509.21841, section 6"),
    "Pro-Prophet, largest": Headline(2.66, "none", f"{_PROPHET}, section VI.A"),
    "Pro-Prophet over FasterMoE, largest": Headline(1.50, "rival", f"{_PROPHET}, table V"),
    "Pro-Prophet, balance over FasterMoE": Headline(11.01, "rival", f"{_PROPHET}, figure 16"),
    **{
        f"Pro-Prophet, table IV, GPT-{name}, top-{top}": Headline(
            figures[1], "none", f"{_PROPHET}, table IV", f"{figures[1]:.2f} (FasterMoE {figures[0]:.2f})"
        )
        for name, (*_, first, second) in TABLE_IV.items()
        for top, figures in ((1, first), (2, second))
    },
    "TAOT, 70 % of imbalance on 32 ranks": Headline(
        1.0, "paper", "arXiv 2608.03676, table 1", f"{_TAOT[3]} transfers leave {TAOT_LEFT[3]} points"
    ),
    "UltraEP, share of forced balance": Headline(0.946, "limit", "arXiv 2606.04101", "0.946 on GPUs"),
}

# What a reader asks, by the first letter of the settings that answer.
QUESTIONS = {
    "L": "Does it help a pipeline whose layers differ?",
    "S": "Does it help documents of different length?",
    "E": "Does it help hot experts?",
}
NAMES = {  # of settings, as the tables show them
    "L1": "six heavy layers", "L2": "end of a schedule", "S1": "multi-head", "S2": "grouped queries",
    "S3": "longest documents", "E1": f"busiest {SKEW} times", "E2": "busiest 1.5 to 4 times", "E3": "the paper's GPUs",
    "E4": "deviations", "E5": "transfers", "E6": "over even routing",
}  # fmt: skip
_CASES = "; ".join(f"{each.name}: {each.setting}" for each in reach_settings())
SETTINGS = {
    "L1": "48 layers on 8 stages. DynMo publishes no setting; under these made-up costs its gain is there to be "
    f"had, since six of 48 layers, which static plans put into one stage, have nearly all work. {_CASES}. All "
    "methods know these costs. Limit: the slowest stage of the best plan, in a pipeline that neither fills "
    "nor drains.",
    "L2": "The same with the costs at the end of each published schedule (`benchmarks.layers.traces`). Over whole "
    "runs less is gained, 1.00 to 1.57 times: benchmarks/README.md.",
    "S1": "One micro-batch of 4,096 tokens a rank, a 7B model with multi-head attention, A800s with four cards a "
    "node, all as in the paper. Documents of seven published length distributions (three emulated, with one "
    "layer, on 2 x 8 and 4 x 4 ranks) differ in length and in nothing else. Without: Transformer Engine's "
    "ring, which the headline is over. Modelled steps have embedding, head, gradient sums under the backward "
    "pass, and the optimizer. Limit: all FLOPs spread evenly and all transfers hidden.",
    "S2": "The same with grouped queries 8:1: keys are an eighth, so a ring waits less.",
    "S3": "The longest documents (prolong), multi-head attention, two nodes of eight H200s with eight cards, which "
    "the paper also used.",
    "E1": f"16 ranks on two nodes of A800s, experts of Mixtral 8x7B's size, top-2; the busiest rank has {SKEW} times "
    "the mean, as in SmartMoE's public record of training without a balance loss (--trace replays it); "
    "Pro-Prophet's runs had none either. Planned from the step before. Ours has two slots a rank; peers have "
    "two or more, whichever is faster (eight emulated, any number modelled), and send replicas under "
    "computation. Limit: a bound of all placements, modelled; even routing, emulated, which replicas can "
    "pass, since they keep tokens in their node.",
    "E2": "The same with 1.5, 2, 3 and 4 times the mean, layer by layer.",
    "E3": "16 GPUs, one expert each, 4 x 4, 1,024 tokens a GPU, float32, sizes of the paper, links at data-sheet "
    f"speed, 100 Gbit/s a node and PCIe 3 inside; the busiest rank has about {SKEW} times the mean. NVLink "
    "between pairs of GPUs is not modelled. Slots as in the first. Limit: even routing.",
    "E4": "Standard deviation of the loads of 16 ranks: FasterMoE's over that of others, in the layer where the "
    "ratio is largest, as the paper counts; deviations below one token count as one.",
    "E5": "Points of imbalance left by at most TAOT's number of weighted transfers (1 inside a node, 3 between). "
    "Peers as published; ours on loads by Zipf's law of the same imbalance, since the paper's are not public.",
    "E6": "The same as with 1.5 to 4 times, over even routing. The published figure is of GPUs at EP 64, where waves "
    "of tiles cost more than here: do not set one against the other.",
}  # fmt: skip
