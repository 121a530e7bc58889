"""The command line: generate, chat, server, and the models on disk.

Each group of shared options is a decorator that hands the command one dataclass. Only light modules are imported here,
so that --help answers at once; torch comes in inside the commands, after its threads have been bound.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from engine.types import LoadOptions, SamplingParams
from errors import RequestError, TorchchatError
from models import registry

Command = Callable[..., Any]
Declaration = tuple[str, Callable[[Command], Command]]  # the name in the code, and click's decorator for it

FILE = click.Path(exists=True, path_type=Path)
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # torchchat's names: torch's
MORE_FLAGS = {"max_tokens": ("--max-tokens",), "min_tokens": ("--min-new-tokens",)}  # the names other servers use
DEFAULT_ROWS = 8
SPARE_THREADS = 16  # HTTP threads besides one per row and waiting request: for /health, /metrics and refusals
CHAT_SAMPLING = {"temperature": 0.8, "top_k": 200}  # torchchat's own, where a person reads the answer


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where and how to listen."""

    host: str
    port: int
    grace: float  # seconds that running answers get to finish after SIGTERM or Ctrl-C
    strict_model: bool  # a request that names another model is a 404


class UserError(click.ClickException):
    """A TorchchatError as the terminal shows it."""

    def show(self, file: Any = None) -> None:
        click.echo(f"error: {self.message}", file=sys.stderr if file is None else file)


class Cli(click.Group):
    """The one place where errors become lines and exit codes: 1 for what went wrong, 2 for usage, 130 for Ctrl-C."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except TorchchatError as error:
            raise UserError(error.message) from error
        except KeyboardInterrupt:
            ctx.exit(130)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order they are written here


class ModelCommand(click.Command):
    """A command with --compile: bare it means "default", and it never swallows the word after it, often MODEL."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        args = ["--compile=default" if i < end and arg == "--compile" else arg for i, arg in enumerate(args)]
        return super().parse_args(ctx, args)


# Groups of options


def group(keyword: str, build: Command, declarations: Sequence[Declaration]) -> Callable[[Command], Command]:
    """A decorator: adds the options, and passes `build(**their values)` to the command as `keyword`."""

    def decorate(command: Command) -> Command:
        def run(**values: Any) -> Any:
            taken = {name: values.pop(name) for name, _ in declarations}
            return command(**{keyword: build(**taken)}, **values)

        wrapped: Command = functools.wraps(command)(run)
        for _, declare in reversed(declarations):
            wrapped = declare(wrapped)
        return wrapped

    return decorate


def option(name: str, *flags: str, **arguments: Any) -> Declaration:
    """One option; its default comes from LoadOptions where that has a field of this name, and is shown."""
    field = next((f for f in dataclasses.fields(LoadOptions) if f.name == name), None)
    if field is not None:
        arguments.setdefault("default", field.default)
    arguments.setdefault("show_default", arguments.get("default") not in (None, ()))
    return name, click.option(name, *flags, **arguments)


def number(name: str, flag: str, low: int = 1, high: int | None = None, **arguments: Any) -> Declaration:
    """An option that takes a whole number between `low` and `high`."""
    return option(name, flag, type=click.IntRange(low, high), metavar="N", **arguments)


MODEL_OPTIONS: list[Declaration] = [
    ("model", click.argument("model")),
    option(
        "tokenizer", "--tokenizer", "--tokenizer-path", type=FILE, help="Tokenizer file, if not beside the weights."
    ),
    option("chat_template", "--chat-template", type=FILE, help="Jinja template to use instead of the model's own."),
    option(
        "dtype", "--dtype", type=click.Choice(["auto", *DTYPES.values(), *DTYPES]), help="Precision of the arithmetic."
    ),
    option(
        "device", "--device", type=click.Choice(["auto", "cpu", "cuda", "mps"]), help="auto: cuda, else mps, else cpu."
    ),
    option("quantize", "--quantize", metavar="TEXT|FILE", help="int8, int4, or torchchat's JSON (or a file of it)."),
    option("compile", "--compile", metavar="[=max]", type=click.Choice(["default", "max"]), help="Compile the model."),
    number("max_seq_length", "--max-seq-length", help="Context: prompt and answer. [default: up to 4096]"),
    number("max_batch", "--max-batch", help="Answers made at once. [default: 8, fewer if memory is short]"),
    number("max_queue", "--max-queue", low=0, help="Requests that may wait for their turn."),
    number("threads", "--threads", help="CPU threads. [default: physical cores]"),
    option(
        "deterministic",
        "--deterministic/--no-deterministic",
        help="Same answer in any company, to the bit. [default: where it costs next to nothing]",
    ),
    option("prefix_cache", "--prefix-cache/--no-prefix-cache", help="Reuse what earlier prompts computed."),
]


def load_options(dtype: str, **values: Any) -> LoadOptions:
    return LoadOptions(dtype=DTYPES.get(dtype, dtype), **values)


