"""The codec as Triton kernels, with the bits of `reference.py`; `backend.py` imports it if Triton is there."""

from paredown.codec.kernels.flat import (  # noqa: F401
    BufferCodec,
    FlatEncoder,
    covers_recompute,
    recompute,
)
from paredown.codec.kernels.launch import empty_strided  # noqa: F401
from paredown.codec.kernels.masks import apply_mask, pack_mask, unpack_mask  # noqa: F401
from paredown.codec.kernels.products import column_quantizer, quantize_columns, quantize_rows, transposed, transposer  # noqa: F401
from paredown.codec.kernels.rows import (  # noqa: F401
    covers,
    decode_rows,
    decoder,
    device_spec,
    encode_rows,
    largest_finite,
    round_many,
    round_trip_at_run_time,
    round_trip_by_row,
    round_trip_rows,
)
