"""Weights that are packed as they are read, and saved packed: a dense model under `apply` is the oracle, and the safetensors library."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paredown as pare
from paredown.errors import CheckpointError
from paredown.formats.element import NF4
from paredown.optim.packed_parameter import PackedParameter
from paredown.optim.packed_weight import weight_of
from paredown.session.weights import safetensors_files
from paredown.session.weights.safetensors_files import FileTensor, find_tensors

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
SIDE = 96
FROZEN4 = pare.Plan.preset("frozen4")


class Net(nn.Module):
    """Weights of two and three dimensions, tied ones, a norm, a buffer in the state dict, and one that is not."""

    offset: Tensor
    count: Tensor

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, SIDE)
        self.norm = nn.LayerNorm(SIDE)
        self.up, self.down = nn.Linear(SIDE, 2 * SIDE), nn.Linear(2 * SIDE, SIDE, bias=False)
        self.experts = nn.Parameter(torch.randn(3, SIDE, SIDE) / SIDE**0.5)
        self.head = nn.Linear(SIDE, 100, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("offset", torch.arange(SIDE) / SIDE)
        self.register_buffer("count", torch.tensor(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embedding(ids) + self.offset)
        x = x + self.down(torch.relu(self.up(x)))
        return self.head(torch.einsum("...i,nij->...j", x, self.experts))


IDS = torch.arange(24).view(2, 12)


def made(dtype: torch.dtype = torch.float32, **options: Any) -> Net:
    torch.manual_seed(0)
    model = Net(**options).to(dtype)
    model.requires_grad_(False)
    model.norm.requires_grad_(True)
    return model


def on_meta(dtype: torch.dtype = torch.float32, **options: Any) -> Net:
    with torch.device("meta"):
        return made(dtype, **options)


def dense_files(folder: Path, model: Net, num_files: int = 3) -> Path:
    """Write the model's state dict with the safetensors library, in several files with an index as Hugging Face has them."""
    folder.mkdir(exist_ok=True)
    state = dict(model.state_dict())
    state.pop("head.weight", None) if model.head.weight is model.embedding.weight else None  # tied ones are saved once
    names, file_of = sorted(state), {}
    for number in range(num_files):
        part, file = names[number::num_files], f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        safetensors.save_file({name: state[name].contiguous() for name in part}, folder / file, {"format": "pt"})
        file_of |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    return folder


def packed_of(model: nn.Module) -> dict[str, pare.PackedTensor]:
    return {name: weight.packed for name, p in model.named_parameters() if (weight := weight_of(p)) is not None}


def assert_same_bits(mine: dict[str, pare.PackedTensor], wanted: dict[str, pare.PackedTensor]) -> None:
    assert mine.keys() == wanted.keys() and len(mine) == 4
    for name, packed in mine.items():
        assert (packed.format, packed.shape, packed.dtype) == (wanted[name].format, wanted[name].shape, wanted[name].dtype), name
        parts = zip(packed.parts.tensors(), wanted[name].parts.tensors(), strict=True)
        assert all(torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8)) for a, b in parts), name