model_options = group("options", load_options, MODEL_OPTIONS)


def sampling_options(*extra: str, **defaults: Any) -> Callable[[Command], Command]:
    """The fields of SamplingParams as options, delivered as `params`; absent ones are None but for `defaults`.

    `extra` names fields that only some commands offer.
    """
    left_out = {"stop_ids", "logprobs"} - set(extra)
    fields = [f for f in dataclasses.fields(SamplingParams) if f.name not in left_out]
    return group("params", build_params, [sampling_option(f, defaults.get(f.name)) for f in fields])


def sampling_option(field: dataclasses.Field[Any], default: Any) -> Declaration:
    """The option of one SamplingParams field, from its type and metadata."""
    flag = field.metadata["flag"]
    flags = [f"--{field.name.replace('_', '-')}" if flag is None else flag, *MORE_FLAGS.get(field.name, ())]
    kind, low, high = str(field.type).removesuffix(" | None"), field.metadata["low"], field.metadata["high"]
    arguments: dict[str, Any] = {"help": field.metadata["help"], "default": default}
    if field.name == "seed":
        arguments |= {"type": int, "metavar": "N"}  # its range is that of 64 bits, which nobody needs to read
    elif kind == "float":
        arguments |= {"type": click.FloatRange(low, high), "metavar": "X"}
    elif kind == "int":
        arguments |= {"type": click.IntRange(low, high), "metavar": "N"}
    elif kind == "bool":
        arguments |= {"is_flag": True, "flag_value": True, "type": bool}
    elif kind.startswith("Mapping"):
        arguments |= {"metavar": "ID=X", "callback": read_biases, "multiple": True, "default": ()}
    else:
        flags, arguments = ["--stop-id"], arguments | {"type": int, "metavar": "N", "multiple": True, "default": ()}
    return option(field.name, *flags, **arguments)


def read_biases(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> dict[int, float] | None:
    """ID=X, ... as a mapping; None when not given."""
    biases = {}
    for text in texts:
        token, _, bias = text.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise click.BadParameter(f"{text!r} is not a token id and a number, as in 42=-1.5") from None
    return biases if texts else None


def build_params(stop_ids: Sequence[int] = (), **values: Any) -> SamplingParams:
    """SamplingParams from the options' values; what was not given stays None."""
    params = SamplingParams(**values | ({"stop_ids": frozenset(stop_ids)} if stop_ids else {}))
    try:
        params.validate()
    except RequestError as error:
        raise click.UsageError(error.message) from error
    return params


SERVER_OPTIONS = [
    option("host", "--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 for the whole network."),
    number("port", "--port", low=0, high=65535, default=5000, help="Port to listen on; 0 for a free one."),
    option(
        "grace", "--grace", type=click.FloatRange(0), metavar="X", default=30.0, help="Seconds to finish on shutdown."
    ),
    option(
        "strict_model", "--strict-model", is_flag=True, default=False, help="Refuse requests that name another model."
    ),
]
server_options = group("listen", ServerOptions, SERVER_OPTIONS)


# Before torch


def prepare(options: LoadOptions) -> tuple[LoadOptions, Path]:
    """Fetch the model if it is missing and bind the threads: what comes before torch. The options get its name."""
    target = registry.resolve(options.model)
    if registry.where(options.model) is None:
        click.echo(f"fetching {describe(target.name, target.entry)} ...", err=True)
    path = registry.download(options.model)
    bind_threads(options.threads)
    return dataclasses.replace(options, model=target.name), path


def bind_threads(threads: int | None) -> None:
    """Tie OpenMP's threads to cores before torch starts them: left alone, two often share one core. The user's own
    OMP_ variables win, but for the number of threads that --threads gives."""
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    for name, value in (("NUM_THREADS", str(physical_cores())), ("PROC_BIND", "close"), ("PLACES", "cores")):
        os.environ.setdefault(f"OMP_{name}", value)


def physical_cores() -> int:
    """Cores that this process may use: the hyperthreads of one count once, and a container's CPU quota counts."""
    if not hasattr(os, "sched_getaffinity"):
        count = os.cpu_count()
        return 1 if count is None else count
    cpus = os.sched_getaffinity(0)
    try:
        topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
        cores = len({Path(topology.format(cpu)).read_text() for cpu in cpus})
    except OSError:
        cores = len(cpus)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):
        return cores


# Commands


