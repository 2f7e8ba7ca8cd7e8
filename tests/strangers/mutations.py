"""Wrong inputs made of right ones: JSON values with parts replaced, bytes with pieces changed; and what a reader may answer."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from paredown.errors import ParedownError
from tests.support.scale import scaled

LONGEST = 4000  # letters of a sentence


def thousands(num: int) -> Any:
    """Settings of a test of so many inputs, the same ones each time; `make test-all` runs a hundred times as many."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=scaled(num), deadline=None, derandomize=True, database=None, suppress_health_check=checks)


def answers(read: Callable[[], Any]) -> bool:
    """Whether `read` gives a value; if not, it gives a sentence and nothing else."""
    try:
        read()
    except ParedownError as error:
        assert 3 < len(str(error)) < LONGEST, f"no sentence: {str(error)[:200]!r}"
        return False
    return True


def nested(depth: int) -> Any:
    """A list in a list in a list."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


HOSTILE: list[Any] = [
    *(None, True, False, 0, -1, 1, 3, 2**31, 2**63, 10**400, -(10**400), 10**6000, 1e308, -1e308, 5e-324, 0.5),
    *(float("nan"), float("inf"), float("-inf")),
    *(
        "",
        " ",
        "x",
        "x" * 5000,
        "\x00",
        "\x1b[2J",
        "\ud800",
        "../../etc/passwd",
        "/etc/passwd",
        "int4/64@bf16",
        "activation",
        "layer*",
        "[",
        "é",
    ),
    *("</script><script>", "'; drop table trials; --", "{}", "1e999", "9" * 5000, "%s%n", "digits#model=mlp"),
    *([], {}, [[]], [None], [1, 2], [[1, 2], [3]], {"a": 1}, {"": None}, {"__class__": "x"}, {"format": "int8"}),
    *(nested(60), [0] * 200, {"version": 1}, {"version": 99}),
]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every part of a JSON value."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


CHANGES = ("replace", "replace", "replace", "swap", "swap", "nudge", "drop", "double", "add")


@st.composite
def wrong_json(draw: st.DrawFn, right: Any) -> Any:
    """`right` with up to three parts replaced, taken from elsewhere in it, nudged, left out, doubled or added to."""
    value = copy.deepcopy(right)
    for _ in range(draw(st.integers(1, 3))):
        found = list(places(value))
        if not found:
            return draw(st.sampled_from(HOSTILE))
        container, key = found[draw(st.integers(0, len(found) - 1))]
        change = draw(st.sampled_from(CHANGES))
        if change == "swap":
            same = [of[name] for of, name in found if name == key and type(of) is type(container)]
            container[key] = copy.deepcopy(same[draw(st.integers(0, len(same) - 1))])
        elif change == "nudge" and type(container[key]) in (int, float):
            container[key] += draw(st.sampled_from((-7, -1, 1, 7)))
        elif change in ("replace", "nudge"):
            container[key] = copy.deepcopy(draw(st.sampled_from(HOSTILE)))
        elif change == "drop":
            del container[key]
        else:
            _put_in(draw, container, key, is_double=change == "double")
    return value


def _put_in(draw: st.DrawFn, container: Any, key: Any, *, is_double: bool) -> None:
    """A second copy of a part, or a part that does not belong there."""
    odd = copy.deepcopy(container[key] if is_double and isinstance(container, list) else draw(st.sampled_from(HOSTILE)))
    if isinstance(container, list):
        container.insert(key, odd)
    else:
        container[draw(st.sampled_from(("", "extra", "version", "\x00", "plan")))] = odd


@st.composite
def wrong_bytes(draw: st.DrawFn, right: bytes) -> bytes:
    """`right` cut off, or with bytes changed, put in or left out; or bytes of any kind."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=200))
    data = bytearray(right)
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        change = draw(st.sampled_from(("set", "cut", "insert", "delete", "repeat")))
        if change == "set" and data:
            data[at] = draw(st.integers(0, 255))
        elif change == "cut":
            del data[at:]
        elif change == "insert":
            data[at:at] = draw(st.binary(max_size=20))
        elif change == "delete":
            del data[at : at + draw(st.integers(1, 40))]
        else:
            data[at:at] = data[at : at + 30]
    return bytes(data)


def text_of(value: Any) -> bytes:
    """JSON as a file has it; NaN, half characters and numbers of thousands of digits included."""
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(value).encode()
    finally:
        sys.set_int_max_str_digits(limit)


TEXTS = st.one_of(
    st.text(max_size=40),
    st.text(alphabet="0123456789.%KMGTiBkb e+-", max_size=20),
    st.text(alphabet="int4uefmbnsz0123456789/@+", max_size=24),
    st.sampled_from([text for text in HOSTILE if isinstance(text, str)]),
)
