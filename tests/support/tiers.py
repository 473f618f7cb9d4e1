"""Which tests `scripts/test.sh` alone leaves out, and `scripts/test.sh --all` runs.

The default tier takes at most ten minutes on two quiet cores. It has what tells most: the properties of all planners,
each balancer alone and all of them together against one rank, with several buckets and groups that plan apart, a
checkpoint with a move, what is said of bad input, the documents, the arrows of imports, and what other loops do. Other
models, other parts of Megatron-LM, killed processes, Slurm and the emulated cluster are below. A new file is in the
default tier until it is listed here.
"""

__all__ = ["is_thorough"]

_FOLDERS = {  # whole folders -> files that stay
    "dynamics": ("test_bad_input",),
    "gpu": (),
    "hybrid": (),
    "transformer_engine": (),
}
_FILES = {
    "experts": "batch_overlap emulated faults fusion mtp recipes replay",
    "kernels": "flash_attn rows",
    "layers": "batch_overlap empty_stages fill_training memory optimizers release",
    "loops": "bridge example families hooks layers older_megatron page sequences verl vision",
    "megatron": "checkpoint_errors counters dropout failure functional gpu_order gpu_packages host_waits "
    "model_extension repeatability stall versions wiring wiring_groups",
    "report": "empty_steps observer ranges",
    "sequences": "data_parallel dealt_steps domain emulated latents packed_documents padding prediction",
    "together": "coordination expert_layouts fuzz kills restarts slow_rank structures subsets",
    "tools": "bridge_recipes cluster emulated full_disk headlines pool prepare_data process published recipe run_lock "
    "scripts slurm slurm_affinity slurm_cluster slurm_examples threads together",
    "whatif": "emulated",
}


def is_thorough(folder: str, name: str) -> bool:
    """Whether the tests of the file tests/`folder`/`name`.py are in the second tier only."""
    if folder in _FOLDERS:
        return name not in _FOLDERS[folder]
    return name.removeprefix("test_") in _FILES.get(folder, "").split()
