"""Dequantisation against the gguf package, for every type it knows, and on the real default model."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from errors import CheckpointError
from models.checkpoints import gguf as reader
from models.checkpoints import open_checkpoint
from models.checkpoints.gguf_header import read_header
from models.checkpoints.storage import MappedFile

ROWS, WIDTH = 37, 512  # rows that the slices of reading don't divide


def dequantisable(kind: GGMLQuantizationType) -> bool:
    block, nbytes = GGML_QUANT_SIZES[kind]
    try:
        gguf.dequantize(np.zeros((1, WIDTH // block * nbytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def write_blocks(path: Path, kind: GGMLQuantizationType, blocks: np.ndarray) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("blocks", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantised(kind: GGMLQuantizationType) -> np.ndarray:
    """Any bytes are valid blocks."""
    block, nbytes = GGML_QUANT_SIZES[kind]
    return np.random.default_rng(3).integers(0, 256, (ROWS, WIDTH // block * nbytes), dtype=np.uint8)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random bytes make infinite scales
@pytest.mark.parametrize("kind", [kind for kind in GGMLQuantizationType if dequantisable(kind)], ids=lambda k: k.name)
def test_every_type_the_package_dequantises(
    kind: GGMLQuantizationType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_SLICE", 5 * WIDTH)
    if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        floats = np.random.default_rng(3).standard_normal((ROWS, WIDTH))
        blocks = floats.astype(np.float32 if kind == GGMLQuantizationType.F32 else np.float16)
    else:
        blocks = quantised(kind)
    file = MappedFile(write_blocks(tmp_path / "blocks", kind, blocks))
    _, (info,) = read_header(file)
    assert info.shape == (ROWS, WIDTH)
    found = reader._stored(file, info).read().float()
    expected = torch.from_numpy(gguf.dequantize(blocks, kind).reshape(ROWS, WIDTH).copy())
    assert torch.equal(found.nan_to_num(nan=1234.5), expected.nan_to_num(nan=1234.5))


def test_a_type_that_cannot_be_dequantised(tmp_path: Path) -> None:
    kind = GGMLQuantizationType.Q8_1
    assert not dequantisable(kind)
    file = MappedFile(write_blocks(tmp_path / "blocks", kind, quantised(kind)))
    _, (info,) = read_header(file)
    with pytest.raises(CheckpointError, match="tensor blocks is Q8_1, which the gguf package can't dequantise"):
        reader._stored(file, info).read()


@pytest.mark.slow
def test_the_real_model(smollm2_path: Path) -> None:
    checkpoint = open_checkpoint(smollm2_path)
    assert checkpoint.precision == "Q4_1" and checkpoint.config.tied
    theirs = gguf.GGUFReader(smollm2_path)
    tensors = {tensor.name: tensor for tensor in theirs.tensors}
    for ours, name in {
        "tok_embeddings.weight": "token_embd.weight",
        "layers.0.attention.wq.weight": "blk.0.attn_q.weight",
        "layers.29.feed_forward.w2.weight": "blk.29.ffn_down.weight",
        "layers.13.ffn_norm.weight": "blk.13.ffn_norm.weight",
        "norm.weight": "output_norm.weight",
    }.items():
        tensor = tensors[name]
        expected = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        assert torch.equal(checkpoint.tensors[ours].read(), expected), ours
        checkpoint.tensors[ours].release()
    fields = {key: field for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert set(checkpoint.metadata) == set(fields)
    for key, field in fields.items():
        assert checkpoint.metadata[key] == field.contents(), key
