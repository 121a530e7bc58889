"""The models known by name, and the folder they are downloaded to.

A downloaded model is a folder under `model_folder()` with a manifest of its files. It appears there by one rename
when everything has arrived and been checked, so that whatever has the final name is complete.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from errors import DownloadError, SetupError
from models.channels import HubSource, Source, UrlSource, WheelSource

MANIFEST = "torchchat.json"
WEIGHT_SUFFIXES = (".gguf", ".safetensors", ".bin", ".pt", ".pth")


@dataclass(frozen=True, slots=True)
class Entry:
    """A model that can be downloaded: one known by name, or any repository of the hub."""

    name: str
    sources: tuple[Source, ...]
    aliases: tuple[str, ...] = ()
    description: str = ""
    license: str = ""
    gated: bool = False  # the hub wants a token and an accepted licence
    size: int | None = None  # bytes, about
    open: str | None = None  # the weights file; None: the only GGUF there is, else the folder


@dataclass(frozen=True, slots=True)
class Target:
    """What a MODEL argument means: the user's own file or folder (`path`), or something to download (`entry`)."""

    name: str  # what the server calls it
    path: Path | None = None
    entry: Entry | None = None


def model_folder() -> Path:
    """$TORCHCHAT_MODELDIR, or torchchat/models in the user's cache folder. It need not exist."""
    given = os.environ.get("TORCHCHAT_MODELDIR")
    if given:
        return Path(given).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "torchchat" / "models"


