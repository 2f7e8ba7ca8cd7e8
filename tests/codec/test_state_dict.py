"""Packed tensors in files: torch.save and load with weights_only, safetensors, and what is refused on the way back."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paredown.codec.packed import PackedTensor, encode
from paredown.errors import ParedownError
from tests.support.compare import assert_same_bits, assert_same_parts
from tests.support.values import normal

TEXTS = (
    "e4m3fn",
    "fp32",
    "int4/64@bf16",
    "e2m1fn/32@e8m0",
    "e2m1fn/16@e4m3fn",
    "uint4/64@bf16+fp32",
    "nf4/64@fp32",
    "e3m2fn/7@e8m0",
)


def examples() -> list[PackedTensor]:
    """Each format, with other shapes, dtypes and memory orders among them."""
    packed = [encode(normal(3, 130), text) for text in TEXTS]
    channels_last = normal(2, 3, 4, 5, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    packed += [
        encode(channels_last, "int8/64@bf16"),
        encode(normal(dtype=torch.float16), "e5m2"),
        encode(normal(0), "int4/64@bf16"),
    ]
    broken = normal(2, 64)
    broken[0, 0] = float("nan")
    return [*packed, encode(broken, "int8/64@bf16")]


def assert_same_packed(a: PackedTensor, b: PackedTensor) -> None:
    assert (a.format, a.shape, a.dtype, a.order) == (b.format, b.shape, b.dtype, b.order)
    assert_same_parts(a, b)
    assert_same_bits(a.decode(), b.decode())
    assert a.decode().stride() == b.decode().stride()


def test_a_state_is_plain_tensors_and_one_text() -> None:
    for packed in examples():
        state = packed.state_dict()
        kinds = {name: type(value) for name, value in state.items()}
        assert kinds.pop("header") is str
        assert set(kinds.values()) == {torch.Tensor} and set(kinds) <= {"codes", "scales", "minimums", "tensor_scale"}
        header = json.loads(state["header"])
        assert header["format"] == str(packed.format) and header["shape"] == list(packed.shape)


def test_torch_save_and_load_with_weights_only() -> None:
    for packed in examples():
        file = io.BytesIO()
        torch.save({"layer": packed.state_dict()}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert_same_packed(PackedTensor.from_state_dict(loaded["layer"]), packed)


def test_safetensors(tmp_path: Path) -> None:
    """Tensors as tensors, the header as metadata."""
    safetensors = pytest.importorskip("safetensors")
    save_file = pytest.importorskip("safetensors.torch").save_file
    for number, packed in enumerate(examples()):
        file = tmp_path / f"{number}.safetensors"
        state = packed.state_dict()
        header = state.pop("header")
        save_file(state, str(file), metadata={"header": header})
        with safetensors.safe_open(str(file), framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            loaded = {"header": opened.metadata()["header"], **tensors}
        assert_same_packed(PackedTensor.from_state_dict(loaded), packed)


def state_with(**changes: Any) -> dict[str, Any]:
    """A good state of int8/4@bf16, (4, 4) float32, with some of its header or parts changed; None takes a part away."""
    state = encode(normal(4, 4), "int8/4@bf16").state_dict()
    header = json.loads(state["header"])
    header.update({key: value for key, value in changes.items() if key in header})
    state["header"] = json.dumps(header)
    state.update({key: value for key, value in changes.items() if key not in header})
    return {key: value for key, value in state.items() if value is not None}


WRONG = {
    "no header": {"header": None},
    "no codes": {"codes": None},
    "no scales": {"scales": None},
    "codes of another size": {"codes": torch.zeros(4, 3, dtype=torch.uint8)},
    "another format": {"format": "int4/4@bf16"},
    "a longer shape": {"shape": [4, 5]},
    "another shape of as many bytes": {"shape": [2, 2, 4]},
    "codes of another shape": {"codes": torch.zeros(2, 8, dtype=torch.uint8)},
    "codes of another dtype": {"codes": torch.zeros(4, 1)},
    "scales of another dtype": {"scales": torch.zeros(4, 1, dtype=torch.int16)},
    "minimums that do not belong": {"minimums": torch.zeros(4, 1)},
    "a dtype that is none": {"dtype": "float33"},
    "a dtype that cannot be encoded": {"dtype": "int64"},
    "a name in torch that is no dtype": {"dtype": "load"},
    "an order that is none": {"order": [0, 0]},
    "an order that is too short": {"order": [0]},
    "a format that is none": {"format": "int99"},
    "a header that is none": {"header": "{"},
}


@pytest.mark.parametrize("what", WRONG)
def test_states_that_do_not_fit_together_are_refused(what: str) -> None:
    with pytest.raises(ParedownError):
        PackedTensor.from_state_dict(state_with(**WRONG[what]))


def test_an_error_names_both_sizes() -> None:
    with pytest.raises(ParedownError, match=r"codes is \(\(4, 4\).*int8/4@bf16.*\(4, 5\).*\(\(4, 5\)"):
        PackedTensor.from_state_dict(state_with(shape=[4, 5]))
