"""The documentation says what the program does: every command, option, import and link in it exists."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from conftest import PATIENCE_S

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from make_cli_docs import cli_docs, contexts  # noqa: E402

from packer.cli import cli  # noqa: E402

COMMANDS = {context.command_path: context for context in contexts(cli, "packer") if context.parent}
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

# What only this project's authors' machines have, or what would send users to one particular mirror.
MACHINE_TRACES = re.compile(
    r"(?<![\w.~])(/work/(main|shared)|/tmp/venv|/tmp/tv|/opt/(wheels|pypi)|/root/)\b"
    r"|\b(pypi\.org|pythonhosted\.org|download\.pytorch\.org)"
)


@pytest.fixture(scope="module")
def readme() -> str:
    return (ROOT / "README.md").read_text("utf-8")


def blocks(text: str, *languages: str) -> Iterator[str]:
    """The fenced code blocks in one of these languages."""
    for language, code in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if language in languages:
            yield code


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_explains_itself(path: str) -> None:
    context = COMMANDS[path]
    assert context.command.get_short_help_str(), "no help text"
    _usage, _, rest = context.command.get_help(context).partition("\n")
    assert "\\b" not in rest, "click's paragraph mark in a raw docstring: it is shown as it stands"
    assert re.search(rf"\b{path} ", rest), f"no example that begins with '{path} '"


@pytest.mark.parametrize("path", COMMANDS)
def test_every_option_has_help(path: str) -> None:
    options = [p for p in COMMANDS[path].command.params if isinstance(p, click.Option) and not p.hidden]
    assert [option.name for option in options if not option.help] == []


@pytest.mark.parametrize("path", COMMANDS)
def test_readme_mentions_every_command(path: str, readme: str) -> None:
    assert re.search(rf"\b{path}\b", readme)


def test_cli_reference_is_fresh() -> None:
    written = (ROOT / "docs" / "cli.md").read_text("utf-8")
    assert written == cli_docs(), "docs/cli.md is stale; run: python scripts/make_cli_docs.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_shown_exist(page: Path) -> None:
    wrong = []
    for code in blocks(page.read_text("utf-8"), "", "sh", "bash", "console"):
        for line in code.replace("\\\n", " ").splitlines():
            words = shlex.split(line.strip().removeprefix("$ "), comments=True)
            if words[:1] != ["packer"]:
                continue
            context = COMMANDS.get(" ".join(words[:2]))
            known = {"--help", "--version"}
            if context is not None:
                known |= {name for p in context.command.params for name in (*p.opts, *p.secondary_opts)}
            options = {word.partition("=")[0] for word in words if word.startswith("--")}
            if options - known or (context is None and not options):
                wrong.append(line)
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_shown_compiles_and_imports_what_exists(page: Path) -> None:
    for code in blocks(page.read_text("utf-8"), "python"):
        for node in ast.walk(ast.parse(code, page.name)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("packer", "loaders")):
                module = importlib.import_module(node.module or "")
                missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                assert missing == [], f"{node.module} has no {missing}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text("utf-8"))
    local = [link for link in links if "://" not in link and not link.startswith("mailto:")]
    assert [link for link in local if not (page.parent / link).exists()] == []


def test_no_traces_of_one_machine() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    if listed.returncode:
        pytest.skip(f"not a git checkout: {listed.stderr.strip()}")
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if name == "tests/test_docs.py" or not path.is_file():
            continue
        for number, line in enumerate(path.read_bytes().decode("utf-8", "replace").splitlines(), 1):
            if MACHINE_TRACES.search(line):
                found.append(f"{name}:{number}: {line.strip()[:80]}")
    assert found == []
