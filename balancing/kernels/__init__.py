"""Kernels of attention for pieces of documents and products of experts, and the choice of the fastest one.

    base      `Kernel`, the protocol, and `Pieces`, the mask of a call. `CPU` and `PRODUCTS` run anywhere.
    flash     FlashAttention 2, 3 and 4, by PyTorch and by flash-attn
    cudnn     cuDNN's attention, by Transformer Engine
    choice    the fastest kernel that is installed and right; which kernel computes what that one refuses
    trial     comparison of a kernel with `PRODUCTS` in float64, and its speed
    timed     a kernel that records how long its calls take
    expert_products, expert_choice   products of experts, and the choice of the faster ones
    merging   partial results merged, and gradients added; `rows` has both as Triton kernels
    pairs     query-key pairs and FLOPs, for cost models and planners

To add a kernel: a file with a class that has the methods of `Kernel`; its name in `KERNELS` and its loader in `_loads`
of `choice`; the name in the choices of `SequenceConfig.kernel`. To add a variant of attention, such as a soft cap:

1. `base`: a field of `Pieces`, None by default, and its formula in `_Products`, forward and backward.
2. `flash`, `cudnn`: an argument, or a reason in `refusal`. `_Cpu` leaves such pieces to `PRODUCTS`.
3. `trial`: a kind of pieces in `samples` and `kind_of`, tried if `AttentionHeads` says that the model has it.
4. `sequences.engine.program`, which makes the pieces, sets the field; `megatron.balanced.sequences.shape` reads it.

`choice` compares each kernel with `PRODUCTS` on every kind, leaves out what computes something else, and gives kinds
that a kernel refuses to the next one. `tests/kernels` compares `PRODUCTS` with autograd.
"""
