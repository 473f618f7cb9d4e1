"""The balancers of a run: `--balance` and the flag of each balancer, checked against the other flags."""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

from megatron.balanced.trainer.checks.experts import check_experts
from megatron.balanced.trainer.checks.layers import check_layers
from megatron.balanced.trainer.checks.sequences import check_sequences
from megatron.balanced.trainer.config import BalanceConfig
from megatron.balanced.trainer.trials import check_trials

__all__ = ["check_balancers", "switch_on"]

# Balancer -> its check, in this order, since sequences switch CUDA graphs off, and experts map them before layers do.
# Its config is the field of that name, its flag --balance-NAME.
_CHECKS: dict[str, Callable[[argparse.Namespace, Any], tuple[Any, list[str]]]] = {
    "sequences": check_sequences,
    "experts": check_experts,
    "layers": check_layers,
}


def switch_on(args: argparse.Namespace) -> frozenset[str]:
    """Set the flags of the balancers that `--balance` names.

    Returns the balancers that only `all` in `--balance` asks for. Raises ValueError for an unknown balancer.
    """
    asked = set() if args.balance is None else {name.strip() for name in args.balance.split(",")}
    if unknown := sorted(asked - {*_CHECKS, "all"}):
        raise ValueError(
            f"--balance {args.balance}: {unknown[0]!r} is not a balancer; use all, or some of {', '.join(_CHECKS)}"
        )
    if args.balance_layers and args.balance_layers_once:
        raise ValueError(
            "--balance-layers is incompatible with --balance-layers-once: one keeps moving layers, the other stops; "
            "drop one of them"
        )
    args.balance_layers = args.balance_layers or args.balance_layers_once
    given = {name for name in _CHECKS if getattr(args, f"balance_{name}")}
    named = set(_CHECKS) if "all" in asked else asked
    for name in named - given:
        setattr(args, f"balance_{name}", True)
    return frozenset(named - given - asked)


def check_balancers(
    args: argparse.Namespace, config: BalanceConfig, left_to_us: frozenset[str]
) -> tuple[BalanceConfig, list[str]]:
    """Return the config with the balancers in force, and notes for the user, one line each.

    A balancer with nothing to balance is switched off. One that is incompatible with other flags raises ValueError,
    unless it is in `left_to_us` and none of its settings is given: then it is switched off. Called before Megatron
    validates `args`, and may set some of them.
    """
    notes: list[str] = []
    off_again: list[str] = []  # why balancers that were asked for are off
    for name, check in _CHECKS.items():
        asked = getattr(config, name)
        try:
            checked, said = check(args, asked)
        except ValueError as error:
            off = dataclasses.replace(asked, enabled=False)
            if name not in left_to_us:
                raise
            if off != type(asked)():
                raise ValueError(
                    f"{error}; --balance all leaves {name} off only if none of its settings is given"
                ) from error
            setattr(args, f"balance_{name}", False)
            checked, said = check(args, off)  # refuses what is wrong without the balancer as well
            said = [f"--balance all leaves {name} off: {error}", *said]
        config = dataclasses.replace(config, **{name: checked})
        notes += said
        off_again += said[-1:] if asked.enabled and not checked.enabled else []
    check_trials(config, off_again)
    return config, notes
