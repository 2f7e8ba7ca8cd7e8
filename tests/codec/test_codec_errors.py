"""Inputs that encode and round_trip reject: each error names the problem, the numbers, and the remedy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paredown.codec.packed import PackedTensor, encode, round_trip
from paredown.errors import CodecError, FormatError, ParedownError
from paredown.formats.element import Element
from paredown.formats.format import Format
from paredown.formats.rounding import Seed
from tests.support.values import normal

BOTH = pytest.mark.parametrize("verb", [encode, round_trip])
X = normal(3, 40)


@BOTH
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int32, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
def test_other_dtypes_are_refused(verb: Callable[..., Any], dtype: torch.dtype) -> None:
    with pytest.raises(CodecError, match=rf"{verb.__name__} takes float32, bfloat16 or float16, not {dtype}.*x\.float\(\)"):
        verb(torch.zeros(3).to(dtype), "int8/64@bf16")


@BOTH
@pytest.mark.parametrize(("thing", "name"), [([1.0], "list"), (1.0, "float"), (None, "NoneType")])
def test_what_is_no_tensor_is_refused(verb: Callable[..., Any], thing: object, name: str) -> None:
    with pytest.raises(CodecError, match=f"takes a tensor, not {name}"):
        verb(thing, "int8/64@bf16")


# keyword arguments -> part of the message
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("int8", {"rounding": "up"}, "'up'.*nearest_even, toward_zero, nearest_away, stochastic"),
    ("int8", {"rounding": None}, "nearest_even, toward_zero, nearest_away, stochastic"),
    ("int8", {"overflow": "wrap"}, "'wrap'.*saturate, nonfinite"),
    ("int8/64@bf16", {"scales": "ocp"}, "'ocp'.*int8/64@bf16.*'cover'.*e8m0"),
    ("int8", {"scales": "ocp"}, "'ocp'.*'cover'"),
    ("int8/64@bf16", {"scales": "tight"}, "'tight'.*'cover', 'ocp'"),
    ("int8/64@bf16", {"order": "rows"}, "'memory' or 'logical', not 'rows'"),
    ("e4m3fn", {"scales": torch.ones(3, 1)}, "e4m3fn has no block"),
    ("uint4/64@e8m0+fp32", {"scales": "ocp"}, "'ocp'"),  # its rule is for blocks without a minimum
    ("int8/64@bf16", {"scales": 1.5}, "scales"),
    ("int8/64@bf16", {"scales": None}, "scales"),
]


@BOTH
@pytest.mark.parametrize(("text", "options", "message"), REFUSED)
def test_options_are_checked(verb: Callable[..., Any], text: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(CodecError, match=message):
        verb(X, text, **options)


@BOTH
def test_formats_are_checked(verb: Callable[..., Any]) -> None:
    with pytest.raises(FormatError, match="int4/64@fp16"):
        verb(X, "int4/64@fp16")
    with pytest.raises(FormatError, match="not int"):
        verb(X, 8)


# scales that do not fit int8/16@bf16 of shape (3, 40), which needs (3, 3) bfloat16
WRONG_SCALES = [
    torch.ones(3, 2).bfloat16(),
    torch.ones(3, 4).bfloat16(),
    torch.ones(9).bfloat16(),
    torch.ones(3, 3),
    torch.ones(3, 3, dtype=torch.uint8),
    torch.ones(3, 3, device="meta").bfloat16(),
]


@BOTH
@pytest.mark.parametrize("scales", WRONG_SCALES)
def test_scales_of_a_wrong_shape_or_kind_are_refused(verb: Callable[..., Any], scales: torch.Tensor) -> None:
    with pytest.raises(CodecError, match=r"int8/16@bf16 of shape \(3, 40\) needs \(3, 3\) torch.bfloat16 on cpu"):
        verb(X, "int8/16@bf16", scales=scales)


@BOTH
@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((3, 41), "int8/16@bf16"),
        ((3, 40), "int8/8@bf16"),
        ((3, 40), "int4/16@bf16"),
        ((3, 4, 10), "int8/16@bf16"),
        ((120,), "int8/16@bf16"),
    ],
)
def test_scales_of_another_packed_tensor_are_refused(verb: Callable[..., Any], shape: tuple[int, ...], text: str) -> None:
    other = encode(normal(*shape), text)
    with pytest.raises(CodecError, match=r"does not fit int8/16@bf16 of shape \(3, 40\)"):
        verb(X, "int8/16@bf16", scales=other)


@BOTH
@pytest.mark.parametrize("text", ["uint4/16@bf16+fp32", "e2m1fn/16@e4m3fn"])
def test_formats_with_more_than_scales_need_the_whole(verb: Callable[..., Any], text: str) -> None:
    with pytest.raises(CodecError, match=r"more than block scales.*scales=p "):
        verb(X, text, scales=encode(X, text).scales)


# elements without a code for inf or NaN reject values that they cannot represent
UNSAYABLE = [
    ("int8", [1.0, 128.0], {}, "1 to 128.*-127 to 127.*saturate"),
    ("int8", [float("nan")], {}, "NaN.*int8/64@bf16"),
    ("int8", [float("nan"), 3.0], {"overflow": "saturate"}, "NaN"),
    ("int8", [float("inf")], {}, "inf.*saturate"),
    ("int8", [127.25], {"rounding": "stochastic"}, "127.25"),
    ("uint4", [-1.0], {}, "-1.*0 to 15"),
    ("e2m1fn", [7.0], {}, "-6 to 6"),
    ("e5m2f", [float("inf")], {}, "114688"),
    ("nf4", [1.5], {}, "-1 to 1"),
    ("int1", [1.0], {}, "int2/64@bf16"),
]


@pytest.mark.parametrize(("text", "values", "options", "message"), UNSAYABLE)
def test_encode_refuses_what_no_code_says(text: str, values: list[float], options: dict[str, str], message: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        if dtype is torch.bfloat16 and "127.25" in message:
            continue  # 127.25 is no bf16
        with pytest.raises(CodecError, match=message):
            encode(torch.tensor(values, dtype=dtype), text, **options)


SAYABLE = [
    ("int8", [127.25], {}),
    ("int8", [1e9], {"overflow": "saturate"}),
    ("e2m1fn", [6.9], {}),
    ("uint4", [-0.25], {}),
    ("e4m3fn", [1e9], {}),
]


@pytest.mark.parametrize(("text", "values", "options"), SAYABLE)
def test_encode_takes_what_rounds_to_a_code(text: str, values: list[float], options: dict[str, str]) -> None:
    x = torch.tensor(values)
    assert encode(x, text, **options).decode().isnan().equal(round_trip(x, text, **options).isnan())


def test_encode_says_what_to_do_with_gradients() -> None:
    x = torch.ones(4, requires_grad=True)
    with pytest.raises(CodecError, match=r"x\.detach\(\).*no_grad.*round_trip"):
        encode(x, "int8/64@bf16")
    with torch.no_grad():
        assert encode(x, "int8/64@bf16").decode().tolist() == encode(x.detach(), "int8/64@bf16").decode().tolist()


def test_errors_are_of_one_tree() -> None:
    assert issubclass(CodecError, ParedownError) and issubclass(CodecError, ValueError)


WRONG_CALLS: dict[str, Callable[[], Any]] = {
    "a seed that is no whole number": lambda: encode(X, "int8/64@bf16", rounding="stochastic", seed=1.5),  # type: ignore[arg-type]
    "a seed that is text": lambda: round_trip(X, "int8/64@bf16", rounding="stochastic", seed="7"),  # type: ignore[arg-type]
    "no seed": lambda: encode(X, "int8/64@bf16", seed=None),  # type: ignore[arg-type]
    "an index below 0": lambda: Seed(1, first_index=-5),
    "two steps": lambda: Seed(1, step=torch.tensor([1, 2])),
    "a rounding in a list": lambda: encode(X, "int8/64@bf16", rounding=[1]),  # type: ignore[arg-type]
    "an empty overflow": lambda: encode(X, "int8/64@bf16", overflow=""),
    "a sparse tensor": lambda: encode(X.to_sparse(), "int8/64@bf16"),
    "a tensor without data": lambda: encode(X.to("meta"), "int8"),
    "a packed tensor to a dtype": lambda: encode(X, "int8/64@bf16").to(torch.float16),  # type: ignore[arg-type]
    "integers from decode": lambda: encode(X, "int8/64@bf16").decode(torch.int32),
    "an element that is no text": lambda: Element.parse(3),  # type: ignore[arg-type]
    "a width of thousands of digits": lambda: Format.parse("int" + "9" * 5000),
    "a negative shape": lambda: Format.parse("int8").nbytes((-1, 3)),
    "a broken shape": lambda: Format.parse("int8").nbytes((2.5,)),  # type: ignore[arg-type]
    "a block without a scale": lambda: Format(Element.parse("int4"), 64),
    "a block of 0": lambda: dataclasses.replace(Format.parse("int4/64@bf16"), block=0),
    "codes in a list": lambda: PackedTensor.from_state_dict({**encode(X, "int8/64@bf16").state_dict(), "codes": [1, 2]}),
}


@pytest.mark.parametrize("what", WRONG_CALLS)
def test_wrong_calls_get_a_sentence(what: str) -> None:
    with pytest.raises(ParedownError, match=r"\w+ .*\."):
        WRONG_CALLS[what]()


def test_scales_that_are_not_contiguous_are_read_as_they_are() -> None:
    p = encode(normal(4, 64), "int8/16@fp32")
    assert p.scales is not None
    turned = p.scales.t().contiguous().t()
    assert torch.equal(encode(normal(4, 64), "int8/16@fp32", scales=turned).codes, p.codes)
    state = {**p.state_dict(), "codes": p.codes.t().contiguous().t()}
    assert PackedTensor.from_state_dict(state).codes.is_contiguous()


def test_each_spelling_comes_back() -> None:
    for text in ("fp16", "e5m10", "fp16"):
        assert str(encode(torch.ones(3), text).format) == text
