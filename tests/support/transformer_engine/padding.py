"""Rows of each expert, padded with 0 to a number that quantized products take, and back."""

from collections.abc import Sequence

import torch

from tests.support.transformer_engine.cpp_module import stands_in


@stands_in
def fused_multi_row_padding(
    input: torch.Tensor, output: torch.Tensor, input_row_list: Sequence[int], padded_input_row_list: Sequence[int]
) -> None:
    """Rows [tokens, hidden] -> [padded tokens, hidden], in `output`."""
    output.zero_()
    parts = zip(input.split(input_row_list), output.split(padded_input_row_list), strict=True)
    for rows, padded in parts:
        padded[: len(rows)].copy_(rows)


@stands_in
def fused_multi_row_unpadding(
    input: torch.Tensor, output: torch.Tensor, input_row_list: Sequence[int], unpadded_input_row_list: Sequence[int]
) -> None:
    """Rows [padded tokens, hidden] -> [tokens, hidden], in `output`."""
    parts = zip(input.split(input_row_list), output.split(unpadded_input_row_list), strict=True)
    for padded, rows in parts:
        rows.copy_(padded[: len(rows)])
