"""Elements against ml_dtypes and numpy: every code, the largest value, NaN and infinity, for every type that they have."""

from __future__ import annotations

import numpy as np
import pytest

from paredown.formats.element import Element

ml_dtypes = pytest.importorskip("ml_dtypes")

FLOATS = {
    "e2m1fn": ml_dtypes.float4_e2m1fn,
    "e2m3fn": ml_dtypes.float6_e2m3fn,
    "e3m2fn": ml_dtypes.float6_e3m2fn,
    "e3m4": ml_dtypes.float8_e3m4,
    "e4m3": ml_dtypes.float8_e4m3,
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e4m3b11fnuz": ml_dtypes.float8_e4m3b11fnuz,
    "e5m2": ml_dtypes.float8_e5m2,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e8m0": ml_dtypes.float8_e8m0fnu,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
}
INTEGERS = {text: getattr(ml_dtypes, text) for text in ("int1", "int2", "int4", "uint1", "uint2", "uint4")}


def codes_as_values(text: str, dtype: type) -> np.ndarray:
    """The value that the other implementation reads from every code."""
    width = Element.parse(text).width
    codes = np.arange(2**width, dtype=np.uint16 if width > 8 else np.uint8)
    return codes.view(dtype).astype(np.float32)


def test_no_type_of_ml_dtypes_is_left_out() -> None:
    types = {v for v in vars(ml_dtypes).values() if isinstance(v, type) and issubclass(v, np.generic)}
    left_out = types - set(FLOATS.values()) - set(INTEGERS.values())
    assert {t.__name__ for t in left_out} <= {"bcomplex32", "complex32"}


@pytest.mark.parametrize(("text", "dtype"), [*FLOATS.items(), *INTEGERS.items()])
def test_every_code(text: str, dtype: type) -> None:
    ours = np.array(Element.parse(text).values(), dtype=np.float32)
    theirs = codes_as_values(text, dtype)
    np.testing.assert_array_equal(ours, theirs)
    numbers = ~np.isnan(theirs)
    np.testing.assert_array_equal(np.signbit(ours[numbers]), np.signbit(theirs[numbers]))


@pytest.mark.parametrize(("text", "dtype"), FLOATS.items())
def test_largest_and_smallest(text: str, dtype: type) -> None:
    info = ml_dtypes.finfo(dtype)
    tested = Element.parse(text)
    assert tested.max_value == float(info.max)
    assert tested.min_value == (float(info.min) if text != "e8m0" else 2.0**-127)
    assert tested.smallest == float(info.smallest_subnormal)


@pytest.mark.parametrize(("text", "dtype"), FLOATS.items())
def test_codes_of_nan_and_infinity(text: str, dtype: type) -> None:
    tested = Element.parse(text)
    unsigned = np.uint16 if tested.width > 8 else np.uint8
    if tested.width < 8:
        assert tested.nan_code is None and tested.inf_code is None
        return
    as_code = lambda value: int(np.array([value], dtype=np.float32).astype(dtype).view(unsigned)[0])  # noqa: E731
    assert tested.nan_code == as_code(np.nan) & ~tested.sign_code | (tested.sign_code if "uz" in text else 0)
    infinite = np.isinf(codes_as_values(text, dtype)).any()
    assert tested.inf_code == (as_code(np.inf) if infinite else None)
