"""Reads safetensors files one tensor at a time, and writes them whole or not at all.

    8 bytes  length of the header, little-endian
    header   JSON: {"__metadata__": {name: text}, tensor: {"dtype": "BF16", "shape": [...], "data_offsets": [begin, end]}, ...}
    data     the tensors, row by row; offsets count from its begin

A checkpoint of several files has an index, JSON with {"weight_map": {tensor: file name}}. `find_tensors` reads the headers of all files
and checks them against the index and the sizes of the files, before any tensor is read. Files are read, not mapped: a tensor takes its
own bytes of memory and no more. `write_shards` gives new files new names and replaces the index last, so that an interrupt leaves the
earlier checkpoint.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paredown.codec.packed import PackedTensor
from paredown.errors import CheckpointError
from paredown.serial import PathText, brief, parse_json, read_json, replaced_file, save_json

DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "C64": torch.complex64},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu},
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
SUFFIX, INDEX_SUFFIX, METADATA = ".safetensors", ".safetensors.index.json", "__metadata__"
MOST_HEADER_BYTES = 100 << 20  # as the safetensors library has it
LENGTH_BYTES = 8
ALIGNMENT = 8
WHAT = "safetensors file"


@dataclass(frozen=True)
class FileTensor:
    """Describes a tensor in a safetensors file that has not been read yet."""

    path: Path
    dtype: torch.dtype
    shape: torch.Size
    start: int  # offset of its first byte in the file

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tensor."""
        return self.shape.numel() * self.dtype.itemsize

    def read(self) -> Tensor:
        """Read the tensor from its file into new memory, and return it."""
        data = torch.empty(self.nbytes, dtype=torch.uint8)
        view = memoryview(data.numpy().data)
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.start)
                while view and (count := file.readinto(view)):
                    view = view[count:]
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}.") from None
        if view:
            raise CheckpointError(f"{self.path} became shorter while it was read: {len(view)} bytes of a tensor are missing.")
        return data.view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class PackedInFiles:
    """Describes a packed tensor in files, as the tensors `names` (codes, scales); `read` reads and returns it."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    names: tuple[str, ...]
    read: Callable[[], PackedTensor]


@dataclass(frozen=True)
class FoundTensors:
    """Holds a checkpoint's tensors by name, which are not read yet, and the metadata of each of its files."""

    where: Path
    tensors: Mapping[str, FileTensor]
    metadata: Sequence[Mapping[str, str]]


def find_tensors(source: PathText | Sequence[PathText], *, names: Sequence[str] = ()) -> FoundTensors:
    """Find tensors in a file, an index, a list of files or a folder; raise CheckpointError if a file is damaged.

    `names`: names (without .safetensors) of files or indices that are looked for first in a folder.
    """
    if not isinstance(source, str | Path):
        files = [Path(path) for path in source]  # type: ignore[union-attr]
        return _merged(files[0].parent if files else Path(), files, None)
    path = Path(source)
    path = _in_folder(path, names) if path.is_dir() else path
    if not path.name.endswith(".json"):
        return _merged(path, [path], None)
    index = read_json(path, "index of a checkpoint", CheckpointError)
    file_of = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(file_of, dict) or not file_of or not all(isinstance(name, str) and name for name in file_of.values()):
        raise CheckpointError(f"{path}: an index has 'weight_map', an object of tensor and file names; this is {brief(index)}.")
    files = [path.parent / name for name in dict.fromkeys(file_of.values())]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(
            f"{path} names {len(files)} files, and {listed(missing)} {is_or_are(missing)} not there: download the rest."
        )
    return _merged(path, files, file_of)


def _in_folder(folder: Path, names: Sequence[str]) -> Path:
    """Return the path of a safetensors file or index in `folder`: the first of `names` that is there, or else the only one.

    Raise CheckpointError if there is none, or several.
    """
    for name in names:
        for path in (folder / f"{name}{INDEX_SUFFIX}", folder / f"{name}{SUFFIX}"):
            if path.is_file():
                return path
    found = sorted(folder.glob(f"*{INDEX_SUFFIX}")) or sorted(folder.glob(f"*{SUFFIX}"))
    if len(found) != 1:
        others = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in sorted(folder.glob(pattern))]
        have = f"it has {listed([path.name for path in found])}: give the path of one" if found else "it has none"
        advice = f", and pickled files ({listed(others)}) are not read: write them again with save_pretrained()" if others else ""
        raise CheckpointError(f"{folder} is no checkpoint with one safetensors file or index: {have}{advice}.")
    return found[0]


def _merged(where: Path, files: Sequence[Path], file_of: Mapping[str, str] | None) -> FoundTensors:
    """Return the tensors of all files together; raise CheckpointError if they are not the tensors of the index.

    `file_of`: the index, tensor name -> file name; None if there is no index.
    """
    tensors: dict[str, FileTensor] = {}
    metadata: list[Mapping[str, str]] = []
    for file in files:
        header = read_header(file)
        metadata.append(header.pop(METADATA))
        twice = header.keys() & tensors.keys()
        if twice:
            raise CheckpointError(
                f"{listed(sorted(twice))} {is_or_are(twice)} in {file.name} and in {tensors[min(twice)].path.name}."
            )
        expected = header.keys() if file_of is None else {name for name, path in file_of.items() if path == file.name}
        if wrong := sorted(expected ^ header.keys()):
            raise CheckpointError(
                f"{file} is a file of another checkpoint than {where.name}: {listed(wrong)} {is_or_are(wrong)} in one of the two only."
            )
        tensors |= header
    return FoundTensors(where, tensors, metadata)


