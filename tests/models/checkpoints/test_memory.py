"""Opening costs nothing, reading maps, release gives back (as Linux tells it; skipped elsewhere)."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from models.checkpoints import open_checkpoint
from models.config import ModelConfig
from tests import tiny

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc")

MIB = 2**20
WRITERS = {
    "llama2c": lambda folder, c, t: tiny.write_llama2c(folder / "m", c, t, version=1),
    "int8": lambda folder, c, t: tiny.write_llama2c(folder / "m", c, t, version=2),
    "pt": lambda folder, c, t: tiny.write_pt(folder / "m", c, t),
    "hf": lambda folder, c, t: tiny.write_hf(folder, c, t) / "model.safetensors",
    "gguf": lambda folder, c, t: tiny.write_gguf(folder / "m", c, t),
    "q8_0": lambda folder, c, t: tiny.write_gguf(folder / "m", c, t, quant="Q8_0"),
}
# anonymous memory (in bytes): at the start, and the most it ever was while each tensor was read, used and released
MEASURE = """
import sys, threading
from pathlib import Path
import torch, gguf
from models.checkpoints import open_checkpoint

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

torch.set_num_threads(1)
torch.ones(300, 300) @ torch.ones(300, 300)
for stored in open_checkpoint(Path(sys.argv[2])).tensors.values():  # whatever is imported or set up at first use
    stored.read().sum()
start = most = anonymous()
done = threading.Event()

def watch():
    global most
    while not done.wait(0.001):
        most = max(most, anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
checkpoint = open_checkpoint(Path(sys.argv[1]))
for stored in checkpoint.tensors.values():
    value = stored.read()
    value.sum()
    del value
    stored.release()
done.set()
watcher.join()
print(max(most, anonymous()) - start)
"""


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return tiny.tiny_config(dim=512, n_heads=8, head_dim=64, hidden_dim=2048, vocab_size=16384)


@pytest.fixture(scope="module")
def tensors(config: ModelConfig) -> tiny.Tensors:
    return tiny.random_tensors(config)


def resident_of(path: Path) -> int:
    """Bytes of the file's mappings that are in memory."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.parametrize("writer", ["llama2c", "pt", "hf", "gguf"])
def test_views_come_and_go(writer: str, config: ModelConfig, tensors: tiny.Tensors, tmp_path: Path) -> None:
    path = WRITERS[writer](tmp_path, config, tensors)
    checkpoint = open_checkpoint(path)
    assert resident_of(path) < MIB
    name = "tok_embeddings.weight"
    stored = checkpoint.tensors[name]
    total = stored.read().sum()
    assert resident_of(path) >= tensors[name].nbytes
    stored.release()
    assert resident_of(path) < MIB
    assert stored.read().sum() == total  # and it can be read again
    del stored, checkpoint
    gc.collect()
    assert resident_of(path) == 0


@pytest.mark.slow
@pytest.mark.parametrize("writer", WRITERS)
def test_peak_memory(writer: str, config: ModelConfig, tensors: tiny.Tensors, tmp_path: Path) -> None:
    """Reading tensor by tensor holds one float32 tensor where it must be made, next to nothing where it is a view."""
    (tmp_path / "large").mkdir()
    (tmp_path / "small").mkdir()
    path = WRITERS[writer](tmp_path / "large", config, tensors)
    small = tiny.tiny_config()
    warm = WRITERS[writer](tmp_path / "small", small, tiny.random_tensors(small))
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path), str(warm)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    largest = max(tensor.nbytes for tensor in tensors.values())
    assert largest == 32 * MIB
    allowed = 9 * MIB + (largest if writer in ("int8", "q8_0") else 0)
    assert int(result.stdout) < allowed


def test_a_tensor_is_a_view_of_the_file(config: ModelConfig, tensors: tiny.Tensors, tmp_path: Path) -> None:
    stored = open_checkpoint(tiny.write_hf(tmp_path, config, tensors)).tensors["norm.weight"]
    assert stored.read().data_ptr() == stored.read().data_ptr()
    assert stored.read().dtype == torch.float32
