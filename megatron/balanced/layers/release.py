"""The last stages of a pipeline leave the job, and the other ranks go on without them.

Ranks are numbered stage after stage, so those that stay keep their numbers and the last ones go, whole nodes first.
torch cannot take ranks out of its default group, but another group can take that group's place: a new one of the ranks
that stay. Megatron's groups are made anew in it. Who holds one that spans stages is given its successor; groups within
a stage lose nobody and stay good for whoever holds on to them, such as a strategy for checkpoints or replicas of
experts.

A rank leaves only when all others have what they need of it, as an ordinary exit with code 0, which no launcher takes
for a failure. Under SLURM the first rank then gives its nodes back.
"""

import argparse
import datetime
import os
import subprocess
import threading
import time
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import global_vars

from balancing.layers.repack import Release

__all__ = ["Departure", "Released", "hand_over_tensorboard"]

# Between a rank's last word and the end of its process lies the interpreter's shutdown. A node that SLURM takes away
# under a living process counts as a failure of the job.
_GRACE_SECONDS = 10.0
# Groups of Megatron's that have ranks of several stages.
_ACROSS_STAGES = ("pp", "mp", "embd", "pos_embd", "tp_ep_pp", "tp_ep_pp_with_egtp_remat")


class Released(SystemExit):
    """This rank has left the job, which goes on without it. Raised where it stood, it ends the process with code 0."""


class Departure:
    """One release, from the first new group to the last word. All ranks of the job make one together.

    Afterwards torch and Megatron know only the ranks that stay; on those that leave nothing has changed yet.
    """

    def __init__(self, args: argparse.Namespace, release: Release, chunks: Iterable[torch.nn.Module]) -> None:
        self.release = release
        self.leaves = args.rank in release.ranks
        self._timeout = datetime.timedelta(minutes=args.distributed_timeout_minutes)
        self._rank, self._stay = args.rank, range(release.stay)
        self._store = dist.PrefixStore(f"release/{args.world_size}", dist.distributed_c10d._get_default_store().clone())
        self._old = [dist.group.WORLD]
        smaller = dist.new_group(list(self._stay), timeout=self._timeout)
        if not self.leaves:
            dist.group.WORLD = smaller
            self._old += _regroup(args, release, list(chunks))

    def finish(self, groups: Iterable[Any]) -> None:
        """To be called when this rank has sent and received all. groups: of the old job, not needed any more.

        Raises Released on ranks that leave, once nobody needs them.
        """
        if self.leaves:
            self._store.wait([f"done/{rank}" for rank in self._stay], self._timeout)
            self._store.set(f"left/{self._rank}", "")
            dist.destroy_process_group()
            raise Released(0)
        self._store.set(f"done/{self._rank}", "")
        # All wait for one another, or a group would be torn down under a rank that still reads from it.
        self._store.wait([f"left/{rank}" for rank in self.release.ranks], self._timeout)
        for group in (*groups, *self._old):
            dist.destroy_process_group(group)
        if self._rank == 0:
            threading.Thread(target=_return_nodes, args=(self.release,), name="return-nodes", daemon=True).start()


def _regroup(args: argparse.Namespace, release: Release, chunks: list[torch.nn.Module]) -> list[Any]:
    """Make Megatron's groups for the ranks that stay, and give them to the model. Returns the groups given up."""
    old = ProcessGroupCollection.use_mpu_process_groups()
    args.world_size, stages = release.stay, release.stages
    args.pipeline_model_parallel_size = args.transformer_pipeline_model_parallel_size = stages
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(
        args.tensor_model_parallel_size,
        stages,
        pipeline_model_parallel_comm_backend=args.pipeline_model_parallel_comm_backend,
        use_sharp=args.use_sharp,
        context_parallel_size=args.context_parallel_size,
        hierarchical_context_parallel_sizes=args.hierarchical_context_parallel_sizes,
        expert_model_parallel_size=args.expert_model_parallel_size,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        nccl_communicator_config_path=args.nccl_communicator_config_path,
        create_gloo_process_groups=args.use_gloo_process_groups,
        high_priority_stream_groups=args.high_priority_stream_groups,
        sharp_enabled_group=args.sharp_enabled_group,
    )
    new = ProcessGroupCollection.use_mpu_process_groups()
    names = [field.name for field in fields(ProcessGroupCollection)]
    replaced = {id(group): getattr(new, name, None) for name in names if (group := getattr(old, name, None))}
    for module in {id(module): module for chunk in chunks for module in chunk.modules()}.values():
        for name, value in list(vars(module).items()):
            if isinstance(value, ProcessGroupCollection):
                for own in names:
                    if hasattr(value, own) and hasattr(new, own):
                        setattr(value, own, getattr(new, own))
            elif isinstance(value, dist.ProcessGroup) and id(value) in replaced:
                setattr(module, name, replaced[id(value)])
        if hasattr(getattr(module, "config", None), "pipeline_model_parallel_size"):
            module.config.pipeline_model_parallel_size = stages
    across = {id(group): group for name in _ACROSS_STAGES if (group := getattr(old, name, None)) is not None}
    return list(across.values())


def hand_over_tensorboard(args: argparse.Namespace) -> None:
    """The last rank writes Megatron's scalars: have the one that is the last now go on with them."""
    if args.tensorboard_dir and args.rank == args.world_size - 1 and global_vars.get_tensorboard_writer() is None:
        global_vars._set_tensorboard_writer(args)


def _return_nodes(release: Release) -> None:
    """Give the nodes whose ranks all left back to SLURM, where this job runs under it."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None or not release.nodes:
        return
    time.sleep(_GRACE_SECONDS)
    command = ["scontrol", "update", f"JobId={job}", f"NumNodes={release.nodes_left}"]
    try:
        subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    except (OSError, subprocess.SubprocessError) as error:
        why = (getattr(error, "stderr", None) or str(error)).strip()
        print(f"> nodes stay with job {job}: {' '.join(command)}: {why}", flush=True)
    else:
        print(f"> {len(release.nodes)} nodes went back to SLURM, {release.nodes_left} stay with job {job}", flush=True)
