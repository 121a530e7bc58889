"""From options to a running Service."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from engine.engine import Engine
from engine.runner import Runner
from engine.scheduler import Scheduler
from engine.types import DEFAULT_SAMPLING, LoadOptions, SamplingParams
from errors import SetupError
from models.build import build_model, free_memory, resolve_device, resolve_dtype
from models.cache import KVCache, Rounding
from models.checkpoints import Checkpoint, generation_defaults, open_checkpoint
from models.config import ModelConfig
from models.dialects import Dialect, load_dialect
from models.quantize import Quantization, parse_quantization
from models.stable import stable_attention, stable_rows
from models.tokenizers import Tokenizer, load_tokenizer
from models.transformer import Transformer

VERSION = "0.1.0"
ROWS = 8
CONTEXT = 4096  # positions per row unless the model has fewer or --max-seq-length says otherwise

logger = logging.getLogger("torchchat")


class Service:
    """A model and what goes with it. `engine`, `tokenizer`, `dialect` and `info` exist once it is loaded."""

    engine: Engine
    tokenizer: Tokenizer
    dialect: Dialect
    info: Mapping[str, str]  # for /metrics

    def __init__(self, options: LoadOptions, path: Path, flags: SamplingParams) -> None:
        self.options, self.path, self.flags = options, path, flags
        self.model_id = options.model
        self.defaults = flags.over(DEFAULT_SAMPLING)
        self.load_seconds = 0.0  # compiling included
        self.compile_seconds = 0.0

    def load(self) -> None:
        """Read the checkpoint and start the engine. Raises TorchchatError."""
        started = time.perf_counter()
        self._load()
        self.load_seconds = time.perf_counter() - started

    def _load(self) -> None:
        options = self.options
        checkpoint = open_checkpoint(self.path)
        self.tokenizer = load_tokenizer(checkpoint, options.tokenizer)
        self.dialect = load_dialect(checkpoint, self.tokenizer, options.chat_template)
        self.defaults = self.flags.over(SamplingParams(**generation_defaults(checkpoint)).over(DEFAULT_SAMPLING))
        placed = _place(options)
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        context = _context_length(checkpoint.config, options)
        model = _build(checkpoint, placed, context)
        runner = _runner(model, placed, context, options)
        self._warm_up(runner)
        self.info = {
            "version": VERSION,
            "model": self.model_id,
            "device": placed.device.type,
            "dtype": str(placed.dtype).removeprefix("torch."),
            "quantize": placed.quantization.linear or "none",
        }
        scheduler = Scheduler(runner.cache.rows, reuse=options.prefix_cache)
        self.engine = Engine(
            runner,
            scheduler,
            context_length=context,
            vocab_size=checkpoint.config.vocab_size,
            eos_ids=self.tokenizer.stop_ids,
            max_queue=options.max_queue,
        ).start()

    def _warm_up(self, runner: Runner) -> None:
        """The first run, which is the one that compiles."""
        started = time.perf_counter()
        runner.warm_up()
        if self.options.compile is not None:
            self.compile_seconds = time.perf_counter() - started
        # Sizes were chosen for eager code: see that what runs keeps the promise.
        wanted = self.options.deterministic
        if wanted is False or not (wanted or runner.compiled) or runner.is_stable():
            return
        if wanted:
            raise SetupError("--deterministic: compiled code is not bitwise stable here; leave out --compile.")
        logger.warning("--compile: compiled code is not bitwise stable here: an answer may depend on its company")

    def close(self) -> None:
        """Cancel what runs and end the engine."""
        if hasattr(self, "engine"):
            self.engine.stop()


def load(options: LoadOptions, path: Path, flags: SamplingParams) -> Service:
    """A Service that is ready. `flags`: sampling defaults from the command line."""
    service = Service(options, path, flags)
    service.load()
    return service


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and how the numbers are kept."""

    device: torch.device
    dtype: torch.dtype
    quantization: Quantization


def _place(options: LoadOptions) -> Placement:
    """What the options say, torchchat's JSON filling in what they leave at auto."""
    quantization = parse_quantization(options.quantize)
    device_name = options.device if options.device != "auto" else quantization.device or "auto"
    device = resolve_device(device_name)
    dtype_name = options.dtype if options.dtype != "auto" else quantization.dtype or "auto"
    return Placement(device, resolve_dtype(dtype_name, device), quantization)


def _context_length(config: ModelConfig, options: LoadOptions) -> int:
    asked = options.max_seq_length
    if asked is not None and asked > config.context_length:
        raise SetupError(
            f"--max-seq-length {asked} is more than this model's context of {config.context_length} tokens.",
            param="max_seq_length",
        )
    return min(config.context_length, CONTEXT) if asked is None else asked


def _build(checkpoint: Checkpoint, placed: Placement, context: int) -> Transformer:
    with tqdm(total=len(checkpoint.tensors), desc="loading", unit="tensor", leave=False, disable=None) as bar:
        return build_model(
            checkpoint,
            dtype=placed.dtype,
            device=placed.device,
            quantization=placed.quantization,
            context_length=context,
            progress=bar.update,
        )


def _runner(model: Transformer, placed: Placement, context: int, options: LoadOptions) -> Runner:
    rounding, multiple = _determinism(model, placed, options)
    rows = _rows(model.config, context, placed, options)
    cache = KVCache(model.config, rows, context, dtype=placed.dtype, device=placed.device, rounding=rounding)
    return Runner(model, cache, row_multiple=multiple, compile=options.compile)


def _determinism(model: Transformer, placed: Placement, options: LoadOptions) -> tuple[Rounding, int]:
    """The sizes to round to so that a request's bits don't depend on its company; none with --no-deterministic.

    Left unsaid, it is on where it is to be had on the CPU, since it costs next to nothing there.
    """
    if options.deterministic is False or (options.deterministic is None and placed.device.type != "cpu"):
        return Rounding(), 1
    with torch.inference_mode():
        rounding = stable_attention(model.config, placed.dtype) if placed.device.type == "cpu" else None
        multiple = stable_rows(model, placed.dtype) if rounding is not None else None
    if rounding is not None and multiple is not None:
        return rounding, multiple
    if options.deterministic:
        kind = f"{placed.dtype} on {placed.device.type}".removeprefix("torch.")
        raise SetupError(
            f"--deterministic: no stable sizes for {kind}; use --dtype float32 on the CPU, or leave it out."
        )
    return Rounding(), 1


def _rows(config: ModelConfig, context: int, placed: Placement, options: LoadOptions) -> int:
    """--max-batch, or 8, or as many as fit into half of the free memory, which is then said."""
    if options.max_batch is not None:
        return options.max_batch
    size = KVCache.bytes_per_row(config, context, placed.dtype)
    fitting = max(1, int(free_memory(placed.device) / 2 // size))
    if fitting < ROWS:
        logger.warning("memory for %d rows of %d tokens; --max-seq-length makes rows smaller", fitting, context)
    return min(ROWS, fitting)