@click.group(cls=Cli, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def cli() -> None:
    """Run language models on this machine: in the terminal, or as a server that speaks OpenAI's protocol.

    MODEL is a name from `list`, a file, a folder, or a hub repository (org/name); it is fetched when missing.
    """


@cli.command("generate", cls=ModelCommand)
@model_options
@click.option(
    "--prompt", "prompts", multiple=True, help="Text to answer or continue; - for standard input. Repeatable."
)
@click.option("--prompt-file", "files", multiple=True, type=FILE, help="The same from a file. Repeatable.")
@click.option(
    "--num-samples", type=click.IntRange(min=1), metavar="N", default=1, show_default=True, help="Answers per prompt."
)
@click.option("--system", help="What the model is told before the prompt.")
@click.option("--raw", is_flag=True, help="No chat template: continue the prompt as it is, control tokens included.")
@click.option("--stop", multiple=True, help="Text that ends the answer, itself left out. Repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per answer instead of its text.")
@sampling_options("logprobs", "stop_ids", **CHAT_SAMPLING)
def generate_command(
    options: LoadOptions,
    params: SamplingParams,
    prompts: tuple[str, ...],
    files: tuple[Path, ...],
    num_samples: int,
    **how: Any,
) -> None:
    """Print MODEL's answer to a prompt, as it is made.

    A model without a chat template continues the prompt; only what it adds is printed. Measurements go to stderr.
    """
    texts = [read_text(None) if text == "-" else text for text in prompts] + [read_text(file) for file in files]
    if not texts:
        raise click.UsageError(
            "there is nothing to answer: give --prompt TEXT (- for standard input) or --prompt-file."
        )
    if how["raw"] and how["system"] is not None:
        raise click.UsageError("--system is part of the chat template, which --raw leaves out: use one of them.")
    if params.logprobs is not None and not how["as_json"]:
        raise click.UsageError("--logprobs are printed with --json only.")
    options, path = prepare(options)
    import generate
    import terminal

    with closing(generate.load(options, path, SamplingParams())) as service:
        terminal.complete(service, texts, params, num_samples=num_samples, **how)


@cli.command("chat", cls=ModelCommand)
@model_options
@click.option("--system", help="What the model is told before the conversation.")
@click.option("--stop", multiple=True, help="Text that ends an answer, itself left out. Repeatable.")
@sampling_options("stop_ids", **CHAT_SAMPLING)
def chat_command(options: LoadOptions, params: SamplingParams, system: str | None, stop: tuple[str, ...]) -> None:
    """Talk with MODEL in the terminal. There, /help lists the commands and Ctrl-C stops an answer."""
    options, path = prepare(options)
    import generate
    import terminal

    with closing(generate.load(options, path, SamplingParams())) as service:
        terminal.chat(service, params, system=system, stop=stop)


@cli.command("server", cls=ModelCommand)
@model_options
@server_options
@sampling_options("stop_ids")
@click.pass_context
def server_command(ctx: click.Context, options: LoadOptions, listen: ServerOptions, params: SamplingParams) -> None:
    """Serve MODEL over HTTP. Sampling options are for requests that don't choose their own; by default the model's
    generation_config.json decides, then OpenAI's defaults."""
    if params.max_tokens == 0:
        raise click.UsageError("--max-new-tokens must be at least 1 on a server: 0 would leave every answer empty.")
    options, path = prepare(options)
    import server

    def load() -> Any:
        import generate  # brings torch in, which takes seconds: the port is open by then

        return generate.load(options, path, params)

    threads = (DEFAULT_ROWS if options.max_batch is None else options.max_batch) + options.max_queue + SPARE_THREADS
    ctx.exit(server.serve(options.model, load, threads=threads, **dataclasses.asdict(listen)))


@cli.command("list")
def list_command() -> None:
    """Show the models that can be fetched by name, and which are here."""
    entries = registry.list_models()
    width = max(len(entry.name) for entry in entries)
    for entry in entries:
        here = "here" if registry.where(entry.name) is not None else "gated" if entry.gated else ""
        aliases = [alias for alias in entry.aliases if "/" not in alias]
        also = f" (also {', '.join(aliases)})" if aliases else ""
        click.echo(f"{entry.name:{width}}  {size_text(entry.size):>8}  {here:5}  {entry.description}{also}".rstrip())


@cli.command("download")
@click.argument("model")
def download_command(model: str) -> None:
    """Fetch MODEL and print where it is."""
    click.echo(registry.download(model))


@cli.command("where")
@click.argument("model")
def where_command(model: str) -> None:
    """Print the path of MODEL's weights."""
    path = registry.where(model)
    if path is None:
        raise UserError(f"{model} is not on this machine: python torchchat.py download {model}")
    click.echo(path)


@cli.command("remove")
@click.argument("model")
def remove_command(model: str) -> None:
    """Delete a downloaded MODEL."""
    freed = registry.remove(model)
    click.echo(f"removed {model}, {size_text(freed)} freed", err=True)


def read_text(path: Path | None) -> str:
    """A file's text, standard input's for None, without the newline that ends it, as a shell's $(...) has it."""
    try:
        data = sys.stdin.buffer.read() if path is None else path.read_bytes()
        return data.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{'standard input' if path is None else path} can't be read as UTF-8 text: {error}") from error


def size_text(size: int | None) -> str:
    if size is None:
        return ""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def describe(name: str, entry: registry.Entry | None) -> str:
    size = "" if entry is None else size_text(entry.size)
    return f"{name} ({size})" if size else name


if __name__ == "__main__":
    cli()
