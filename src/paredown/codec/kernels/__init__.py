"""The codec as Triton kernels: the same bits as `reference.py`. Importing this needs Triton; `backend.py` decides whether to."""

from paredown.codec.kernels.launch import (
    covers,
    decode_rows,
    device_spec,
    encode_rows,
    largest_finite,
    round_trip_at_run_time,
    round_trip_rows,
)

__all__ = ["covers", "decode_rows", "device_spec", "encode_rows", "largest_finite", "round_trip_at_run_time", "round_trip_rows"]
