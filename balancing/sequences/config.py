"""Settings of balanced sequences. Each field is one command-line flag."""

from dataclasses import dataclass, field

__all__ = ["SequenceConfig"]


@dataclass(frozen=True)
class SequenceConfig:
    """Raises ValueError for a value out of range."""

    balance_sequences: bool = field(
        default=False,
        metadata={
            "help": "Spread each batch of documents over ranks so that all have the same tokens in linear layers and "
            "the same work in attention. Losses do not change."
        },
    )
    sequence_domain: str = field(
        default="auto",
        metadata={
            "choices": ["auto", "context", "data"],
            "help": "The ranks that share micro-batches. context: the context-parallel ranks of each data-parallel "
            "rank. data: all data-parallel ranks with their context-parallel ranks. auto: data with "
            "--context-parallel-size 1, else the quicker one by the cost model, for documents of the training set.",
        },
    )
    sequence_micro_batches: bool = field(
        default=False,
        metadata={
            "help": "Deal the documents of a step over its micro-batches, so that pipeline stages wait as little as "
            "possible. A micro-batch has at most 1.25 times the tokens that it had, or what "
            "--sequence-token-capacity allows. With losses of routers or fp8, Megatron-LM's micro-batches are dealt "
            "as a whole. Losses do not change."
        },
    )
    sequence_planner: str = field(
        default="auto",
        metadata={
            "choices": ["auto", "chunks", "zones", "ring", "gather"],
            "help": "chunks: equal tokens and equal attention in one layout. zones: as in Zeppelin. ring, gather: as "
            "in Transformer Engine and Llama 3. auto: the planner with the least predicted time for each batch on the "
            "--cluster.",
        },
    )
    sequence_chunk: int = field(
        default=0, metadata={"metavar": "N", "help": "Tokens of a chunk; 0 leaves it to the planner."}
    )
    sequence_token_capacity: int = field(
        default=0,
        metadata={"metavar": "N", "help": "Most tokens that a rank may hold in attention; 0 is no limit."},
    )
    sequence_routing: str = field(
        default="auto",
        metadata={
            "metavar": "auto|off|N",
            "help": "Ranks of a node that share a transfer to another node, so that all its NICs carry a part of it.",
        },
    )

    def __post_init__(self) -> None:
        if self.sequence_chunk < 0:
            raise ValueError(f"--sequence-chunk {self.sequence_chunk} must be at least 1, or 0 to leave it open")
        if self.sequence_token_capacity < 0:
            raise ValueError(
                f"--sequence-token-capacity {self.sequence_token_capacity} must be at least 1, or 0 for no limit"
            )
        routing = self.sequence_routing
        if routing not in ("auto", "off") and not (routing.isascii() and routing.isdigit() and int(routing) > 0):
            raise ValueError(f"--sequence-routing {routing} is none of auto, off and a number of ranks of at least 1")

    @property
    def routing(self) -> str | int:
        """`sequence_routing` with a number as a number."""
        return int(self.sequence_routing) if self.sequence_routing.isdigit() else self.sequence_routing
