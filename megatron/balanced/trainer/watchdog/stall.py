"""Report of a stalled job: the ranks, grouped by the code that they are in, in one line.

A stalled job prints nothing until the timeout of a process group ends it, ten minutes later. Therefore a thread of
every rank looks at Megatron-LM's iteration every second. If the iteration has not changed for too long, the thread asks
all ranks through the job's store for two facts: the line that the main thread is at, and the collective that it waits
in. The collective comes from torch's flight recorder, which records point-to-point messages with NCCL only. The rank
that differs from the others is usually the cause. The job is not interrupted, since it may only be slow.

A rank that does not answer has died or is stopped. The report of a failure (`failure`) asks the same way.
"""

import os
import pickle
import statistics
import sys
import sysconfig
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Collection
from pathlib import Path

import torch
import torch.distributed as dist

from balancing.threads import start_thread
from megatron.balanced.trainer.checks.checkpoints import megatrons_arguments
from megatron.balanced.trainer.rendezvous import has_store, open_store, rank, wait_for, world_size

__all__ = ["Watch", "ask_all", "name_ranks"]

_LOOK_SECONDS = 1.0
_ANSWER_SECONDS = 7.0  # for the other ranks to answer
_MULTIPLE = 10.0  # of the median of recent steps
_LEAST_SECONDS = 60.0  # that a step must take to count as stalled
_RECENT = 20  # steps
_STDLIB = sysconfig.get_path("stdlib")
_BETWEEN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2] / "cpu"))


def ask_all() -> dict[int, str]:
    """Rank -> where its main thread is, for the ranks that answer in a few seconds."""
    store = open_store("stall", anew=True)
    number = store.add("asked", 1)
    keys = {peer: f"{number}/{peer}" for peer in range(world_size())}
    wait_for(store, list(keys.values()), _ANSWER_SECONDS)
    return {peer: store.get(key).decode() for peer, key in keys.items() if store.check([key])}


def name_ranks(numbers: Collection[int]) -> str:
    """'rank 3', 'ranks 0-3, 7'."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    spans = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(spans)}"


class Watch:
    """The thread of one rank, which ends with the process or by `end`."""

    def __init__(self) -> None:
        self._main = threading.main_thread().ident or 0
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._moment: tuple[int, bool] | None = None
        self._since = time.monotonic()
        self._told = False
        self._answered = 0
        self._over = threading.Event()
        start_thread(self._run, name="stalls", end=self.end)

    def end(self) -> None:
        self._over.set()

    def _run(self) -> None:
        while not has_store():
            if self._over.wait(_LOOK_SECONDS):
                return
        try:
            store = open_store("stall", anew=True)
            while not self._over.wait(_LOOK_SECONDS):
                self._look(store)
        except RuntimeError:  # the store has ended with the job
            return

    def _look(self, store: dist.Store) -> None:
        while self._answered < store.add("asked", 0):  # by several ranks perhaps, since the last look
            store.set(f"{self._answered + 1}/{rank()}", self._answer())
            self._answered += 1
        args = megatrons_arguments()
        if args is None:
            return
        now, moment = time.monotonic(), (getattr(args, "curr_iteration", -1), self._is_in_step())
        if moment != self._moment:
            if self._moment is not None and self._moment[1]:
                self._recent.append(now - self._since)
            self._moment, self._since, self._told = moment, now, False
        elif not self._told and now - self._since > self._limit(60.0 * args.distributed_timeout_minutes):
            self._told = True
            if store.add(f"told/{moment}", 1) == 1:  # else another rank was first
                start_thread(self._report, now - self._since, name="report-of-stall")

    def _is_in_step(self) -> bool:
        """Whether the main thread is in Megatron's training step, as opposed to, for instance, a checkpoint."""
        frame = sys._current_frames().get(self._main)
        while frame is not None and frame.f_code.co_name != "train_step":
            frame = frame.f_back
        return frame is not None

    def _limit(self, timeout: float) -> float:
        """Seconds until a step counts as stalled: at most half the timeout of process groups, which ends the job."""
        if not self._recent or self._moment is None or not self._moment[1]:
            return timeout / 2
        return min(timeout / 2, max(_LEAST_SECONDS, _MULTIPLE * statistics.median(self._recent)))

    def _report(self, waited: float) -> None:
        answers = ask_all()
        ranks = defaultdict(list)
        for peer in range(world_size()):
            ranks[answers.get(peer, "no answer: it died or is stopped")].append(peer)
        iteration, in_step = self._moment or (-1, False)
        where = f"iteration {iteration + 1}" if in_step else f"the work around iteration {iteration + 1}"
        does = "; ".join(f"{name_ranks(known)}: {text}" for text, known in ranks.items())
        print(f"> {where} has made no progress for {waited:.0f} s: {does}", file=sys.stderr, flush=True)

    def _answer(self) -> str:
        """The main thread's innermost line of Python outside of libraries, and the collective that it waits in."""
        frames = traceback.extract_stack(sys._current_frames().get(self._main))
        own = [frame for frame in frames if not _is_library(frame.filename)] or frames
        place = os.sep.join(own[-1].filename.split(os.sep)[-3:])
        return f"{place}:{own[-1].lineno} in {own[-1].name}{_pending()}"


def _is_library(file: str) -> bool:
    return file.startswith(_BETWEEN) or (file.startswith(_STDLIB) and "site-packages" not in file)


def _pending() -> str:
    """The oldest collective that has not ended, as torch's flight recorder knows it."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)
    entries = pickle.loads(dump(True, False, True))["entries"] if dump is not None else []
    for entry in entries:
        if not entry["retired"]:
            number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
            return f", waits in {entry['profiling_name']} #{number} of {entry['process_group'][1]}"
    return ""