def read_header(path: Path) -> dict[str, Any]:
    """Return the description of each tensor in a file by name, and under the key METADATA the file's metadata."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            text = file.read(length) if length <= MOST_HEADER_BYTES else b""
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}. Give the path of a {WHAT}.") from None
    if size < LENGTH_BYTES or not 0 < length <= min(MOST_HEADER_BYTES, size - LENGTH_BYTES):
        raise CheckpointError(f"{path} is no {WHAT}, or is cut off: it has {size} bytes, and its header should have {length}.")
    header = parse_json(text, WHAT, CheckpointError, name=str(path))
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is no {WHAT}: its header is {brief(header)}.")
    metadata = header.pop(METADATA, {})
    begin = LENGTH_BYTES + length
    tensors = {name: _tensor(path, name, row, begin) for name, row in header.items()}
    end = max((tensor.start + tensor.nbytes for tensor in tensors.values()), default=begin)
    if size != end:
        how = f"is cut off: {end - size} bytes are missing" if size < end else f"has {size - end} bytes too many"
        raise CheckpointError(f"{path} {how}; its header describes {end} bytes, and it has {size}. Download or copy it again.")
    return {**tensors, METADATA: metadata if isinstance(metadata, dict) else {}}


def _tensor(path: Path, name: str, row: Any, begin: int) -> FileTensor:
    try:
        (first, last), shape, dtype = row["data_offsets"], torch.Size(row["shape"]), DTYPES.get(row["dtype"])
        is_valid = all(size >= 0 for size in shape) and first >= 0
    except (KeyError, TypeError, ValueError, RuntimeError):
        first, last, shape, dtype, is_valid = 0, 0, torch.Size(), None, False
    if not is_valid or dtype is None or last - first != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(f"{path}: the header describes {brief(name)} as {brief(row)}, which is no tensor that torch has.")
    return FileTensor(path, dtype, shape, begin + first)


# --- writing ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorRecord:
    """Holds tensors that must be written into the same file, such as codes and scales of a weight, and a text on them."""

    name: str
    tensors: Mapping[str, Tensor]
    text: str = ""


def write_shards(
    folder: Path,
    name: str,
    records: Iterable[TensorRecord],
    *,
    describe: Callable[[dict[str, str]], dict[str, str]],
    max_bytes: int,
) -> None:
    """Write records into files of at most `max_bytes` each (or one larger record), then their index `name`.

    `describe` returns the metadata of a file from the texts of its records. Files of an earlier checkpoint of this name are deleted last.
    """
    index, tag = folder / f"{name}{INDEX_SUFFIX}", secrets.token_hex(4)
    file_of: dict[str, str] = {}
    num_bytes = 0
    try:
        for number, shard in enumerate(_shards(records, max_bytes), 1):
            path = folder / f"{name}-{tag}-{number:05d}{SUFFIX}"
            tensors = {key: tensor for record in shard for key, tensor in record.tensors.items()}
            file_of |= dict.fromkeys(tensors, path.name)
            num_bytes += sum(tensor.nbytes for tensor in tensors.values())
            texts = {record.name: record.text for record in shard if record.text}
            _write(path, tensors, describe(texts))
        save_json(index, {"metadata": {"total_size": num_bytes}, "weight_map": file_of}, CheckpointError, indent=1)
    except BaseException:
        _remove(folder.glob(f"{name}-{tag}-*{SUFFIX}"))
        raise
    _remove(path for path in folder.glob(f"{name}-*-*{SUFFIX}") if path.name not in set(file_of.values()))


def _shards(records: Iterable[TensorRecord], max_bytes: int) -> Iterator[list[TensorRecord]]:
    shard, num_bytes = list[TensorRecord](), 0
    for record in records:
        size = sum(tensor.nbytes for tensor in record.tensors.values())
        if shard and num_bytes + size > max_bytes:
            yield shard
            shard, num_bytes = [], 0
        shard.append(record)
        num_bytes += size
    if shard:
        yield shard


def _write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file; tensors on other devices are copied to the host one at a time."""
    header: dict[str, Any] = {METADATA: dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{name} is {tensor.dtype}, which safetensors files cannot hold: convert it first.")
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with replaced_file(path, CheckpointError) as part, part.open("wb") as file:
        file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def _remove(paths: Iterable[Path]) -> None:
    for path in list(paths):
        with suppress(OSError):
            path.unlink()


def listed(names: Iterable[str], most: int = 3) -> str:
    """Return the first `most` names as a text, and how many more there are."""
    every = [brief(name) for name in names]
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def is_or_are(names: Any) -> str:
    """Return "is" for one name, "are" for several."""
    return "are" if len(names) > 1 else "is"
