"""Shapes and memory: tensors decode to the shape, dtype and memory order that they had, whatever that was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paredown.codec.packed import encode, memory_order, round_trip
from paredown.formats.format import Format
from tests.support.compare import assert_same_bits
from tests.support.values import normal

TEXTS = ("e4m3fn", "int4/8@bf16", "uint3/5@bf16+fp32", "e2m1fn/16@e4m3fn")
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "0-d": lambda: normal(),
    "1-d": lambda: normal(13),
    "2-d": lambda: normal(5, 7),
    "4-d": lambda: normal(2, 3, 4, 5),
    "channels last": lambda: normal(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels last 3d": lambda: normal(2, 3, 2, 4, 5).to(memory_format=torch.channels_last_3d),
    "transposed": lambda: normal(5, 7).T,
    "transposed square": lambda: normal(6, 6).T,
    "permuted": lambda: normal(3, 4, 5).permute(2, 0, 1),
    "inner dimensions swapped": lambda: normal(3, 4, 5).transpose(1, 2),
    "every other column": lambda: normal(5, 14)[:, ::2],
    "every other of a vector": lambda: normal(30)[::3],
    "a part": lambda: normal(8, 9)[2:5, 3:7],
    "expanded": lambda: normal(1, 7).expand(5, 7),
    "expanded inside": lambda: normal(5, 1, 3).expand(5, 4, 3),
    "overlapping": lambda: normal(20).unfold(0, 5, 2),
    "diagonal": lambda: normal(6, 6).diagonal(),
    "ones": lambda: normal(1, 3, 1, 1).to(memory_format=torch.channels_last),
    "empty": lambda: normal(0),
    "no rows": lambda: normal(0, 5),
    "no columns": lambda: normal(5, 0),
    "empty inside": lambda: normal(2, 0, 3),
}
KEEPS_ITS_STRIDES = (
    *("0-d", "1-d", "2-d", "4-d", "channels last", "channels last 3d", "transposed square", "inner dimensions swapped"),
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("text", TEXTS)
def test_shape_and_values_do_not_depend_on_where_things_lie(text: str, layout: str) -> None:
    """In logical order, a strided tensor is packed like its contiguous copy."""
    x = LAYOUTS[layout]()
    packed, plain = encode(x, text, order="logical"), encode(x.contiguous(), text)
    assert torch.equal(packed.codes, plain.codes)
    assert_same_bits(packed.decode(), plain.decode())
    assert_same_bits(round_trip(x, text, order="logical"), plain.decode())
    assert packed.decode().is_contiguous()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("text", TEXTS)
def test_decode_of_encode_is_round_trip_in_memory_order(text: str, layout: str) -> None:
    x = LAYOUTS[layout]()
    packed, rounded = encode(x, text, rounding="stochastic"), round_trip(x, text, rounding="stochastic")
    assert packed.nbytes == Format.parse(text).nbytes(x.shape)
    assert (packed.decode().shape, packed.decode().stride()) == (x.shape, rounded.stride())
    assert_same_bits(packed.decode(), rounded)


@pytest.mark.parametrize("layout", KEEPS_ITS_STRIDES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dense_tensors_keep_their_strides(layout: str, dtype: torch.dtype) -> None:
    x = LAYOUTS[layout]().to(dtype)
    for text in TEXTS:
        for y in (round_trip(x, text), encode(x, text).decode()):
            assert (y.dtype, y.stride()) == (dtype, x.stride())


@pytest.mark.parametrize("text", TEXTS)
def test_channels_last_is_packed_as_it_lies(text: str) -> None:
    """Blocks run along the channels of a pixel: the bytes are those of the tensor with its dimensions in memory order."""
    x = LAYOUTS["channels last"]()
    packed = encode(x, text)
    assert packed.order == (0, 2, 3, 1)
    lying = encode(x.permute(0, 2, 3, 1).contiguous(), text)
    assert torch.equal(packed.codes, lying.codes)
    assert torch.equal(packed.decode(), lying.decode().permute(0, 3, 1, 2))
    assert packed.decode().is_contiguous(memory_format=torch.channels_last)


def test_memory_order_is_kept_only_where_bytes_stay_the_same() -> None:
    """Rows of a transposed matrix are its columns: 7 rows of 5 values take other bytes than 5 rows of 7."""
    x = LAYOUTS["transposed"]()
    blocked, plain = Format.parse("int4/4@bf16"), Format.parse("e4m3fn")
    assert blocked.nbytes((5, 7)) != blocked.nbytes((7, 5))
    assert memory_order(x, blocked) == (0, 1)
    assert memory_order(x, plain) == (1, 0)
    assert memory_order(x, plain, "logical") == (0, 1)


def test_strided_memory_is_not_read_past_its_values() -> None:
    """What lies between the values of a strided tensor is left out: NaN there does no harm."""
    base = torch.full((4, 20), float("nan"))
    base[:, ::2] = normal(4, 10)
    assert round_trip(base[:, ::2], "int4/8@bf16").isfinite().all()
    assert torch.equal(round_trip(base[:, ::2], "int4/8@bf16"), round_trip(base[:, ::2].contiguous(), "int4/8@bf16"))


def test_rows_never_share_a_block_or_a_byte() -> None:
    x = normal(6, 5)
    for text in ("int3/4@bf16", "e3m2fn", "uint1/64@bf16+fp32"):
        whole = encode(x, text, overflow="saturate")
        for row in range(6):
            assert torch.equal(encode(x[row : row + 1], text, overflow="saturate").codes, whole.codes[row : row + 1])
