"""verl imports this module in each of its processes, by the entry point `verl.plugins`. It registers the balanced
engines if VERL_ENGINE_VENDOR is "balanced"."""

import os

if os.environ.get("VERL_ENGINE_VENDOR") == "balanced":
    try:
        from megatron.balanced.loops.choice import Choice
        from megatron.balanced.loops.verl import register

        register(Choice.of_environment())
    except (ImportError, ValueError) as error:  # verl goes on without a plugin that fails, and would train unbalanced
        raise SystemExit(f"megatron-balance: {error}") from error
