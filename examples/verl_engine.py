"""verl with balanced experts and attention in its updates of actors and critics.

    export VERL_USE_EXTERNAL_MODULES=examples.verl_engine VERL_ENGINE_VENDOR=balanced
    python -m verl.trainer.main_ppo --config-name ppo_megatron_trainer.yaml actor_rollout_ref.model.path=... ...

verl imports this module in each of its processes. With defaults for experts alone no module is needed:
VERL_ENGINE_VENDOR=balanced is enough where this package is installed.
"""

from balancing.cluster import Cluster
from balancing.experts.config import ExpertConfig
from balancing.sequences.config import SequenceConfig
from megatron.balanced.loops.choice import Choice
from megatron.balanced.loops.verl import register

CHOICE = Choice(
    experts=ExpertConfig(enabled=True, replica_slots=2),
    sequences=SequenceConfig(enabled=True),  # of use_remove_padding, with more data- or context-parallel ranks than one
    cluster=Cluster.preset("h100-8x400g"),
)

register(CHOICE, tokens=32768)  # of a micro-batch, as ppo_max_token_len_per_gpu