def resolve(model: str) -> Target:
    """A known name or alias (in any case), an existing path, `org/name` or `org/name/FILE` on the hub.

    Raises SetupError with the nearest names.
    """
    known = _names().get(model.lower())
    if known is not None:
        return Target(known.name, entry=known)
    path = Path(model).expanduser()
    if model and path.exists():  # the path "" is the current folder
        return Target(path.resolve().name if path.is_dir() else path.stem, path=path)
    looks_local = model.startswith((".", "/", "~")) or (model.endswith(WEIGHT_SUFFIXES) and model.count("/") != 2)
    if looks_local:
        raise SetupError(f"{model}: no such file or folder.")
    if re.fullmatch(r"[\w.-]+/[\w.-]+(/[\w.-]+)?", model):
        return Target(model, entry=_hub_entry(model))
    import difflib

    near = difflib.get_close_matches(model.lower(), _names(), n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    others = "`python torchchat.py list` shows the names; a path or a hub id (org/name) works too."
    raise SetupError(f"unknown model {model!r}.{hint} {others}")


def where(model: str) -> Path | None:
    """The weights file or folder to open, if it is here and whole. Raises SetupError for an unknown name."""
    target = resolve(model)
    if target.entry is None:
        return target.path
    return _whole(target.entry)


def download(model: str, progress: bool | None = None) -> Path:
    """Fetch a model unless it is here, and return what `where` then says. `progress` None: bars on a terminal.

    Two processes that want the same model take turns; an interrupted download is continued by the next call.
    Raises SetupError for an unknown name, DownloadError for everything that goes wrong on the way.
    """
    target = resolve(model)
    if target.entry is None:
        assert target.path is not None
        return target.path
    here = _whole(target.entry)
    if here is not None:
        return here
    with _explained(target.entry), _locked(target.entry):
        here = _whole(target.entry)  # another process may have brought it meanwhile
        return here if here is not None else _fetch(target.entry, sys.stderr.isatty() if progress is None else progress)


def remove(model: str) -> int:
    """Delete a downloaded model, or the beginnings of one; returns the bytes freed. SetupError if there is none."""
    target = resolve(model)
    if target.entry is None:
        raise SetupError(f"{target.path} is a file of yours; torchchat removes only what it downloaded.")
    folders = [_folder(target.entry), _partial(target.entry)]
    if not any(folder.exists() for folder in folders):
        raise SetupError(f"{target.name} is not downloaded.")
    with _explained(target.entry), _locked(target.entry):
        freed = sum(sum(_files(folder).values()) for folder in folders)
        (folders[0] / MANIFEST).unlink(missing_ok=True)  # first, so that a half-removed folder is no model
        for folder in folders:
            if folder.exists():
                shutil.rmtree(folder)
    return freed


def list_models() -> list[Entry]:
    """Every known model, and after them the hub repositories that were downloaded by their own id."""
    found = {entry.name: entry for entry in _known()}
    for manifest in sorted(model_folder().glob(f"*/{MANIFEST}")):
        name = _read_manifest(manifest.parent).get("model")
        if isinstance(name, str) and name not in found and "/" in name:
            found[name] = _hub_entry(name)
    return list(found.values())


# Entries


@functools.cache
def _known() -> tuple[Entry, ...]:
    text = Path(__file__).with_name("models.json").read_text(encoding="utf-8")
    return tuple(_entry(raw) for raw in json.loads(text))


def _entry(raw: dict[str, Any]) -> Entry:
    """One object of models.json."""
    sources = tuple(_source(source) for source in raw["sources"])
    rest = {key: value for key, value in raw.items() if key not in ("sources", "aliases")}
    return Entry(sources=sources, aliases=tuple(raw.get("aliases", ())), **rest)


def _source(raw: dict[str, Any]) -> Source:
    if "hub" in raw:
        return HubSource(raw["hub"], tuple(raw.get("files", ())))
    if "wheel" in raw:
        return WheelSource(raw["wheel"], raw["member"], raw["sha256"], raw["size"])
    return UrlSource(**raw)


@functools.cache
def _names() -> dict[str, Entry]:
    """Lower-case name -> entry, for names, aliases and the repositories that an entry takes whole."""
    names: dict[str, Entry] = {}
    for entry in _known():
        repos = [source.repo for source in entry.sources if isinstance(source, HubSource) and not source.files]
        for name in (entry.name, *entry.aliases, *repos):
            names[name.lower()] = entry
    return names


def _hub_entry(model: str) -> Entry:
    org, name, *file = model.split("/")
    return Entry(model, (HubSource(f"{org}/{name}", tuple(file)),), open=file[0] if file else None)


# Folders


def _slug(entry: Entry) -> str:
    return entry.name.replace("/", "--").replace(":", "-")


def _folder(entry: Entry) -> Path:
    return model_folder() / _slug(entry)


def _partial(entry: Entry) -> Path:
    return model_folder() / f".{_slug(entry)}.partial"


def _files(folder: Path) -> dict[str, int]:
    """Relative path -> bytes of every file in the folder."""
    return {p.relative_to(folder).as_posix(): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}


def _read_manifest(folder: Path) -> dict[str, Any]:
    """The folder's manifest; {} when there is none that can be read."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def _whole(entry: Entry) -> Path | None:
    """What to open, if every file of the manifest is there in its full size."""
    folder = _folder(entry)
    manifest = _read_manifest(folder)
    files = manifest.get("files")
    if not files or not all(
        (folder / n).is_file() and (folder / n).stat().st_size == size for n, size in files.items()
    ):
        return None
    return folder / manifest["open"]


def _fetch(entry: Entry, progress: bool) -> Path:
    """Bring every source into the partial folder, then rename it. The caller holds the lock."""
    folder, partial = _folder(entry), _partial(entry)
    if folder.exists():  # damaged: what is left of it becomes the start of this download
        shutil.rmtree(partial, ignore_errors=True)
        os.replace(folder, partial)
    partial.mkdir(exist_ok=True)
    (partial / MANIFEST).unlink(missing_ok=True)
    for source in entry.sources:
        source.fetch(partial, progress)
    files = _files(partial)
    gguf = [name for name in files if name.endswith(".gguf")]
    opened = entry.open if entry.open is not None else gguf[0] if len(gguf) == 1 else ""
    manifest = {"model": entry.name, "open": opened, "files": files}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    os.replace(partial, folder)
    return folder / opened


@contextmanager
def _locked(entry: Entry) -> Iterator[None]:
    """One process at a time per model."""
    from filelock import FileLock

    model_folder().mkdir(parents=True, exist_ok=True)
    with FileLock(model_folder() / f".{_slug(entry)}.lock"):
        yield


@contextmanager
def _explained(entry: Entry) -> Iterator[None]:
    """Turn what the file system says into one line."""
    try:
        yield
    except OSError as error:
        folder = model_folder()
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            need = "" if entry.size is None else f" ({entry.name} takes about {entry.size / 1e9:.1f} GB)"
            advice = f"the disk of {folder} is full{need}: make room, or set TORCHCHAT_MODELDIR to another folder."
        else:
            advice = f"can't write {folder}: {error.strerror}. Set TORCHCHAT_MODELDIR to a folder that is yours."
        raise DownloadError(advice) from error
