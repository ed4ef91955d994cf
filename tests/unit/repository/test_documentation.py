"""The documentation names commands, options, targets, pages and tests that exist."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from gracestream.pipeline.kafka.topics import TOPICS
from gracestream.workers.cli.app import app
from tests.support.repository import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
WRITTEN = {page: page.read_text(encoding="utf-8") for page in PAGES}
TEXT = "\n".join(WRITTEN.values())


def test_the_readme_is_read_in_five_minutes() -> None:
    assert len(README.split()) <= 1200


def commands_of(group: Any, path: str = "") -> dict[str, Any]:
    """Every command by its name, after that of its group where it has one."""
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        found |= commands_of(command, f"{path}{name} ") if hasattr(command, "commands") else {f"{path}{name}": command}
    return found


COMMANDS = commands_of(typer.main.get_command(app))


def uses() -> list[tuple[str, str]]:
    """Each command that stands in the README, and the rest of its line up to the next one."""
    groups = "|".join({name.split()[0] for name in COMMANDS if " " in name})
    pattern = rf"(?:^ +|\.venv/bin/)gracestream ((?:(?:{groups}) )?\w[\w-]*)([^#\n|]*)"
    return re.findall(pattern, TEXT, re.MULTILINE)


def test_every_command_it_names_exists_and_every_command_has_help_with_an_example() -> None:
    assert {name for name, _ in uses()} <= COMMANDS.keys()
    for name, command in COMMANDS.items():
        assert re.search(r"Example: .*gracestream", command.help or ""), f"{name} has no example in its help"


def test_every_option_it_uses_exists() -> None:
    for name, rest in uses():
        known = {option for parameter in COMMANDS[name].params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", rest)) <= known, f"gracestream {name}{rest}"


def test_every_make_target_it_names_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"^(?: +)?make ([a-z]+)", TEXT, re.MULTILINE)) <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", WRITTEN[page], flags=re.DOTALL)
    for link in re.findall(r"\]\((?!http)([^)]+)\)", text):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if ROOT / "docs" in page.parents:  # the site holds nothing else
            assert ROOT / "docs" in target.resolve().parents, f"{link} leads out of the documentation"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link


def test_every_test_that_is_named_exists() -> None:
    named = set(re.findall(r"`(?:tests/)?((?:unit|contract|integration|system|chaos)/[\w/]+\.py)`", TEXT))
    assert named
    assert not [name for name in sorted(named) if not (ROOT / "tests" / name).is_file()]


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "zensical.toml").read_text(encoding="utf-8")
    pages = [str(page.relative_to(ROOT / "docs")) for page in PAGES if ROOT / "docs" in page.parents]
    assert not [page for page in pages if f'"{page}"' not in navigation]


def test_every_page_that_code_cites_exists() -> None:
    cited = {
        (citation, file)
        for folder in ("gracestream", "pipeline", "workers", "schemas", "deploy", "tests", "examples")
        for file in (ROOT / folder).rglob("*.py")
        for citation in re.findall(r"docs/[\w/-]+\.md(?:#[\w-]+)?", file.read_text(encoding="utf-8"))
    }
    for citation, file in sorted(cited):
        path, _, anchor = citation.partition("#")
        assert (ROOT / path).is_file(), f"{file} cites {path}"
        assert not anchor or anchor in anchors(ROOT / path), f"{file} cites {citation}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }


@pytest.mark.parametrize("topic", [topic.name for topic in TOPICS if topic.name != "snapshots"])
def test_every_topic_is_explained(topic: str) -> None:
    assert f"`{topic}`" in README


def test_its_python_example_compiles() -> None:
    compile(example(), "README.md", "exec")


def example() -> str:
    found = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert found is not None
    return found.group(1)
