"""A directory with a model: which of its files are the weights."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from errors import CheckpointError
from models.checkpoints import Checkpoint, open_files, recognise
from models.checkpoints.beside import indexed_files

_META_SHARD = re.compile(r"consolidated\.\d+\.pth$")
_GGUF_PART = re.compile(r"-\d{5}-of-\d{5}(?=\.[^.]*$)")


def open_folder(folder: Path) -> Checkpoint:
    """A Hugging Face, Meta or torchchat directory, or one that holds exactly one weights file.

    Raises CheckpointError.
    """
    found = _weights_in(folder)
    # Hugging Face directories often carry the same weights as .bin or .pth besides: the order is what we'd rather read
    for format, suffix in (("safetensors", ".safetensors"), ("pytorch", ".bin")):
        shards = indexed_files(folder, suffix)
        if shards:
            return open_files(folder, format, shards)
        if format == "safetensors" and found.get(format):
            return open_files(folder, format, _without_copies(found[format]))
    files = [(format, file) for format, some in found.items() for file in some]
    if len(files) == 1:
        return open_files(folder, files[0][0], [files[0][1]])
    shards = [file for file in found.get("pytorch", []) if _META_SHARD.match(file.name)]
    if shards:
        return open_files(folder, "pytorch", shards)
    if files and len({_GGUF_PART.sub("", file.name) for _, file in files}) == 1:
        return open_files(folder, "gguf", [file for _, file in files])
    names = ", ".join(file.name for _, file in files)
    raise CheckpointError(folder, f"holds several models; name one of {names}")


def _weights_in(folder: Path) -> dict[str, list[Path]]:
    """The weights files directly in `folder`, sorted by name, by format. At least one."""
    found: dict[str, list[Path]] = {}
    refused: list[CheckpointError] = []
    for file in sorted(folder.iterdir()):
        if not file.is_file() or file.name.startswith("."):
            continue
        try:
            found.setdefault(recognise(file), []).append(file)
        except CheckpointError as error:
            refused.append(error)
    if not found:
        pointers = [error for error in refused if "git-lfs" in error.message]
        raise (
            pointers[0]
            if pointers
            else CheckpointError(
                folder, "holds no weights file that we recognise (llama2.c, PyTorch, safetensors, GGUF)"
            )
        )
    return found


def _without_copies(files: Sequence[Path]) -> Sequence[Path]:
    """Several files without an index are parts of one model, unless one is model.safetensors: that is whole."""
    whole = [file for file in files if file.name == "model.safetensors"]
    return whole if whole else files
