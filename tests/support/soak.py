"""Long runs with kills: every resume equals a run that nobody disturbed, and nothing leaks.

    scripts/test.sh --soak 300 --seed 0

The steps are divided among jobs of four ranks. Each job draws its balancers, dynamic scheme, layouts of layers over
time, lengths of documents and skew of tokens from the seed, and is trained twice: once without disturbance, where
memory, threads and open files of every rank are watched, and once where a rank is killed at a drawn moment, again and
again, and the job resumed from its last checkpoint. Every loss of the second run and its last parameters are those of
the first.

Everything is float64. Without replicas of experts the two are the same to the last bit; with them, a resumed run first
predicts loads from nothing, so that tokens are added up in another order.
"""

import argparse
import gc
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tests.support.corpus import END_OF_DOCUMENT, write_documents
from tests.support.moving import Plans, at_end_of_step, move_at
from tests.support.pool import Pool
from tests.support.program import parse
from tests.support.settings import EARLY_EXIT, scheme_flags, settings
from tests.support.training import EXACT, MODEL, MOE, RankRun, Run, join, watch

__all__ = ["Job", "Soak", "draw"]

RANKS = 4
TOLERANCE = 1e-12
SECONDS = 1800.0  # that a run may take
SAVED_EVERY = 7  # steps
KILLED_AFTER = 12, 25  # steps since the last kill, the fewest and the most
WARM_UP = 0.4  # of the steps of a job: buffers, pools of threads and caches grow until then
# More than after the warm-up: of a rank; and of the processes that start ranks, over all jobs after the first.
MORE_BYTES, MORE_THREADS, MORE_FILES = 24e6, 0, 2
MORE_BYTES_OUTSIDE = 64e6
# Temporary folders of multiprocessing are removed at a regular exit, which ranks of the pool do not have. The others
# are written once: a cache, and the settings of command lines.
STAYS = ("pymp-", "torchinductor_", "balance-config-")
MOMENTS = ("begin_step", "begin_schedule", "end_schedule", "end_step")

PACKED = "--dataloader-inter-document-masking"
# Not with the distributed optimizer, whose shards Megatron-LM writes in float32.
OVERLAPS = "--overlap-grad-reduce --ddp-bucket-size 2000"
EXPERTS = (
    f"{' '.join(MOE)} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2 "
    f"--balance-experts {settings('experts', min_gain=0)}"
)


def _none(start: int, end: int) -> str:
    return ""


def _freeze(start: int, end: int) -> str:
    return f"--untie-embeddings-and-output-weights --freeze-layers 1 --freeze-layers-start {start}"


def _prune(start: int, end: int) -> str:
    return scheme_flags(prune_sparsity=0.8, prune_start=start, prune_end=end, prune_interval=3)


def _mixture_of_depths(start: int, end: int) -> str:
    return scheme_flags(mixture_of_depths=0.5)


def _sparse_attention(start: int, end: int) -> str:
    return scheme_flags(sparse_attention="blocks", sparse_attention_block=8, sparse_attention_keep=2)


def _early_exit(start: int, end: int) -> str:
    return f"{EARLY_EXIT} {scheme_flags(early_exit_start=start)}"


# Layouts of four ranks with their balancers, and the schemes that each of them can have: flags of one that begins at an
# iteration and ends at another.
LAYOUTS: dict[str, tuple[str, tuple[Callable[[int, int], str], ...]]] = {
    "all balancers": (
        f"--pipeline-model-parallel-size 2 --context-parallel-size 2 {PACKED} --balance-sequences {EXPERTS}",
        (_none, _freeze),
    ),
    "layers and sequences": (
        f"--pipeline-model-parallel-size 2 --context-parallel-size 2 {PACKED} --balance-sequences",
        (_none, _freeze),
    ),
    "layers and experts": (f"--pipeline-model-parallel-size 2 {EXPERTS}", (_none, _freeze)),
    "layers": (
        "--pipeline-model-parallel-size 2",
        (_prune, _mixture_of_depths, _sparse_attention, _early_exit, _freeze),
    ),
}


@dataclass(frozen=True)
class Job:
    """One job. moves: layers of each stage from an iteration on; kills: iteration -> rank and moment."""

    name: str
    flags: str
    steps: int
    moves: Plans
    kills: dict[int, tuple[int, str]]
    mean_length: float
    words: int
    seed: int


