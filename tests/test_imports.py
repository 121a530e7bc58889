"""The arrows of the design: who may import whom, and what the command line may load before it needs it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"api", "benchmarks", "engine", "models"}
OURS = PACKAGES | {"errors", "generate", "server", "terminal", "torchchat"}
COMMANDS = ["generate", "chat", "server", "list", "download", "where", "remove"]
HEAVY = {"torch", "flask", "waitress", "transformers", "numpy", "pydantic", "huggingface_hub", "jinja2", "tokenizers"}

# What each room may import besides itself. A package's name allows all of it, "a.b" only that part.
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "models": {"errors"},
    "engine": {"errors", "models"},
    "engine.types": {"errors"},
    "api": {"errors", "engine.types", "models.dialects", "models.tokenizers"},
    "generate": {"errors", "engine", "models"},
    "terminal": {"errors", "engine", "models"},
    "server": {"errors", "api"},
    "torchchat": {"errors", "engine.types", "models.registry", "generate", "server", "terminal", "benchmarks"},
    "benchmarks": OURS,
}
# What a room names in annotations only: the Service, and for server also the types it is made of.
FOR_TYPES: dict[str, set[str]] = {
    "server": {"engine.types", "generate", "models.dialects", "models.tokenizers"},
    "terminal": {"generate"},
}
TOP_OF_TORCHCHAT = {"errors", "engine.types", "models", "models.registry"}
LIBRARIES = {  # which rooms may know a library at all
    "flask": {"server"},
    "waitress": {"server"},
    "prometheus_client": {"api", "server"},
    "click": {"torchchat", "benchmarks"},
    "torch": {"engine", "models", "generate", "benchmarks"},
}


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the product, by its dotted name."""
    for path in sorted(ROOT.glob("*.py")):
        yield path.stem, path
    for package in sorted(PACKAGES):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            yield name.removesuffix(".__init__"), path


def exists(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports(node: ast.AST, module: str, for_types: bool = False) -> Iterator[tuple[str, bool]]:
    """(module, whether only type checkers see it), at any depth. `from a import b` is a.b where that is a module."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, for_types) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{module}: relative import"
            base = "" if child.module is None else child.module
            for alias in child.names:
                whole = f"{base}.{alias.name}"
                yield (whole if base.split(".")[0] in OURS and exists(whole) else base), for_types
        else:
            yield from imports(child, module, for_types or is_type_checking(child))


def covers(allowed: set[str], name: str) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in allowed)


def room(module: str) -> str:
    return "engine.types" if module == "engine.types" else module.split(".")[0]


@pytest.mark.parametrize(("module", "path"), [pytest.param(*m, id=m[0]) for m in modules()])
def test_imports_follow_the_arrows(module: str, path: Path) -> None:
    here = room(module)
    assert here in ARROWS, f"{module} belongs to no room of the design"
    allowed = ARROWS[here] | ({here} if here != "engine.types" else set())
    for name, for_types in imports(ast.parse(path.read_text(encoding="utf-8")), module):
        if name.split(".")[0] in OURS:
            also = FOR_TYPES.get(here, set()) if for_types else set()
            assert covers(allowed | also, name), f"{module} must not import {name}"
        library = LIBRARIES.get(name.split(".")[0])
        assert library is None or here in library or for_types, f"{module} must not know {name}"


def test_the_checker_sees_every_kind_of_import() -> None:
    code = """
import torch
from models import registry
if TYPE_CHECKING:
    import flask
def f():
    from api import chat as c, nothing
"""
    assert list(imports(ast.parse(code), "x")) == [
        ("torch", False),
        ("models.registry", False),
        ("flask", True),
        ("api.chat" if exists("api.chat") else "api", False),
        ("api", False),
    ]


def test_the_top_of_the_command_line_is_light() -> None:
    tree = ast.parse((ROOT / "torchchat.py").read_text(encoding="utf-8"))
    top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    ours = {
        name for node in top for name, _ in imports(ast.Module([node], []), "torchchat") if name.split(".")[0] in OURS
    }
    assert ours <= TOP_OF_TORCHCHAT


def loaded(code: str) -> set[str]:
    """The top-level modules that are in memory after `code`, run by a fresh interpreter."""
    code = f"import sys\n{code}\nprint(*{{name.split('.')[0] for name in sys.modules}}, file=sys.__stderr__)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return set(run.stderr.split())


@pytest.mark.parametrize("module", ["torchchat", "engine.types", "models.registry", "models.dialects", "models.config"])
def test_light_modules_load_nothing_heavy(module: str) -> None:
    assert loaded(f"import {module}") & HEAVY == set()


@pytest.mark.parametrize("args", [["--help"], ["list"], *([command, "--help"] for command in COMMANDS)], ids=" ".join)
def test_help_and_list_load_nothing_heavy(args: list[str]) -> None:
    code = f"import torchchat\ntorchchat.cli({args!r}, standalone_mode=False)"
    assert loaded(code) & HEAVY == set()