def step(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    loss = model(IDS).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("format", ["nf4/64@bf16", "int8/64@bf16", "uint4/64@bf16+bf16", "e2m1fn/16@e4m3fn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_packed_as_apply_packs_them(tmp_path: Path, format: str, dtype: torch.dtype) -> None:
    """Steps of the session are those of a session on the dense model; nothing is quantized again."""
    plan, dense, model = pare.Plan.uniform(frozen=format), made(dtype), on_meta(dtype)
    pare.load_packed(model, dense_files(tmp_path / "dense", dense), plan)
    assert model.head.weight is model.embedding.weight and model.norm.weight.requires_grad and not model.up.bias.requires_grad
    assert all(p.untyped_storage().nbytes() == 0 for p in model.parameters() if type(p) is PackedParameter)
    before = packed_of(model)
    with pare.apply(plan, dense), pare.apply(plan, model) as session:
        assert_same_bits(packed_of(model), packed_of(dense))
        assert all(packed_of(model)[name].codes is packed.codes for name, packed in before.items()), "the same memory"
        assert [row.slot for row in session.changes] == ["1 parameter of fewer than 2 dimensions or 4096 values"]
        assert all(torch.equal(a, b) for a, b in zip(step(model), step(dense), strict=True))
    assert_same_bits(packed_of(model), before)
    assert torch.equal(model.offset, dense.offset) and torch.equal(model.count, dense.count)


def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a tensor is read, no earlier one of those that are packed is alive."""
    alive, read = weakref.WeakSet[torch.UntypedStorage](), FileTensor.read
    counts = list[int]()

    def counted(tensor: FileTensor) -> Tensor:
        counts.append(sum(storage.nbytes() for storage in alive))
        value = read(tensor)
        if value.dim() > 1:
            alive.add(value.untyped_storage())
        return value

    monkeypatch.setattr(FileTensor, "read", counted)
    folder = dense_files(tmp_path, made())
    pare.load_packed(on_meta(), folder, "frozen4")
    assert len(counts) == 9 and max(counts) == 0
    counts.clear()
    model = on_meta()
    pare.load_packed(model, folder)
    assert max(counts) > 0, "without a plan they stay"


@pytest.mark.parametrize("max_shard", ["5GB", 1 << 14])
def test_saved_bases_load_without_quantizing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_shard: int | str) -> None:
    dense = made(torch.bfloat16)
    session = pare.apply(FROZEN4, dense)
    with session:
        wanted, outputs = packed_of(dense), step(dense)
        pare.save_packed(dense, tmp_path, max_shard=max_shard)
        pare.save_packed(dense, tmp_path, max_shard=max_shard)  # replaces the first
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == (1 if max_shard == "5GB" else 3) and len(list(tmp_path.iterdir())) == len(files) + 1
    monkeypatch.setattr("paredown.session.weights.unattached_weights.pack", None)
    monkeypatch.setattr("paredown.session.weights.packed_weights.pack", None)
    model = on_meta(torch.bfloat16)
    pare.load_packed(model, tmp_path)
    with pare.apply(FROZEN4, model):
        assert_same_bits(packed_of(model), wanted)
        assert all(torch.equal(a, b) for a, b in zip(step(model), outputs, strict=True))
    other = made(torch.float32)
    pare.load_packed(other, tmp_path, "frozen8")  # a model with memory, and of another dtype
    assert {str(packed.format) for packed in packed_of(other).values()} == {"nf4/64@bf16"}
    with pare.apply(pare.Plan.preset("frozen8"), other) as session:
        kept = next(row for row in session.changes if "not quantized again" in row.reason)
        assert (kept.slot, kept.asked, kept.given) == ("4 weights", "int8/64@bf16", "nf4/64@bf16")
    assert torch.equal(other.up.weight.detach().clone(), wanted["up.weight"].decode(torch.float32))


def test_files_are_those_of_the_safetensors_library(tmp_path: Path) -> None:
    model = made()
    with pare.apply(FROZEN4, model):
        pare.save_packed(model, tmp_path)
        packed = packed_of(model)["up.weight"]
    (path,) = tmp_path.glob("*.safetensors")
    state = safetensors.load_file(path)
    assert torch.equal(state["up.weight.codes"], packed.codes) and torch.equal(state["up.weight.scales"], packed.parts.tensors()[1])
    assert torch.equal(state["count"], model.count) and "head.weight.codes" not in state
    values = {str(dtype): torch.arange(6).view(2, 3).to(dtype) for dtype in safetensors_files.DTYPE_NAMES if dtype.itemsize < 8}
    values |= {"empty": torch.empty(0, 4), "scalar": torch.tensor(2.5), "gaps": torch.arange(12.0).view(3, 4).t()[1:]}
    safetensors.save_file({name: value.contiguous() for name, value in values.items()}, tmp_path / "all")
    read = {name: tensor.read() for name, tensor in find_tensors(tmp_path / "all").tensors.items()}
    assert read.keys() == values.keys()
    assert all(a.dtype == b.dtype and a.shape == b.shape for a, b in zip(read.values(), (values[n] for n in read), strict=True))
    assert all(
        torch.equal(read[name].view(torch.uint8), value.contiguous().view(torch.uint8))
        for name, value in values.items()
        if value.dim()
    )


def test_bases_stay_packed_after_a_session_if_asked() -> None:
    model = made()
    session = pare.apply(FROZEN4, model)
    packed, outputs = packed_of(model), step(model)
    session.close(packed_base=True)
    assert_same_bits(packed_of(model), packed)
    assert all(torch.equal(a, b) for a, b in zip(step(model), outputs, strict=True)), "torch functions decode them"
    assert all(type(value) is not PackedParameter for value in model.state_dict().values())
    assert torch.equal(model.state_dict()["up.weight"], packed["up.weight"].decode())
    again = pare.apply(pare.Plan.preset("activations8"), model)
    assert ("4 weights", "no format", "nf4/64@bf16") in [(row.slot, row.asked, row.given) for row in again.changes]
    again.close()
    assert_same_bits(packed_of(model), packed)
    pare.apply(FROZEN4, model).close(packed_base=False)
    assert not packed_of(model) and torch.equal(model.up.weight, packed["up.weight"].decode())


def test_trained_weights_can_be_loaded_packed(tmp_path: Path) -> None:
    """A rule for `weight` packs weights that are trained: the session and the optimizer go on as with the dense model."""
    plan = pare.Plan.preset("lpmm")
    dense, model = made().requires_grad_(True), on_meta()
    pare.load_packed(model, dense_files(tmp_path, dense), plan)
    model.requires_grad_(True)
    losses = list[list[Tensor]]()
    for net in (dense, model):
        with pare.apply(plan, net):
            optimizer = pare.optim.AdamW(net.parameters(), lr=1e-2, seed=1)
            losses.append([step(net)[0] for _ in range(3) if optimizer.step() is None])
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True)) and not torch.equal(*losses[0][1:])


def test_weights_that_cannot_be_packed_stay_plain(tmp_path: Path) -> None:
    dense = made()
    dense.up.weight.data[0, 0] = torch.nan
    dense_files(tmp_path, dense)
    model = on_meta()
    pare.load_packed(model, tmp_path, FROZEN4.set("down.weight", None))
    assert packed_of(model).keys() == {"embedding.weight", "experts"}
    with pare.apply(FROZEN4.set("down.weight", None), model) as session:
        assert ("weight=up.weight", "it holds values that are not finite") in [(row.slot, row.reason) for row in session.changes]


# --- files that do not fit ------------------------------------------------------------------------------------------------


def cut(folder: Path) -> None:
    path = folder / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def drop(folder: Path) -> None:
    (folder / "model-00002-of-00003.safetensors").unlink()


def exchange(folder: Path) -> None:
    safetensors.save_file({"other.weight": torch.ones(3)}, folder / "model-00002-of-00003.safetensors")


def no_header(folder: Path) -> None:
    (folder / "model-00002-of-00003.safetensors").write_bytes(b"PK\x03\x04" + bytes(100))


def no_json(folder: Path) -> None:
    (folder / "model-00002-of-00003.safetensors").write_bytes((9).to_bytes(8, "little") + b"[1, 2, 3]")


def wrong_offsets(folder: Path) -> None:
    text = b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}'
    (folder / "model-00002-of-00003.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))


def no_map(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


def pickled(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    torch.save({}, folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (cut, r"is cut off: 100 bytes are missing"),
        (drop, r"names 3 files, and 'model-00002-of-00003.safetensors' is not there"),
        (exchange, r"is a file of another checkpoint than model.safetensors.index.json"),
        (no_header, r"is no safetensors file, or is cut off"),
        (no_json, r"its header is \[1, 2, 3\]"),
        (wrong_offsets, r"which is no tensor that torch has"),
        (no_map, r"an index has 'weight_map'"),
        (pickled, r"pickled files \('pytorch_model.bin'\) are not read"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_damaged_files_are_named_and_nothing_is_loaded(tmp_path: Path, damage: Any, says: str) -> None:
    damage(dense_files(tmp_path, made()))
    model = on_meta()
    with pytest.raises(CheckpointError, match=says):
        pare.load_packed(model, tmp_path, FROZEN4)
    assert all(p.is_meta for p in model.parameters())


def test_checkpoints_of_other_models_are_refused(tmp_path: Path) -> None:
    folder = dense_files(tmp_path, made(tied=False))
    with pytest.raises(
        CheckpointError, match=r"lacks '0.weight', '0.bias' of the model, and has 'count', 'down.weight', .* and 7 more"
    ):
        pare.load_packed(nn.Sequential(nn.Linear(2, 3)), folder)
    with pytest.raises(CheckpointError, match=r"has other values for head\.weight than for embedding.weight, which the model ties"):
        pare.load_packed(on_meta(), folder)
    other = on_meta(tied=False)
    other.up = nn.Linear(SIDE, 3 * SIDE, device="meta")
    with pytest.raises(CheckpointError, match=r"up.weight has shape \(192, 96\) there and \(288, 96\) here, one of 2 that differ"):
        pare.load_packed(other, folder)
    assert other.down.weight.is_meta
    rotary = on_meta(tied=False)
    rotary.register_buffer("table", torch.empty(4, device="meta"), persistent=False)
    with pytest.raises(CheckpointError, match="'table' is on the meta device and in no file"):
        pare.load_packed(rotary, folder)
    with pytest.raises(CheckpointError, match="not 7"):
        pare.load_packed(other, folder, 7)  # type: ignore[arg-type]


def test_an_interrupted_save_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, write = made(), safetensors_files._write  # pyright: ignore[reportPrivateUsage]
    with pare.apply(FROZEN4, model):
        pare.save_packed(model, tmp_path, max_shard=1 << 14)
        before, calls = {path.name: path.read_bytes() for path in tmp_path.iterdir()}, list[int]()

        def interrupted(*args: Any) -> None:
            calls.append(1)
            if len(calls) == 2:
                raise KeyboardInterrupt
            write(*args)

        monkeypatch.setattr(safetensors_files, "_write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pare.save_packed(model, tmp_path, max_shard=1 << 14)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_headers_of_packed_weights_are_checked(tmp_path: Path) -> None:
    with pare.apply(FROZEN4, model := made()):
        pare.save_packed(model, tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    data = path.read_bytes()
    for old, new, says in (
        (b'\\"version\\": 1', b'\\"version\\": 9', "of version 9"),
        (b"[192, 96]", b"[192, 64]", "of another model"),
        (b"nf4/64@bf16", b"nf4/32@bf16", "the header and the tensors do not belong together"),
    ):
        assert old in data, old
        path.write_bytes(data.replace(old, new))
        with pytest.raises(CheckpointError, match=says):
            pare.load_packed(on_meta(), tmp_path)


# --- bitsandbytes ---------------------------------------------------------------------------------------------------------

SHAPE, BLOCK = (8, 192), 64


def four_bits(
    *, nested: bool, shape: tuple[int, ...] = SHAPE, kind: str = "nf4", dtype: str = "bfloat16"
) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of one weight as bitsandbytes saves it, of random codes, and its values in float32 by the definition."""
    generator = torch.Generator().manual_seed(1)
    numel = torch.Size(shape).numel()
    codes = torch.randint(16, (numel,), generator=generator)
    packed = torch.tensor([int(high) * 16 + int(low) for high, low in codes.view(-1, 2)], dtype=torch.uint8)[:, None]
    state: dict[str, Any] = {"quant_type": kind, "blocksize": BLOCK, "dtype": "bfloat16", "shape": shape}
    tensors = {"weight": packed, "weight.quant_map": torch.tensor(NF4)}
    absmax = torch.rand(numel // BLOCK, generator=generator) + 0.1
    if nested:
        of_codes, length = torch.linspace(-1, 1, 256), 4
        indices = torch.randint(256, absmax.shape, generator=generator)
        scales = torch.rand(-(-len(absmax) // length), generator=generator)
        state |= {"nested_blocksize": length, "nested_dtype": "float32", "nested_offset": 0.75}
        tensors |= {"weight.absmax": indices.to(torch.uint8), "weight.nested_absmax": scales, "weight.nested_quant_map": of_codes}
        absmax = torch.stack([of_codes[code] * scales[i // length] + 0.75 for i, code in enumerate(indices)])
    else:
        tensors["weight.absmax"] = absmax
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    values = torch.stack([torch.tensor(NF4[code]) * absmax[i // BLOCK] for i, code in enumerate(codes)])
    return tensors, values.view(shape)


@pytest.mark.parametrize("nested", [False, True])
def test_4_bit_weights_of_bitsandbytes_keep_their_codes(tmp_path: Path, nested: bool) -> None:
    tensors, values = four_bits(nested=nested)
    safetensors.save_file({f"0.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    model = nn.Sequential(nn.Linear(SHAPE[1], SHAPE[0], bias=False, device="meta"))
    pare.load_packed(model, tmp_path, "frozen4")
    packed = packed_of(model)["0.weight"]
    assert str(packed.format) == "nf4/64@fp32" and torch.equal(packed.decode(), values)
    model = nn.Sequential(nn.Linear(SHAPE[1], SHAPE[0], bias=False, device="meta", dtype=torch.bfloat16))
    pare.load_packed(model, tmp_path)
    assert torch.equal(packed_of(model)["0.weight"].decode(), values.bfloat16())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda: four_bits(nested=False, kind="fp4")[0], "its codes are fp4: nf4 is read"),
        (lambda: four_bits(nested=False, shape=(16, 96))[0], "its rows have 96 values, which are not whole blocks of 64"),
        (lambda: four_bits(nested=False)[0] | {"weight.quant_map": torch.linspace(-1, 1, 16)}, "its quant_map is not that of nf4"),
        (lambda: four_bits(nested=False)[0] | {"weight.absmax": torch.ones(3)}, "its codes and scales are not those of shape"),
        (lambda: four_bits(nested=True)[0] | {"weight.nested_quant_map": None}, "are not complete"),
        (
            lambda: {"weight": torch.ones(8, 192, dtype=torch.int8), "weight.SCB": torch.ones(8)},
            "0.weight is .* in 8 bits, which is not",
        ),
        (lambda: {"weight:qdata": torch.ones(8, 192, dtype=torch.int8)}, "tensors that torchao has quantized"),
    ],
)
def test_other_layouts_are_refused(tmp_path: Path, change: Any, says: str) -> None:
    tensors = {f"0.{name}": tensor for name, tensor in change().items() if tensor is not None}
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=says):
        pare.load_packed(nn.Sequential(nn.Linear(SHAPE[1], SHAPE[0], bias=False, device="meta")), tmp_path)
