"""The committed pages of `docs/reference` equal the generated ones."""

from pathlib import Path

import pytest

from tests.support.reference_pages import REFERENCE_FOLDER, render_pages, write_pages

PAGES = render_pages()


@pytest.mark.parametrize("name", PAGES)
def test_a_committed_page_is_current(name: str) -> None:
    assert (REFERENCE_FOLDER / name).read_text(encoding="utf-8") == PAGES[name], "run `make reference`"


def test_it_writes_every_page(tmp_path: Path) -> None:
    write_pages(tmp_path / "reference")
    assert {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "reference").iterdir()} == PAGES
