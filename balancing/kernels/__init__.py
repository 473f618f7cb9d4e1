"""Kernels of attention for pieces of documents, and the choice of the fastest one.

    base      `Kernel`, the protocol, and `Pieces`, the mask of a call. `CPU` and `PRODUCTS` run anywhere.
    flash     FlashAttention 2, 3 and 4, by PyTorch and by flash-attn
    cudnn     cuDNN's attention, by Transformer Engine
    choice    the fastest kernel that is installed and right; which kernel computes what that one refuses
    trial     comparison of a kernel with `PRODUCTS` in float64, and its speed
    timed     a kernel that records how long its calls take
    merging   partial results merged, and gradients added; `rows` has both as Triton kernels
    pairs     query-key pairs and FLOPs, for cost models and planners

To add a kernel: write a class with the methods of `Kernel` (and `refusal`, for what it does not take) in a file of its
own. Give it a name in `KERNELS` and a loader in `_loads` of `choice`, and the name to `SequenceConfig.kernel`.

To add a variant of attention, such as a soft cap of scores:

1. `base`: a field of `Pieces`, None by default, and its formula in `_Products`, forward and backward.
2. `flash`, `cudnn`: pass it on as an argument, or refuse such pieces in `refusal`. `_Cpu` leaves them to `PRODUCTS`.
3. `trial`: a kind of pieces in `samples` and `kind_of`, tried if `AttentionHeads` says that the model has it.
4. `balancing.sequences.engine.program` makes the pieces of a call, and `megatron.balanced.sequences.shape` reads the
   model.

`choice` compares every kernel with `PRODUCTS` on every kind of `samples`. One that computes something else is left out,
and one that raises an error leaves that kind to the next kernel. `tests/kernels` compares `PRODUCTS` with autograd.
"""
