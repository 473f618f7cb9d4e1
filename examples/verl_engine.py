"""verl with balanced experts and attention in its updates of actors and critics.

    export VERL_USE_EXTERNAL_MODULES=examples.verl_engine VERL_ENGINE_VENDOR=balanced
    python -m verl.trainer.main_ppo --config-name ppo_megatron_trainer.yaml actor_rollout_ref.model.path=... ...

verl imports this module in each of its processes. To balance experts alone with default settings, no module is needed:
install this package and set VERL_ENGINE_VENDOR=balanced.
"""

from balancing.cluster import Cluster
from balancing.experts.config import ExpertConfig
from balancing.sequences.config import SequenceConfig
from megatron.balanced.loops.choice import Choice
from megatron.balanced.loops.verl import register

CHOICE = Choice(
    experts=ExpertConfig(enabled=True, replica_slots=2),
    sequences=SequenceConfig(enabled=True),  # needs use_remove_padding and several data- or context-parallel ranks
    cluster=Cluster.preset("h100-8x400g"),
)

register(CHOICE, tokens=32768)  # per micro-batch, the same as ppo_max_token_len_per_gpu
