"""PyTorch .pt/.pth files: TinyLlamas, torchchat, Meta's consolidated shards, and Hugging Face's older .bin files.

Loaded with weights_only, so nothing in the file can run; a file that needs code is refused.
"""

from __future__ import annotations

import pickle
import pickletools
import re
import struct
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from errors import CheckpointError
from models.checkpoints import Checkpoint, recognise
from models.checkpoints.beside import Settings, assemble, find_settings, indexed_files
from models.checkpoints.names import rename
from models.checkpoints.storage import JoinedTensor, LoadedTensor, Stored

# what a damaged pickle or archive makes torch.load raise, found by truncating and corrupting files
_DAMAGE = (
    pickle.UnpicklingError,
    RuntimeError,
    EOFError,
    ValueError,
    LookupError,
    AttributeError,
    TypeError,
    AssertionError,
    ArithmeticError,
    OSError,
    struct.error,
)
# Meta's model parallelism: the axis along which a layer's weight was cut; norms are whole in every shard
_SHARD_AXES = {"wq": 0, "wk": 0, "wv": 0, "wo": 1, "w1": 0, "w2": 1, "w3": 0, "output": 0}


def open_pytorch(path: Path, files: Sequence[Path] | None = None) -> Checkpoint:
    """The model in `files`, which are all in one folder; `path` is what the user named (a file without `files`)."""
    if files is None:
        shards = indexed_files(path.parent, ".bin")
        files = shards if path in shards else [path]
    parts: list[dict[str, Stored]] = []
    metadata: dict[str, Any] = {}
    for file in files:
        tensors, about = _read(file)
        parts.append(tensors)
        metadata |= about
    args = metadata.get("model_args")
    settings = Settings(files[0], args) if isinstance(args, Mapping) else find_settings(files[0])
    stored = parts[0] if len(parts) == 1 else _merge(files, parts, settings)
    return assemble(path, "pytorch", stored, settings, metadata)


def _read(path: Path) -> tuple[dict[str, Stored], dict[str, Any]]:
    """A file's tensors by their own names, and what else it says."""
    if recognise(path) != "pytorch":
        raise CheckpointError(path, "is not a PyTorch file")
    mapped = zipfile.is_zipfile(path)
    content = _load(path, mapped=mapped)
    if not isinstance(content, Mapping):
        raise CheckpointError(path, f"holds a {type(content).__name__}, expected a dict of tensors")
    state, metadata = content, {}
    for key in ("model", "state_dict"):
        if isinstance(content.get(key), Mapping):
            state = content[key]
            # an optimizer's state is as large as the model, and of no use here
            metadata = {name: value for name, value in content.items() if name not in (key, "optimizer")}
            break
    tensors: dict[str, Stored] = {
        str(name): LoadedTensor(value.detach(), mapped=mapped)
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }
    if not tensors:
        raise CheckpointError(path, f"holds no tensors; its keys are {', '.join(map(str, list(content)[:8]))}")
    return _without_tied_output(tensors), metadata


def _load(path: Path, *, mapped: bool) -> Any:
    """torch.load with one clear line for everything that can be wrong. Files before torch 1.6's zip can't be mapped."""
    if mapped:
        _check_archive(path)
    elif _starts_like_zip(path):
        raise CheckpointError(path, "is truncated: the archive has no end; fetch it again")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols; what matters becomes an error
            return torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
    except _DAMAGE as error:
        raise _explain(path, error, whole=mapped or _pickles_end(path)) from None


def _explain(path: Path, error: BaseException, *, whole: bool) -> CheckpointError:
    """Code, or damage? In a file that isn't whole, half of an allowed name looks like code."""
    message = str(error)
    code = re.search(r"GLOBAL (\S+)|Unsupported class (\S+)", message)
    if code is not None and whole:
        return _contains_code(path, code[1] if code[1] is not None else code[2])
    reason = re.search(r"WeightsUnpickler error:\s*(.*)", message)
    first_line = reason[1] if reason is not None else message.strip().partition("\n")[0]
    if whole and "Unsupported operand" in first_line:
        return CheckpointError(path, f"is damaged or contains code ({first_line.strip()}), which is never run")
    kind = type(error).__name__
    return CheckpointError(path, f"is truncated or damaged ({first_line if first_line else kind}); fetch it again")


def _starts_like_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _check_archive(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, struct.error) as error:
        raise CheckpointError(path, f"is truncated or damaged ({error}); fetch it again") from None
    if not any(name.endswith("/data.pkl") for name in names):
        raise CheckpointError(path, "is a zip archive, but not one that torch.save wrote")
    if any("/code/" in name for name in names):
        raise _contains_code(path, "TorchScript")


def _pickles_end(path: Path) -> bool:
    """Whether the pickles that an old file starts with (five, if torch.save wrote it) are whole. Runs nothing."""
    with path.open("rb") as file:
        for _ in range(5):
            if not file.peek(1):
                break
            try:
                for _ in pickletools.genops(file):
                    pass
            except ValueError:
                return False
    return True


def _contains_code(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        path, f"contains code ({what}), which is never run; save its state_dict alone, or take the safetensors form"
    )


def _without_tied_output(tensors: dict[str, Stored]) -> dict[str, Stored]:
    """TinyLlamas save the shared embedding twice, as one storage; then the output is tied, and it is left out."""
    by_name = rename(Path(), {name: name for name in tensors}, {})
    output, embeddings = by_name.get("output.weight"), by_name.get("tok_embeddings.weight")
    if output is None or embeddings is None:
        return tensors
    if tensors[output].read().data_ptr() != tensors[embeddings].read().data_ptr():
        return tensors
    return {name: tensor for name, tensor in tensors.items() if name != output}


def _merge(files: Sequence[Path], parts: Sequence[dict[str, Stored]], settings: Settings) -> dict[str, Stored]:
    """Several files: parts of every tensor if their names are the same (Meta), else different tensors (HF)."""
    if all(part.keys() == parts[0].keys() for part in parts):
        return {name: _join([part[name] for part in parts], name, settings) for name in parts[0]}
    merged: dict[str, Stored] = {}
    for file, part in zip(files, parts, strict=True):
        twice = merged.keys() & part.keys()
        if twice:
            raise CheckpointError(file, f"tensor {min(twice)} is in another file of the model, too")
        merged |= part
    return merged


def _join(shards: list[Stored], name: str, settings: Settings) -> Stored:
    module = name.removesuffix(".weight").rpartition(".")[2]
    if module == "tok_embeddings":  # cut by width in Llama 2, by vocabulary in Llama 3
        return JoinedTensor(shards, 0 if shards[0].shape[1] == settings.values.get("dim") else 1)
    return JoinedTensor(shards, _SHARD_AXES[module]) if module in _SHARD_AXES else shards[0]
