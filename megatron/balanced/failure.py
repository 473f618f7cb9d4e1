"""When a rank dies, the others stop and say which one it was.

A collective that fails tells that some connection broke, not whose. So every rank leaves a sign of life in the job's
key-value store every few seconds, from a thread of its own that goes on while the rank waits in a collective. A rank
whose training fails posts its error and waits until silence can be told from life; the first of the living names the
ranks that were silent. Launchers that end a job at the first failure, as torchrun does, may be quicker; then they name
the rank.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

import torch.distributed as dist

__all__ = ["named_failures"]

_BEAT_SECONDS = 2.0
_SILENT_SECONDS = 7.0


class _Vigil:
    """This rank's signs of life, and what the store knows of the others."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._store: dist.Store | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="sign-of-life", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not dist.is_initialized():
            if self._over.wait(0.2):
                return
        # A connection of its own: a rank that waits in the store must not stop its signs of life.
        self._store = dist.distributed_c10d._get_default_store().clone()
        count = 0
        while not self._over.is_set():
            try:
                self._store.set(f"alive/{self._rank}", str(count))
            except RuntimeError:  # the store is gone, and with it the job
                return
            count += 1
            self._over.wait(_BEAT_SECONDS)

    def end(self) -> None:
        self._over.set()
        self._thread.join(timeout=_SILENT_SECONDS)

    def leave(self) -> None:
        """This rank goes on purpose, and the others go on: its silence is not its death."""
        if self._store is not None:
            self._store.set(f"left/{self._rank}", "")

    def _seen(self, store: dist.Store, kind: str) -> dict[int, bytes]:
        keys = {rank: f"{kind}/{rank}" for rank in range(self._world_size)}
        return {rank: store.get(key) for rank, key in keys.items() if store.check([key])}

    def verdict(self, error: Exception) -> str | None:
        """Post this rank's error. The first living rank learns, after `_SILENT_SECONDS`, who is silent, in one line."""
        store = self._store
        if store is None:
            return None
        store.set(f"failed/{self._rank}", type(error).__name__)
        before = self._seen(store, "alive")
        time.sleep(_SILENT_SECONDS)
        after, failed, left = (self._seen(store, kind) for kind in ("alive", "failed", "left"))
        ranks = [rank for rank in range(self._world_size) if rank not in left]
        silent = [rank for rank in ranks if rank not in failed and before.get(rank) == after.get(rank)]
        first_living = next(rank for rank in ranks if rank not in silent)
        if not silent or self._rank != first_living:
            return None
        names = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {', '.join(map(str, silent))}"
        return f"{names} died or stopped answering; the other ranks stop now. Look at the log of {names}"


@contextlib.contextmanager
def named_failures(rank: int, world_size: int) -> Iterator[None]:
    """Run a job's training inside this. When it fails because other ranks fell silent, they are named on stderr.

    A rank that leaves with SystemExit is not missed.
    """
    vigil = _Vigil(rank, world_size)
    try:
        yield
    except SystemExit:
        with contextlib.suppress(RuntimeError):  # as below
            vigil.leave()
        raise
    except Exception as error:
        with contextlib.suppress(RuntimeError):  # the store died with the rank that held it: nothing more to learn
            if (verdict := vigil.verdict(error)) is not None:
                print(f"pretrain_gpt.py: error: {verdict}", file=sys.stderr, flush=True)
        raise
    finally:
        vigil.end()
