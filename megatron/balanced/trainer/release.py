"""Release of ranks: the last stages of a pipeline leave the job, and the other ranks continue.

Ranks are numbered stage after stage, so the ranks that stay keep their numbers, and whole nodes become free. torch
cannot remove ranks from its default process group, so the group is replaced by a new one of the ranks that stay, and
Megatron-LM creates its process groups within that. Process groups within a stage lose no rank: Megatron-LM gets the
existing ones with their communicators. Process groups across stages are replaced by new ones in all modules that refer
to them. New groups are connected at once, while no gradients take up memory.

A rank leaves once all others have received its tensors, with exit code 0, so that no launcher reports a failure. Under
SLURM the first rank then returns its nodes.
"""

import argparse
import contextlib
import datetime
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu, parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import global_vars

from balancing.layers.repack import Release
from balancing.messages import connect
from megatron.balanced.run import Run
from megatron.balanced.shared.callbacks import StepCallback

__all__ = ["Departure", "Released", "TensorBoardOfTheLast"]

# A rank sends its last message before its interpreter has shut down. If SLURM takes a node from a living process, it
# counts the job as failed.
_GRACE_SECONDS = 10.0

_Key = tuple[str, tuple[int, ...]]  # what a process group is for, and its ranks


class Released(SystemExit):
    """This rank has left the job, which continues without it. Its callbacks get no further call. Ends the process with
    code 0."""


class Departure:
    """One release, from the first new process group to the exit. All ranks of the job construct it together.

    On ranks that stay, the process groups of torch and Megatron then contain only ranks that stay. Those of ranks that
    leave are unchanged.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        run: Run,
        release: Release,
        chunks: Iterable[torch.nn.Module],
        gather: Callable[[Any], list[Any]],
    ) -> None:
        self.release, self._run = release, run
        self.leaves = args.rank in release.ranks
        self._timeout = datetime.timedelta(minutes=args.distributed_timeout_minutes)
        self._rank, self._stay = args.rank, range(release.stay)
        self._store = dist.PrefixStore(f"release/{args.world_size}", dist.distributed_c10d._get_default_store().clone())
        self._shared = _groups_of_both(release)
        here = _groups_of_megatron()
        # For each purpose and set of ranks, the most groups on any rank: all ranks must create the same groups.
        known = Counter[_Key]()
        for counts in gather({key: len(process_groups) for key, process_groups in here.items()}):
            known |= Counter(counts)
        smaller = dist.new_group(list(self._stay), timeout=self._timeout)
        if not self.leaves:
            dist.group.WORLD = smaller
            connect(smaller)
            with _groups_kept(here, known):
                _regroup(args, release, list(chunks))

    def finish(self) -> None:
        """Destroy all process groups that contain both ranks that stay and ranks that leave, whoever made them. Called
        when this rank has sent and received everything.

        Raises Released on ranks that leave, once no other rank needs them.
        """
        # All ranks wait here, so that no group is destroyed while a rank still reads from it.
        others = [f"done/{rank}" for rank in self._stay] if self.leaves else []
        others += [] if self.leaves else [f"left/{rank}" for rank in self.release.ranks]
        self._store.set(f"{'left' if self.leaves else 'done'}/{self._rank}", "")
        self._store.wait(others, self._timeout)
        for group in self._shared:  # the last is the default group, with which torch destroys all that are left
            dist.destroy_process_group(group)
        if self.leaves:
            self._run.leave()
            sys.stdout.flush()
            raise Released(0)
        if self._rank == 0:
            threading.Thread(target=_return_nodes, args=(self.release,), name="return-nodes", daemon=True).start()


def _groups_of_both(release: Release) -> list[dist.ProcessGroup]:
    """The process groups of this rank that contain both ranks that leave and ranks that stay, the newest first.

    NCCL waits for the other ranks of a node when it destroys a communicator, so all ranks must destroy groups in the
    same order. Names of groups are numbers in the order of creation, the same on all ranks.
    """
    names = dist.distributed_c10d._world.pg_names
    shared = []
    for group, name in names.items():
        leaving = set(dist.get_process_group_ranks(group)) & set(release.ranks)
        if leaving and len(leaving) < dist.get_world_size(group):
            shared.append((int(name), group))
    groups = [group for _, group in sorted(shared, key=lambda numbered: numbered[0], reverse=True)]
    assert groups[-1] is dist.group.WORLD
    return groups


def _groups_of_megatron() -> dict[_Key, list[dist.ProcessGroup]]:
    """Megatron-LM's process groups of this rank in the order of creation, without those over gloo: Megatron-LM destroys
    these before it creates new ones."""
    groups: dict[_Key, list[dist.ProcessGroup]] = {}
    names = dist.distributed_c10d._world.pg_names
    for process_group in sorted(names, key=lambda made: int(names[made])):
        name = process_group.group_desc
        if name not in ("undefined", "default_pg") and not name.endswith("_GLOO"):
            key = process_group.group_desc, tuple(dist.get_process_group_ranks(process_group))
            groups.setdefault(key, []).append(process_group)
    return groups


@contextlib.contextmanager
def _groups_kept(here: dict[_Key, list[dist.ProcessGroup]], known: Counter[_Key]) -> Iterator[None]:
    """A context in which Megatron-LM gets an existing process group instead of a new one of the same purpose and ranks.
    New ones are connected.

    here: the existing groups of this rank, by purpose and ranks.
    known: the number of existing groups, by purpose and ranks, at most on any rank.
    """
    make = parallel_state.create_group

    def create_group(ranks: list[int], *options: Any, group_desc: str, **more: Any) -> Any:
        key = group_desc, tuple(ranks)
        is_member = dist.get_rank() in ranks
        if known[key]:
            known[key] -= 1
            return here[key].pop(0) if is_member else dist.GroupMember.NON_GROUP_MEMBER
        process_group = make(ranks, *options, group_desc=group_desc, **more)
        if is_member:
            connect(process_group)
        return process_group

    parallel_state.create_group = create_group
    try:
        yield
    finally:
        parallel_state.create_group = make


def _regroup(args: argparse.Namespace, release: Release, chunks: list[torch.nn.Module]) -> None:
    """Create Megatron's groups for the ranks that stay, and put them into the model."""
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
    replaced = {id(before): getattr(new, name, None) for name in names if (before := getattr(old, name, None))}
    for module in {id(module): module for chunk in chunks for module in chunk.modules()}.values():
        for name, value in list(vars(module).items()):
            if isinstance(value, ProcessGroupCollection):
                for field_name in names:
                    if hasattr(value, field_name) and hasattr(new, field_name):
                        setattr(value, field_name, getattr(new, field_name))
            elif isinstance(value, dist.ProcessGroup) and id(value) in replaced:
                setattr(module, name, replaced[id(value)])
        if hasattr(getattr(module, "config", None), "pipeline_model_parallel_size"):
            module.config.pipeline_model_parallel_size = stages


class TensorBoardOfTheLast(StepCallback):
    """Continues Megatron's TensorBoard log on the rank that is the last after a release: the last rank writes it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args

    def layers_moved(self) -> None:
        args = self._args
        if args.tensorboard_dir and args.rank == args.world_size - 1 and global_vars.get_tensorboard_writer() is None:
            global_vars._set_tensorboard_writer(args)


def _return_nodes(release: Release) -> None:
    """Return the nodes without ranks to SLURM, if this job runs under it."""
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
        print(
            f"> {len(release.nodes)} nodes were returned to SLURM, {release.nodes_left} stay with job {job}", flush=True
        )
