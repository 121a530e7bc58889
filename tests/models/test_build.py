"""Building a model: how much memory it takes, and what the command line may not ask for."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import generate
from engine.types import LoadOptions
from errors import SetupError
from models import build
from models.cache import KVCache
from models.checkpoints import open_checkpoint
from models.config import ModelConfig
from models.quantize import PackedLinear
from tests import tiny

MIB = 2**20
Writer = Callable[[Path, ModelConfig, tiny.Tensors], Path]
WRITERS: dict[str, Writer] = {
    "llama2c": lambda folder, c, t: tiny.write_llama2c(folder / "m", c, t, version=1),
    "llama2c int8": lambda folder, c, t: tiny.write_llama2c(folder / "m", c, t, version=2),
    "pt": lambda folder, c, t: tiny.write_pt(folder / "m", c, t),
    "fused pth": lambda folder, c, t: tiny.write_torchchat(folder, c, t),
    "meta, 2 shards": lambda folder, c, t: tiny.write_meta(folder, c, t, shards=2),
    "safetensors": lambda folder, c, t: tiny.write_hf(folder, c, t),
    "safetensors bfloat16": lambda folder, c, t: tiny.write_hf(folder, c, t, dtype=torch.bfloat16),
    "gguf": lambda folder, c, t: tiny.write_gguf(folder / "m.gguf", c, t),
    "gguf Q8_0": lambda folder, c, t: tiny.write_gguf(folder / "m.gguf", c, t, quant="Q8_0"),
}
# Bytes of the loaded model, and the most memory (anonymous and mapped) that loading took beyond what was there.
MEASURE = """
import gc, sys
from pathlib import Path
import torch, gguf
from models.build import build_model
from models.checkpoints import open_checkpoint
from models.quantize import parse_quantization

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024

def load(path):
    return build_model(open_checkpoint(Path(path)), dtype=getattr(torch, sys.argv[3]), quantization=quantization)

