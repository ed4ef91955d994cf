"""Packages of `pipeline` import downwards only, and each other's names only from the package."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.repository import ROOT

PIPELINE = "gracestream.pipeline."

EVERYBODY = {"errors", "device"}
"""Modules that every package may import, beside `schemas`."""

ALLOWED = {
    "search": "",
    "wording": "",
    "settings": "",
    "observability": "",
    "codebook": "search wording",
    "model": "search wording codebook",
    "kafka": "settings",
    "auth": "settings",
    "client": "settings kafka",
    "imports": "",
    "editing": "search wording codebook model",
    "stores": "settings observability kafka codebook",
    "replica": "settings observability kafka stores codebook model",
    "editor": "settings observability kafka stores codebook model auth editing",
    "history": "settings kafka",
    "read_model": "settings kafka history",
    "replay": "settings kafka stores codebook history",
    "reproduction": "codebook model editing editor",
    "tuning": "search wording codebook model editing",
    "console": "settings kafka client history auth read_model",
    "experiments": "search settings client codebook model editing replica",
    "vllm": "settings observability codebook model client replica",
    "errors": "",
    "device": "",
}
"""What each package may import. Every row names only earlier rows, but for the last two, which import no package."""

APPLICATIONS = {"console", "experiments", "tuning", "vllm"}
"""Packages without a public interface: the commands that run them import their modules."""


def imports(file: Path) -> Iterator[tuple[int, str, list[str]]]:
    """Line, module and names of each import of `gracestream` in a file, wherever it stands."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("gracestream"):
            yield node.lineno, node.module, [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("gracestream"):
                    yield node.lineno, alias.name, []


def package_of(module: str) -> str:
    return module.removeprefix(PIPELINE).split(".")[0]


def modules(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py") if path != ROOT / "pipeline" / "__init__.py")


def package_of_file(file: Path) -> str:
    return file.relative_to(ROOT / "pipeline").parts[0].removesuffix(".py")


def named(module: str, names: list[str]) -> list[str]:
    """The modules of `pipeline` that an import statement names."""
    if module == PIPELINE.rstrip("."):
        return [f"{module}.{name}" for name in names]
    return [module] if module.startswith(PIPELINE) else []


def test_the_table_runs_downwards_and_names_every_package() -> None:
    above: set[str] = set()
    for package, below in ALLOWED.items():
        assert set(below.split()) <= above, f"{package} imports what stands below it in the table"
        above.add(package)
    assert set(ALLOWED) == {package_of_file(file) for file in modules("pipeline")}


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_what_the_table_allows(package: str) -> None:
    allowed = {package, *EVERYBODY, *ALLOWED[package].split()}
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {module}"
        for file in modules("pipeline")
        if package_of_file(file) == package
        for line, module, names in imports(file)
        if module.split(".")[1:2] in (["workers"], ["deploy"])
        or any(package_of(found) not in allowed for found in named(module, names))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", ["pipeline", "workers", "deploy"])
def test_names_of_another_package_come_from_the_package(folder: str) -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports from {found}"
        for file in modules(folder)
        for line, module, names in imports(file)
        for found in named(module, names)
        if found.count(".") > PIPELINE.count(".")
        and package_of(found) not in APPLICATIONS
        and not (folder == "pipeline" and package_of_file(file) == package_of(found))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", ALLOWED)
def test_a_module_imports_its_neighbours_not_its_package(package: str) -> None:
    """The package imports the module, so the other way round is a circle."""
    wrong = [
        f"{file.relative_to(ROOT)}:{line}"
        for file in modules("pipeline")
        if package_of_file(file) == package and file.name != "__init__.py"
        for line, module, names in imports(file)
        if module == PIPELINE + package
        and any(not (ROOT / "pipeline" / package / f"{one}.py").exists() for one in names)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", sorted({*ALLOWED} - EVERYBODY - APPLICATIONS - {"client", "imports"}))
def test_a_package_says_what_it_is_and_lists_its_names(package: str) -> None:
    tree = ast.parse((ROOT / "pipeline" / package / "__init__.py").read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    listed = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    imported = {
        alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert len(listed) == 1
    assert set(listed[0]) == imported
