"""How many values the CPU codec encodes and an optimizer updates at a time, and the memory that encoding takes beside input and result.

`codec/cpu.py` works piece by piece; plans count its scratch memory, which small steps consist of in good part. A piece is an eighth of the
tensor, so that scratch is no larger than a float32 copy of it, and at most 2^17 values, so that a piece fits the cache. Optimizers update
parameters in such pieces too (`optim/reference.py`); an update takes about 90 bytes for each value of one, which plans do not count.

    scratch  =  values of a piece  x  bytes per value     (measured by torch's profiler, and compared with it by a test)

>>> piece_values(8, 1 << 18), piece_values(4, 1 << 24), piece_values(4, 5000)
(32768, 65536, 5000)
>>> encode_scratch(Format.parse("int4/64@bf16"), 1 << 18) / 2**20
0.8125
"""

from __future__ import annotations

from paredown.formats.element import ElementKind
from paredown.formats.format import Format

MOST_VALUES, FEWEST_VALUES = 1 << 17, 1 << 14
PIECES = 8  # of a tensor
FEWEST_UPDATED = 1 << 15  # values of a parameter that an optimizer updates at a time; with 2^14 an update takes 1.8 times as long
BYTE = 8  # bits
CAST_BYTES = 4  # for each value of a tensor in 16 bits
TABLE_BYTES = 74.0  # for each value of a piece that is encoded by a search in a table
FLOAT_BYTES = 3.0  # more for floats than for integers
ENCODE_8, ENCODE_BELOW, ENCODE_ABOVE = 18.2, 26.0, 51.0  # bytes for each value of a piece, by the bits of its element
DECODE_8, DECODE_BELOW, DECODE_ABOVE = 12.0, 24.0, 40.0


def piece_values(width: int, numel: int) -> int:
    """Values that are encoded at a time, of `numel` in elements of `width` bits; fewer at most where codes are packed into bytes."""
    most = MOST_VALUES if width % BYTE == 0 else MOST_VALUES // 2 if width < BYTE else FEWEST_VALUES
    return min(numel, most, max(numel // PIECES, FEWEST_VALUES))


def encode_scratch(format: Format, numel: int, *, is_cast: bool = False) -> int:
    """Bytes of scratch memory while `numel` values are encoded; `is_cast`: the tensor is not in float32."""
    width, kind = format.element.width, format.element.kind
    rate = ENCODE_8 if width == BYTE else ENCODE_BELOW if width < BYTE else ENCODE_ABOVE
    rate = TABLE_BYTES if kind is ElementKind.TABLE else rate + FLOAT_BYTES * (kind is ElementKind.FLOAT and width <= BYTE)
    return int((rate + CAST_BYTES * is_cast) * piece_values(width, numel))


def decode_scratch(format: Format, numel: int) -> int:
    """Bytes of scratch memory while `numel` values are decoded."""
    width = format.element.width
    rate = DECODE_8 if width == BYTE else DECODE_BELOW if width < BYTE else DECODE_ABOVE
    return int(rate * piece_values(width, numel))


def update_rows(rows: int, cols: int) -> int:
    """Rows of a parameter (rows, cols) that an optimizer on a CPU updates at a time: an eighth, of at least FEWEST_UPDATED values.

    >>> update_rows(512, 512), update_rows(10, 64), update_rows(4096, 1 << 18)
    (64, 10, 1)
    """
    size = min(max(rows * cols // PIECES, FEWEST_UPDATED), MOST_VALUES)
    return max(1, min(rows, size // max(cols, 1)))
