"""Trials of balancers in Megatron-LM's trainer."""

import argparse
from collections.abc import Sequence
from functools import partial

from balancing.trials import TrialSchedule
from megatron.balanced.run import Run
from megatron.balanced.shared.captured_schedule import captures_iterations
from megatron.balanced.trainer.checks.sequences import steps_ahead
from megatron.balanced.trainer.config import BalanceConfig
from megatron.balanced.trials.step_trials import StepTrials

__all__ = ["check_trials", "trials"]

_RECORD = "balance_trials_record"  # of Megatron-LM's arguments, which checkpoints hold


def check_trials(config: BalanceConfig, why_off: Sequence[str]) -> None:
    """Raise ValueError if `--balance-trial` has nothing to try, or too few steps. why_off: why balancers that were
    asked for are off."""
    if not config.trials.steps:
        return
    tried = [name for name in ("experts", "sequences") if getattr(config, name).enabled]
    if not tried:
        add = "add --balance-experts or --balance-sequences, or drop it"
        why = f", since {'; '.join(why_off)}; drop it" if why_off else f"; {add}"
        raise ValueError(f"--balance-trial {config.trials.steps} has nothing to try{why}")
    TrialSchedule(tried, config.trials)


def trials(
    run: Run, args: argparse.Namespace, config: BalanceConfig, resumed: argparse.Namespace | None
) -> list[StepTrials]:
    """The trials of a run whose settings ask for them, in a list. resumed: arguments in the checkpoint; None without
    one."""
    if not config.balances or not (config.trials.pairs or config.trials.steps):
        return []
    record = getattr(resumed, _RECORD, None)
    setattr(args, _RECORD, record := dict(record) if isinstance(record, dict) else {})
    callback = StepTrials(
        run,
        config.trials,
        steps=args.train_iters,
        delays={"sequences": steps_ahead(args)} if config.sequences.enabled else None,
        moves=config.layers.enabled,
        settle=args.cuda_graph_warmup_steps if captures_iterations(args) else 0,
        report=run.report,
        stop_after=partial(_exit_after, args),
        record=record,
    )
    return [callback]


def _exit_after(args: argparse.Namespace, iteration: int) -> None:
    """Let Megatron-LM exit after `iteration` (from 0), or before, where --exit-interval says so."""
    end = iteration + 1
    every = args.exit_interval or end
    args.exit_interval = min(end, every * (args.iteration // every + 1))