torch.set_num_threads(1)
quantization = parse_quantization(sys.argv[4] if len(sys.argv) > 4 else None)
load(sys.argv[2])  # whatever is imported or set up at first use
gc.collect()
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak is now
model = load(sys.argv[1])
peak = status("VmHWM") - before
print(sum(t.numel() * t.element_size() for t in (*model.buffers(), *model.parameters())), peak)
"""

linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")


@pytest.fixture(scope="module")
def large() -> tuple[ModelConfig, tiny.Tensors]:
    """105 MiB in float32, whose largest tensors are 16 MiB."""
    config = tiny.tiny_config(dim=512, n_heads=8, head_dim=64, hidden_dim=2048, vocab_size=8192, n_layers=5)
    return config, tiny.random_tensors(config)


def measure(write: Writer, large: tuple[ModelConfig, tiny.Tensors], folder: Path, *arguments: str) -> tuple[int, int]:
    """(loaded size, peak) of loading the large model in a process of its own."""
    for name in ("large", "small"):
        (folder / name).mkdir()
    path = write(folder / "large", *large)
    small = tiny.tiny_config()
    warm = write(folder / "small", small, tiny.random_tensors(small))
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path), str(warm), *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    loaded, peak = map(int, result.stdout.split())
    print(f"loaded {loaded / MIB:.0f} MiB, peak {peak / MIB:.0f} MiB: {peak / loaded:.2f}")
    return loaded, peak


@linux
@pytest.mark.slow
@pytest.mark.parametrize("writer", WRITERS)
def test_peak_memory(writer: str, large: tuple[ModelConfig, tiny.Tensors], tmp_path: Path) -> None:
    loaded, peak = measure(WRITERS[writer], large, tmp_path, "float32")
    assert loaded >= sum(tensor.nbytes for tensor in large[1].values())
    assert peak < 1.3 * loaded


@linux
@pytest.mark.slow
def test_peak_memory_in_bfloat16(large: tuple[ModelConfig, tiny.Tensors], tmp_path: Path) -> None:
    loaded, peak = measure(WRITERS["safetensors"], large, tmp_path, "bfloat16")
    assert peak < 1.3 * loaded < 0.7 * sum(tensor.nbytes for tensor in large[1].values())


@linux
@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("writer", ["safetensors", "gguf Q8_0"])
def test_peak_memory_while_quantizing(
    writer: str, quantize: str, large: tuple[ModelConfig, tiny.Tensors], tmp_path: Path
) -> None:
    """Never the whole float model: what is quantized so far, one float matrix, and what is made of some of its rows."""
    text = f'{{"linear:{quantize}": {{}}, "embedding": {{}}}}'
    loaded, peak = measure(WRITERS[writer], large, tmp_path, "float32", text)
    largest = max(tensor.nbytes for tensor in large[1].values())
    assert loaded < 0.3 * sum(tensor.nbytes for tensor in large[1].values())
    assert peak < loaded + 2 * largest + 12 * MIB  # measured: 26 to 40 MiB above, largest is 16


def test_the_model_owns_its_memory(tmp_path: Path) -> None:
    """The file may change or vanish once it is read."""
    config = tiny.tiny_config(tied=True)
    tensors = tiny.random_tensors(config)
    folder = tiny.write_hf(tmp_path, config, tensors)
    model = build.build_model(open_checkpoint(folder), dtype=torch.float32)
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(bytes((folder / "model.safetensors").stat().st_size))
    assert torch.equal(model.tok_embeddings.weight, tensors["tok_embeddings.weight"])
    assert torch.equal(model.layers[1].ffn_norm.weight, tensors["layers.1.ffn_norm.weight"])
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))


def test_progress_counts_every_tensor(tmp_path: Path) -> None:
    for tied in (False, True):
        config = tiny.tiny_config(tied=tied)
        checkpoint = open_checkpoint(tiny.write_hf(tmp_path / str(tied), config, tiny.random_tensors(config)))
        steps: list[int] = []
        build.build_model(checkpoint, dtype=torch.float32, progress=steps.append)
        assert sum(steps) == len(checkpoint.tensors)


def test_a_tied_output_shares_the_table(tmp_path: Path) -> None:
    """Where neither is packed nor quantized (float16 is not packed)."""
    config = tiny.tiny_config(tied=True)
    checkpoint = open_checkpoint(tiny.write_hf(tmp_path, config, tiny.random_tensors(config)))
    model = build.build_model(checkpoint, dtype=torch.float16)
    assert model.output.weight.data_ptr() == model.tok_embeddings.weight.data_ptr()


def test_context_length_sets_the_angles(tmp_path: Path) -> None:
    config = tiny.tiny_config()
    checkpoint = open_checkpoint(tiny.write_hf(tmp_path, config, tiny.random_tensors(config)))
    model = build.build_model(checkpoint, dtype=torch.bfloat16, context_length=17)
    assert model.cos.shape == model.sin.shape == (17, 16)
    assert model.cos.dtype == torch.float32  # positions need more than bfloat16's 8 bits
    assert build.build_model(checkpoint, dtype=torch.float32).cos.shape == (128, 16)


def test_packed_where_it_can_be() -> None:
    weight = torch.zeros(8, 8)
    if PackedLinear.available(weight):
        assert torch.equal(PackedLinear(weight, None)(torch.ones(1, 8)), torch.zeros(1, 8))
    assert not PackedLinear.available(weight.half())
    assert not PackedLinear.available(weight.to("meta"))


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.resolve_device("cpu").type == "cpu"
    with pytest.raises(SetupError, match="--device must be auto, cpu, cuda or mps, got 'gpu'") as caught:
        build.resolve_device("gpu")
    assert caught.value.param == "device"
    for cuda, mps, best in ((True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda mps=mps: mps)
        assert build.resolve_device("auto").type == best
    for name in ("cuda", "mps"):
        with pytest.raises(SetupError, match=f"--device {name}: this PyTorch sees no {name} device; use --device cpu"):
            build.resolve_device(name)


def test_dtypes() -> None:
    cpu = torch.device("cpu")
    assert build.resolve_dtype("auto", cpu) == torch.float32
    assert build.resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert build.resolve_dtype("bf16", cpu) == build.resolve_dtype("bfloat16", cpu) == torch.bfloat16
    assert build.resolve_dtype("fp16", cpu) == build.resolve_dtype("float16", cpu) == torch.float16
    for name in ("float64", "int8", "BF16", ""):
        with pytest.raises(SetupError, match=f"--dtype must be auto or one of float32, .* got '{name}'") as caught:
            build.resolve_dtype(name, cpu)
        assert caught.value.param == "dtype"


def test_a_dtype_that_this_machine_cannot_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*tensors: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'\nand a second line")

    monkeypatch.setattr(build.F, "linear", missing)
    with pytest.raises(SetupError, match=r"--dtype float16: not on this cpu .*not implemented for 'Half'.*float32"):
        build.resolve_dtype("float16", torch.device("cpu"))
    assert build.resolve_dtype("float32", torch.device("cpu")) == torch.float32


def test_no_memory_for_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny.tiny_config()
    checkpoint = open_checkpoint(tiny.write_gguf(tmp_path / "m.gguf", config, tiny.random_tensors(config)))
    real = torch.empty

    def empty(*shape: object, **options: object) -> torch.Tensor:
        if options.get("device") is not None:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 98304 bytes.\nmore")
        return real(*shape, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(SetupError, match=r"m\.gguf: no memory for layers\.0\.feed_forward\.w13\.weight on") as caught:
        build.build_model(checkpoint, dtype=torch.float32)
    assert "\n" not in caught.value.message


def test_max_seq_length_above_the_models() -> None:
    config = tiny.tiny_config()
    assert generate._context_length(config, LoadOptions(model="m", max_seq_length=128)) == 128
    with pytest.raises(SetupError, match="--max-seq-length 129 is more than this model's context of 128"):
        generate._context_length(config, LoadOptions(model="m", max_seq_length=129))


def test_rows_follow_the_memory(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """8, or as many as fit into half of what is free, at least one; --max-batch is taken at its word."""
    config = tiny.tiny_config()
    placed = generate._place(LoadOptions(model="m", device="cpu"))
    size = KVCache.bytes_per_row(config, 128, placed.dtype)
    assert size == 2 * 2 * 2 * 128 * 16 * 4

    def rows(free: int, max_batch: int | None = None) -> int:
        monkeypatch.setattr(generate, "free_memory", lambda device: free)
        return generate._rows(config, 128, placed, LoadOptions(model="m", max_batch=max_batch))

    with caplog.at_level(logging.WARNING):
        assert rows(16 * size) == rows(100 * size) == 8
        assert rows(0, max_batch=3) == 3
        assert not caplog.records
        assert rows(15 * size) == 7
        assert "memory for 7 rows of 128 tokens" in caplog.text
        assert rows(0) == 1


def test_free_memory_is_some() -> None:
    assert MIB < build.free_memory(torch.device("cpu")) < 2**50