def draw(seed: int, steps: int, layout: str | None = None) -> Job:
    """The job of a seed, in one of `LAYOUTS`."""
    chance = random.Random(seed)
    name = layout or chance.choice(list(LAYOUTS))
    flags, schemes = LAYOUTS[name]
    scheme = chance.choice(schemes)(chance.randint(2, steps // 3), 2 * steps // 3)
    moves, at = {}, 0
    while (at := at + chance.randint(4, 15)) < steps:
        first = chance.randint(1, 3)
        moves[at] = ((first,), (4 - first,))
    kills, at = {}, 0
    while (at := at + chance.randint(*KILLED_AFTER)) < steps:
        kills[at] = chance.randrange(RANKS), chance.choice(MOMENTS)
    overlaps = OVERLAPS if chance.random() < 0.7 else ""
    every = f"--balance-layers {flags} {scheme} {overlaps} --train-iters {steps}"
    return Job(name, every, steps, moves, kills, chance.choice((4, 16, 60)), chance.choice((6, 40, 126)), seed)


def _documents(job: Job, folder: Path) -> list[str]:
    """Exponential lengths; few different words make few experts hot."""
    chance = np.random.default_rng(job.seed)
    lengths = 2 + chance.exponential(job.mean_length, 400).astype(int)
    walks = [np.cumsum(chance.integers(1, 4, length)) % job.words for length in lengths]
    return write_documents(folder, [np.append(walk, END_OF_DOCUMENT).astype(np.int64) for walk in walks])


@dataclass(frozen=True)
class Done:
    """What a job went through, and by how much its resumed run differs at most, relative."""

    moves: int
    kills: int
    difference: float

    def __str__(self) -> str:
        return f"{self.moves} moves, {self.kills} kills, difference {self.difference:.1e}"


@dataclass(frozen=True)
class Held:
    """What a process holds: bytes of its own, threads, open files."""

    bytes: int
    threads: int
    files: int


def _held(process: psutil.Process) -> Held:
    memory = process.memory_full_info()
    return Held(memory.uss, process.num_threads(), process.num_fds())


def _rank(
    argv: list[str], moves: Plans, kill: tuple[int, int, str] | None, losses: str
) -> tuple[RankRun, list[Held], Any]:
    """One rank. kill: iteration, rank and moment at which it ends. losses: a file that gets each loss as it is known.

    Returns the run, what the process held after each step, and the layers of each chunk in the end.
    """
    from megatron.training import training

    args, config, train = parse(argv)

    from megatron.balanced.shared.callbacks import StepCallback

    held: list[Held] = []
    layers: list[Any] = []
    process = psutil.Process()

    class Watch(StepCallback):
        iteration = 0

        def begin_step(self, iteration: int, config: Any) -> None:
            self.iteration = iteration
            self._at("begin_step")

        def begin_schedule(self) -> None:
            self._at("begin_schedule")

        def end_schedule(self) -> None:
            self._at("end_schedule")

        def end_step(self) -> None:
            gc.collect()
            held.append(_held(process))
            self._at("end_step")

        def _at(self, moment: str) -> None:
            if kill == (self.iteration, args.rank, moment):
                os.kill(os.getpid(), signal.SIGKILL)

    move_at(moves)
    at_end_of_step(lambda balancer: layers.append(balancer.mover.plan.chunks))
    finish = watch(True)
    step = training.train_step

    def train_step(*positional: Any, **named: Any) -> Any:
        result = step(*positional, **named)
        if "lm loss" in result[0]:
            with open(f"{losses}-{args.rank}", "a") as file:
                file.write(f"{named['iteration']} {result[0]['lm loss'].item().hex()}\n")
        return result

    train_step.__wrapped__ = step  # type: ignore[attr-defined]
    training.train_step = train_step
    train(args, config, [Watch()])
    return finish(), held, layers


def _read(losses: Path) -> dict[int, set[float]]:
    """The losses of each iteration, of all ranks and of all times that it ran."""
    found: dict[int, set[float]] = {}
    for file in losses.parent.glob(f"{losses.name}-*"):
        for line in file.read_text().splitlines():
            iteration, loss = line.split()
            found.setdefault(int(iteration), set()).add(float.fromhex(loss))
    return found


def assert_no_growth(held: Sequence[Held], what: str, more_bytes: float = MORE_BYTES) -> None:
    """held: of one process over time. Its last fifth is compared with the end of the warm-up."""
    warm, last = held[: max(round(WARM_UP * len(held)), 1)], held[-max(len(held) // 5, 1) :]
    for name, more in (("bytes", more_bytes), ("threads", MORE_THREADS), ("files", MORE_FILES)):
        before, after = max(getattr(one, name) for one in warm), min(getattr(one, name) for one in last)
        assert after <= before + more, f"{what} held {before} {name} at most when warm, and {after} in the end"


class Soak:
    """Jobs on one pool, whose processes and temporary files are watched as well."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._temporary = folder / "tmp"
        self._temporary.mkdir()
        os.environ["TMPDIR"] = str(self._temporary)  # of all ranks
        tempfile.tempdir = None
        self._pool = Pool()
        self._jobs = 0
        self._outside: list[list[Held]] = []  # after each job: of this process and of the server

    def stop(self) -> None:
        self._pool.stop()

    def _train(self, job: Job, argv: list[str], kill: Any, losses: Path) -> list[Any]:
        done = self._pool.run(RANKS, _rank, argv, dict(job.moves), kill, str(losses), timeout=SECONDS)
        return done

    def run(self, job: Job) -> Done:
        """Raises AssertionError where a resume differs or something grows."""
        self._jobs += 1
        folder = self._folder / f"job{self._jobs}"
        folder.mkdir()
        argv = [*MODEL, *_documents(job, folder / "documents"), *EXACT, "--init-method-std", "0.1", *job.flags.split()]
        undisturbed = self._train(job, argv, None, folder / "undisturbed")
        whole = join([run for run, _, _ in undisturbed])
        _assert_moved(job, undisturbed)
        for rank, (_, held, _) in enumerate(undisturbed):
            assert len(held) == job.steps
            assert_no_growth(held, f"rank {rank}")
        save = f"--save {folder / 'saved'} --save-interval {SAVED_EVERY}".split()
        left, resumed, last = sorted(job.kills.items()), 0, None
        while last is None:
            load = ["--load", str(folder / "saved")] if resumed else []
            kill = (left[0][0], *left[0][1]) if left else None
            try:
                last = self._train(job, [*argv, *save, *load], kill, folder / "disturbed")
            except RuntimeError as error:
                if kill is None or f"rank {kill[1]} of {RANKS} died" not in str(error):
                    raise
                left.pop(0)
                resumed += 1
        assert resumed == len(job.kills)
        worst = self._compare(job, folder, whole, join([run for run, _, _ in last]))
        self._assert_nothing_left()
        return Done(len(job.moves), resumed, worst)

    def _compare(self, job: Job, folder: Path, whole: Run, last: Run) -> float:
        expected, found = _read(folder / "undisturbed"), _read(folder / "disturbed")
        assert expected.keys() == found.keys() == set(range(job.steps))
        off = {
            f"the loss of step {step}": max(abs(loss - own) / abs(own) for loss in found[step])
            for step, (own,) in expected.items()
        }
        for name, tensor in whole.parameters.items():
            off[name] = float(np.linalg.norm(last.parameters[name] - tensor) / np.linalg.norm(tensor))
        tolerance = TOLERANCE if "--balance-experts" in job.flags else 0
        beyond = [f"{name} by {amount:.1e}" for name, amount in off.items() if not amount <= tolerance]
        assert not beyond, f"a resumed run differs, in {len(beyond)} of {len(off)}: {', '.join(beyond[:8])}"
        return max(off.values())

    def _assert_nothing_left(self) -> None:
        """After a job: no process, no file, no network; what starts ranks has not grown since the first job."""
        server = psutil.Process(self._pool.server)
        assert not server.children(recursive=True), "a rank or what it started still runs"
        left = [path.name for path in self._temporary.iterdir() if not path.name.startswith(STAYS)]
        assert not left, f"left behind: {left}"
        assert _networks(server.pid) == {os.readlink("/proc/self/ns/net")}, "a network namespace is new"
        gc.collect()
        self._outside.append([_held(psutil.Process()), _held(server)])
        for what, held in zip(
            ("the process of the soak", "the server of ranks"), zip(*self._outside, strict=True), strict=True
        ):
            assert_no_growth([held[0], held[-1]], what, MORE_BYTES_OUTSIDE)


def _networks(server: int) -> set[str]:
    """The network namespaces of the server and all below it, and the named ones that these processes made. Emulated
    clusters put the process into the name; others on this machine may come and go."""
    below = [psutil.Process(server), *psutil.Process(server).children(recursive=True)]
    names = Path("/run/netns")
    own = [f"-{process.pid}-" for process in (psutil.Process(), *below)]
    made = {path.name for path in (names.iterdir() if names.exists() else ()) if any(pid in path.name for pid in own)}
    return {os.readlink(f"/proc/{process.pid}/ns/net") for process in below} | made


def _assert_moved(job: Job, ranks: list[Any]) -> None:
    seen = {tuple(tuple(map(len, stage)) for stage in chunks) for chunks in ranks[0][2]}
    assert set(job.moves.values()) <= seen, "a move did not happen"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="of all jobs together")
    parser.add_argument("--steps-of-a-job", type=int, default=50)
    parser.add_argument("--seed", type=int, default=None, help="of the first job; the time by default")
    args = parser.parse_args()
    first = int(time.time()) if args.seed is None else args.seed
    jobs, names, begin = max(args.steps // args.steps_of_a_job, 1), list(LAYOUTS), time.monotonic()
    print(f"{jobs} jobs of {args.steps_of_a_job} steps, --seed {first}", flush=True)
    failed, all_done = 0, []
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder))
        try:
            for number in range(jobs):
                # Each layout in turn, so that a short soak has all balancers.
                job = draw(first + number, args.steps_of_a_job, names[(first + number) % len(names)])
                try:
                    all_done.append(done := soak.run(job))
                    said = str(done)
                except Exception as error:
                    failed += 1
                    said = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ()), job.flags])
                    said += f"\n  again: --soak {job.steps} --seed {job.seed}"
                seconds = time.monotonic() - begin
                steps = f"step {(number + 1) * job.steps:4d} of {jobs * job.steps}"
                print(f"{seconds:7.0f} s  {steps}  {job.name}: {said}", flush=True)
        finally:
            soak.stop()
    if all_done:
        moves, kills = sum(done.moves for done in all_done), sum(done.kills for done in all_done)
        print(f"together: {Done(moves, kills, max(done.difference for done in all_done))}")
    print(f"{failed} of {jobs} jobs failed")
    return 1 if failed else 0


if __name__ == "__main__":
    from tests.support.soak import main as run  # by its name, by which ranks find what they are to call

    sys.exit(run())
