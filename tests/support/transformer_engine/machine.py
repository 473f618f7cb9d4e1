"""What `transformer_engine_torch` tells of the machine: libraries of the time of Transformer Engine 2.20."""

from tests.support.transformer_engine.cpp_module import stands_in


@stands_in
def get_num_cublas_streams() -> int:
    return 4


@stands_in
def get_cublasLt_version() -> int:
    return 130401


@stands_in
def get_cudnn_version() -> int:
    return 92600


@stands_in
def get_stream_priority_range(*unused: object) -> tuple[int, int]:
    return 0, 0
