"""One file over HTTP, continued where the connection was cut."""

from __future__ import annotations

import http.client
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tqdm import tqdm

from errors import DownloadError
from models.channels import BLOCK, BY_HAND, TIMEOUT

MAX_STALLS = 3  # connections in a row that bring nothing new
CUT = (http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError)


def transfer(url: str, part: Path, *, size: int | None = None, progress: bool = False) -> None:
    """Fetch `url` into `part`, going on from the bytes it already has, until the server has sent all of it.

    `size`, where known, is the whole file's. The caller checks the hash. Raises DownloadError, and OSError of the disk.
    """
    stalls = 0
    with tqdm(total=size, desc=part.stem, unit="B", unit_scale=True, disable=not progress) as bar:
        while stalls < MAX_STALLS:
            before = _size(part)
            if size is not None and before == size:
                return
            try:
                if _request(url, part, before, bar):
                    return
            except urllib.error.HTTPError as error:
                with error:
                    if error.code != 416:
                        raise _refused(url, error) from error
                part.unlink(missing_ok=True)  # what we have is longer than what there is
            except urllib.error.URLError as error:
                raise _unreachable(url, error.reason) from error
            except CUT:
                pass  # go on from what has arrived
            stalls = 0 if _size(part) > before else stalls + 1
    raise _unreachable(url, f"the connection was cut {MAX_STALLS} times")


def _request(url: str, part: Path, have: int, bar: tqdm[Any]) -> bool:
    """One request for the bytes from `have` on; whether it brought the rest."""
    headers = {"User-Agent": "torchchat", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT) as response:
        resumed = response.status == 206
        if resumed and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            part.unlink()  # not the piece we asked for: start over
            return False
        length = response.headers.get("Content-Length")
        got, bar.n = 0, have if resumed else 0
        with part.open("ab" if resumed else "wb") as file:
            while block := response.read(BLOCK):
                file.write(block)
                got += len(block)
                bar.update(len(block))
    return length is None or got == int(length)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _refused(url: str, error: urllib.error.HTTPError) -> DownloadError:
    if error.code in (401, 403):
        return DownloadError(f"{url} refused the download ({error.code}); {BY_HAND}.")
    if error.code in (404, 410):
        return DownloadError(f"{url} no longer exists ({error.code}); {BY_HAND}.")
    return DownloadError(f"{url} answered {error.code} {error.reason}; try again later, or {BY_HAND}.")


def _unreachable(url: str, reason: object) -> DownloadError:
    return DownloadError(f"can't fetch {url}: {reason}. Check the network and try again, or {BY_HAND}.")
