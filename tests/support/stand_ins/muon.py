"""NVIDIA's emerging optimizers, in processes of their own: Megatron-LM looks for them once, when it is imported."""

from tests.support.packages_apart import add_to_path

__all__ = ["install"]


def install() -> None:
    """Have Megatron-LM find the package. To be called before megatron.core is imported."""
    add_to_path("emerging_optimizers")
