"""The import rules: data flows one way, from source to device, and so do imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import PATIENCE_S

ROOT = Path(__file__).resolve().parent.parent

# Commands whose bodies may import loaders and torch: they measure the loader on this machine.
MEASURING_COMMANDS = {"packer.cli.tune", "packer.cli.doctor", "packer.cli.bench"}

# What `import packer` and `packer --help` must not load: each costs time before the first word.
HEAVY = {"PIL", "h5py", "loaders", "pydicom", "ray", "tensorflow", "torch", "webdataset", "wids"}


@dataclass(frozen=True)
class Import:
    """One imported module, by its full name, and where it is imported."""

    module: str
    name: str
    line: int
    at_top: bool  # when the module itself is imported, not when a function of it runs

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.name}"

    def is_from(self, *packages: str) -> bool:
        return any(self.name == package or self.name.startswith(package + ".") for package in packages)


def modules(package: str) -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports_of(module: str, path: Path) -> Iterator[Import]:
    """Imports of a source file. `from a import b` counts as `a.b`, for b may be a module."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    yield from _imports_in(ast.parse(path.read_text("utf-8")), module, package, at_top=True)


def _imports_in(node: ast.AST, module: str, package: str, *, at_top: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(module, alias.name, child.lineno, at_top)
        elif isinstance(child, ast.ImportFrom):
            base = child.module or ""
            if child.level:
                above = package.split(".")[: len(package.split(".")) - child.level + 1]
                base = ".".join([*above, *filter(None, [child.module])])
            for alias in child.names:
                yield Import(module, f"{base}.{alias.name}", child.lineno, at_top)
        elif isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for statement in child.orelse:
                yield from _imports_in(statement, module, package, at_top=at_top)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports_in(child, module, package, at_top=at_top and not inside)


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    sources = [*modules("packer"), *modules("loaders")]
    found = [i for module, path in sources for i in imports_of(module, path)]
    assert any(i.module == "packer.packed" and i.name == "packer.index.Rows" for i in found)
    return found


def test_imports_are_found_wherever_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "from typing import TYPE_CHECKING\n"
        "import a.b\n"
        "try:\n    from c import d\nexcept ImportError:\n    pass\n"
        "if TYPE_CHECKING:\n    import hidden\n"
        "class K:\n    from . import e\n"
        "    def f(self):\n        from .g import h\n"
        "async def j():\n    import k\n"
        "from ..up import m\n"
    )
    found = {(i.name, i.at_top) for i in imports_of("p.q.module", path)}
    assert found == {
        ("typing.TYPE_CHECKING", True), ("a.b", True), ("c.d", True), ("p.q.e", True),
        ("p.q.g.h", False), ("k", False), ("p.up.m", True),
    }  # fmt: skip


def test_packer_imports_neither_torch_nor_loaders(imports: list[Import]) -> None:
    wrong = [
        str(i)
        for i in imports
        if i.module.startswith("packer")
        and i.is_from("torch", "torchvision", "loaders")
        and not (i.module in MEASURING_COMMANDS and not i.at_top)
    ]
    assert wrong == []


def test_sources_and_formats_do_not_know_each_other(imports: list[Import]) -> None:
    wrong = [
        str(i)
        for i in imports
        if (i.module.startswith("packer.sources") and i.is_from("packer.formats"))
        or (i.module.startswith("packer.formats") and i.is_from("packer.sources"))
    ]
    assert wrong == []


def test_nothing_imports_the_command_line(imports: list[Import]) -> None:
    wrong = [
        str(i)
        for i in imports
        if i.is_from("packer.cli") and not i.module.startswith("packer.cli") and i.module != "packer.__main__"
    ]
    assert wrong == []


def test_no_module_imports_in_a_circle(imports: list[Import]) -> None:
    names = {name for name, _ in [*modules("packer"), *modules("loaders")]}
    needs: dict[str, set[str]] = {name: set() for name in names}
    for i in imports:
        target = i.name if i.name in names else i.name.rpartition(".")[0]
        # A package that names its own modules, and modules that name their package, are one unit.
        if i.at_top and target in names and not (i.module + ".").startswith(target + "."):
            needs[i.module].add(target)
    while leaves := {name for name, targets in needs.items() if not targets & needs.keys()}:
        needs = {name: targets for name, targets in needs.items() if name not in leaves}
    assert needs == {}, "these modules import each other"


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("import packer", id="import packer"),
        pytest.param(
            "import contextlib, os, sys, packer.cli\n"
            "sys.argv = ['packer', '--help']\n"
            "with contextlib.redirect_stdout(open(os.devnull, 'w')), contextlib.suppress(SystemExit):\n"
            "    packer.cli.main()",
            id="packer --help",
        ),
    ],
)
def test_starting_up_stays_light(program: str) -> None:
    program += "\nimport sys\nprint(*{name.partition('.')[0] for name in sys.modules})"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert HEAVY & set(done.stdout.split()) == set()
