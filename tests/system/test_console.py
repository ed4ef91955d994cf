"""The console in a browser, with a real Kafka, Valkey, editor and replica."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

from gracestream.deploy.local.processes import find_free_port, is_http_ok
from gracestream.pipeline.settings import Settings
from gracestream.schemas.messages import Feedback, Request
from tests.support.forked_commands import Command, Forked, explicit_settings
from tests.support.running import TIMEOUT, Users, wait_until
from tests.support.tiny_models import texts

PROMPT, OTHER = texts(2, seed=21, shortest=6, longest=9)
HOSTILE = "<img src=x onerror=\"document.title='hacked'\"> \u202eevil"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with sync_playwright() as started:
        found = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(1000 * TIMEOUT)
    opened = context.new_page()
    faults: list[str] = []
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.on("console", lambda message: faults.append(message.text) if "Security Policy" in message.text else None)
    yield opened
    context.close()
    assert faults == []


@pytest.fixture
def workers(deployment: Settings, folder: Path) -> Iterator[None]:
    with (
        Forked("editor", "edit", deployment, folder) as editor,
        Forked("replica", "infer", deployment, folder) as replica,
    ):
        editor.wait_ready(90)
        replica.wait_ready(90)
        yield


class Console(Command):
    """The console of a deployment."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.port = find_free_port()
        own = {"console_port": self.port, "console_file": folder / "console.db", "console_author": "ann"}
        super().__init__("console", ["console"], folder, **(explicit_settings(settings) | own))

    def __enter__(self) -> Self:
        self.start()
        wait_until(self._is_ready, what="the start of the console")
        return self

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _is_ready(self) -> bool:
        assert self.running, self.stderr()
        return is_http_ok(self.port, "/ready")


@pytest.fixture
def console(deployment: Settings, folder: Path) -> Iterator[Console]:
    with Console(deployment, folder) as found:
        yield found


def ask(users: Users, request_id: str, inputs: str) -> str:
    answer = users.ask(Request(v=1, request_id=request_id, inputs=inputs))[request_id]
    assert answer.outputs.text is not None  # type: ignore[union-attr]
    return str(answer.outputs.text)  # type: ignore[union-attr]


@pytest.mark.usefixtures("workers")
def test_a_person_corrects_an_answer_sees_it_live_and_undoes_it_by_keyboard_alone(
    users: Users, console: Console, page: Page
) -> None:
    before = ask(users, "first", PROMPT)
    page.goto(console.address)
    row = page.locator("tr[data-row]", has_text=PROMPT)
    row.wait_for()

    page.keyboard.press("j")
    ask(users, "between", OTHER)  # a new row moves the selected one, and replaces it
    page.locator("tr[data-row]", has_text=OTHER).wait_for()
    page.keyboard.press("Enter")
    page.wait_for_url("**/requests/first")
    page.keyboard.press("e")
    page.keyboard.type("train")
    page.keyboard.press("Tab")
    page.keyboard.type("it is a train")
    page.keyboard.press("Enter")
    page.wait_for_url("**/feedback/*")
    page.locator(".badge.done").wait_for()  # the editor's outcome arrives while the page is open

    assert ask(users, "second", PROMPT).strip() == "train"
    page.keyboard.press("g")
    page.keyboard.press("a")
    page.wait_for_url("**/queue")
    page.locator("tr[data-row]", has=page.locator(".badge.edited")).wait_for()
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/requests/second")
    assert page.locator("#who + table a", has_text="ann").count() == 1

    page.locator("#who + table").get_by_role("link", name=PROMPT).focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/feedback/*")
    page.keyboard.press("u")
    page.keyboard.type("it was right")
    page.keyboard.press("Enter")
    page.locator(".badge.done", has_text="undone").wait_for()
    assert ask(users, "third", PROMPT) == before


@pytest.mark.slow
@pytest.mark.usefixtures("workers")
def test_pages_have_no_faults_of_access_and_run_no_foreign_script(
    users: Users, console: Console, page: Page, folder: Path
) -> None:
    ask(users, "plain", PROMPT)
    ask(users, "hostile", HOSTILE)
    users.correct(Feedback(v=1, feedback_id="f1", inputs=PROMPT, target="train", author=HOSTILE, note=HOSTILE))
    ask(users, "edited", PROMPT)
    wait_until(lambda: "edited</a>" in page_text(page, f"{console.address}/queue"))
    entry = page.locator("a.badge.edited").first.get_attribute("href")
    addresses = [
        "/queue",
        "/requests/hostile",
        "/requests/edited",
        "/feedback",
        "/feedback/f1",
        "/history",
        entry,
        "/requests/none",
    ]
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for address in addresses:
            page.goto(f"{console.address}{address}")
            found = Axe().run(page)
            assert found.violations_count == 0, f"{address} in {scheme}: {found.generate_report()}"
            assert page.title() != "hacked"
    page.set_viewport_size({"width": 380, "height": 800})
    for address in addresses:
        page.goto(f"{console.address}{address}")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{address} is too wide for a phone"


def page_text(page: Page, address: str) -> str:
    page.goto(address)
    return str(page.content())


@pytest.mark.slow
@pytest.mark.usefixtures("workers")
def test_a_killed_console_shows_the_same_again(users: Users, deployment: Settings, folder: Path, page: Page) -> None:
    ask(users, "first", PROMPT)
    users.correct(Feedback(v=1, feedback_id="f1", inputs=PROMPT, target="train"))
    with Console(deployment, folder) as console:
        wait_until(lambda: page_text(page, f"{console.address}/history").count("data-row") == 2)
        before = page.locator("#rows").inner_text()
        console.kill()
    for rebuilt in (False, True):
        if rebuilt:
            (folder / "console.db").unlink()
        with Console(deployment, folder) as console:
            page.goto(f"{console.address}/history")
            assert page.locator("#rows").inner_text() == before
            assert console.stop() == 0
