"""The console's pages and actions, on the topics of a real editor. Kafka is not needed: `sent` takes its records."""

import csv
import io
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from kafka.errors import KafkaTimeoutError
from starlette.testclient import TestClient

from gracestream.pipeline.auth.signing import verify
from gracestream.pipeline.console.actions import FeedbackSender
from gracestream.pipeline.console.app import _spreadsheet_safe, create_app
from gracestream.pipeline.console.security import AccessError, require_loopback
from gracestream.pipeline.read_model import ReadModelStore
from gracestream.schemas.messages import AppliedEdit, ChatMessage, Feedback, NearMiss, Request, encode
from tests.support.recorded_history import Recorded
from tests.support.topic_records import Topics, short_history

HOST = "http://127.0.0.1:8090"
SAME_ORIGIN = {"Sec-Fetch-Site": "same-origin"}
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'\u202eevil\x00\x1b[31m"


class Sent:
    """Takes what a client sends, or fails as Kafka does."""

    def __init__(self) -> None:
        self.records: list[bytes] = []
        self.fails = False

    def send(self, messages: list[Any]) -> None:
        if self.fails:
            raise KafkaTimeoutError("no broker answers")
        self.records += [getattr(message, "record", None) or encode(message) for message in messages]

    def only(self) -> dict[str, Any]:
        (record,) = self.records
        found: dict[str, Any] = json.loads(record)
        return found


class Following:
    """The state of a follower that has read everything."""

    def __init__(self) -> None:
        self.failure, self.caught_up = "", threading.Event()
        self.caught_up.set()


@pytest.fixture
def history() -> Recorded:
    return short_history()


@pytest.fixture
def topics(history: Recorded) -> Topics:
    made = Topics()
    made.add_history(history)
    entry = history.engine.codebook.entry_ids[0]
    made.ask("plain", "Where is the bank?", "by the river", 1)
    made.ask(
        "edited",
        "Where is the sea?",
        "far",
        2,
        edit=AppliedEdit(entry_id=entry, distance=0.5, radius=1.0),
        codebook_seq=4,
    )
    made.ask(
        "near",
        "Where is the lake?",
        "near",
        3,
        near_miss=NearMiss(entry_id=entry, distance=2.0, radius=1.0, reason="distance", target="2"),
    )
    made.ask("odd/id?#", HOSTILE, HOSTILE, 4)
    made.write("feedback", Feedback(v=1, feedback_id="late", inputs="x", target="y", request_id="plain", author="ann"))
    return made


@pytest.fixture
def store(tmp_path: Path, topics: Topics) -> Iterator[ReadModelStore]:
    with ReadModelStore(tmp_path / "model.db", "cluster", "", 1000) as found:
        found.add(topics.new(), {})
        yield found


@pytest.fixture
def sent() -> Sent:
    return Sent()


@pytest.fixture
def following() -> Following:
    return Following()


@pytest.fixture
def browser(store: ReadModelStore, sent: Sent, following: Following) -> TestClient:
    sender = FeedbackSender(sent, "console", "default", None)  # type: ignore[arg-type]
    app = create_app(store, following, sender)  # type: ignore[arg-type]
    return TestClient(app, HOST, follow_redirects=False, client=("127.0.0.1", 50000))


def nonce_of(shown: str) -> str:
    found = re.search(r'name="nonce" value="([0-9a-f]+)"', shown)
    assert found is not None
    return found[1]


def page(browser: TestClient, address: str, status: int = 200) -> str:
    answer = browser.get(address)
    assert answer.status_code == status, answer.text
    return answer.text


class TestPages:
    def test_the_first_page_is_the_queue_with_the_newest_answer_first(self, browser: TestClient) -> None:
        assert browser.get("/").headers["location"] == "/queue"
        shown = page(browser, "/queue")
        places = [shown.index(text) for text in ("Where is the lake?", "Where is the sea?", "Where is the bank?")]
        assert places == sorted(places)
        assert "near miss: distance" in shown

    @pytest.mark.parametrize(
        ("query", "shown"),
        [("text=river", {"bank"}), ("kind=edited", {"sea"}), ("kind=near_miss", {"lake"}), ("text=nothing", set())],
    )
    def test_filters_are_in_the_address(self, browser: TestClient, query: str, shown: set[str]) -> None:
        text = page(browser, f"/queue?{query}")
        assert {name for name in ("bank", "sea", "lake") if f"Where is the {name}?" in text} == shown

    @pytest.mark.parametrize("query", ["kind=other", "since=today", "cursor=x", "cursor=1-2-3", "min_score=high"])
    def test_an_address_that_is_not_valid_is_explained(self, browser: TestClient, query: str) -> None:
        assert "This did not work" in page(browser, f"/queue?{query}", 400)

    def test_a_request_leads_to_who_made_its_answer_possible(self, browser: TestClient) -> None:
        shown = page(browser, "/requests/edited")
        assert "Who made this answer possible" in shown
        assert 'href="/feedback/f2"' in shown
        assert 'href="/feedback/f1"' not in shown
        assert "Who made this answer possible" not in page(browser, "/requests/plain")

    def test_feedback_about_a_request_is_on_its_page_before_the_editor_decides(self, browser: TestClient) -> None:
        assert "waits for the editor" in page(browser, "/requests/plain")

    def test_chats_show_their_roles(self, browser: TestClient, store: ReadModelStore, topics: Topics) -> None:
        messages = (ChatMessage("system", "Be brief."), ChatMessage("user", "Why?"))
        topics.write("requests", Request(v=1, request_id="chat", inputs=messages))
        store.add(topics.new(), {})
        shown = page(browser, "/requests/chat")
        assert shown.index("system") < shown.index("Be brief.") < shown.index("user</p>") < shown.index("Why?")
        assert "No answer yet." in shown

    def test_history_entries_and_feedback_refer_to_each_other(self, browser: TestClient, history: Recorded) -> None:
        (entry,) = history.engine.codebook.entry_ids
        shown = page(browser, "/history")
        assert 'href="/feedback/u1"' in shown
        assert f'href="/entries/{quote(entry, safe="")}"' in shown
        assert "1 answer</a>" in page(browser, f"/entries/{quote(entry, safe='')}")
        assert "undone" in page(browser, "/feedback/u1")
        assert page(browser, "/history?author=nobody").count("data-row") == 0
        assert page(browser, "/feedback").count("data-row") == 4

    @pytest.mark.parametrize("address", ["/requests/none", "/entries/none", "/nothing", "/static/../app.py"])
    def test_what_does_not_exist_is_said(self, browser: TestClient, address: str) -> None:
        assert "This did not work" in page(browser, address, 404)

    def test_feedback_that_has_not_arrived_is_waited_for(self, browser: TestClient) -> None:
        assert "is not in the topic yet" in page(browser, "/feedback/unknown")

    def test_pages_say_that_they_may_be_old(self, browser: TestClient, following: Following) -> None:
        assert browser.get("/ready").status_code == 200
        following.failure = "no broker answers"
        assert "no broker answers" in page(browser, "/queue")
        assert browser.get("/ready").status_code == 503
        following.failure = ""
        following.caught_up.clear()
        assert "The topics are being read" in page(browser, "/queue")
        assert browser.get("/ready").status_code == 503


class TestHostileText:
    def test_markup_is_shown_and_not_run(self, browser: TestClient) -> None:
        for address in ("/queue", "/requests/odd%2Fid%3F%23"):
            shown = page(browser, address)
            assert "<script>alert" not in shown
            assert "<img" not in shown
            assert "&lt;script&gt;alert(1)" in shown

    def test_characters_that_hide_or_reorder_text_are_shown(self, browser: TestClient) -> None:
        shown = page(browser, "/requests/odd%2Fid%3F%23")
        visible = shown.replace('value="', "").split("<section")[1]
        assert "\u202e" not in visible.split("<form")[0]
        assert "\\u202eevil\\u0000\\u001b[31m" in shown

    def test_a_long_text_is_cut_in_lists_and_whole_on_its_page(
        self, browser: TestClient, store: ReadModelStore, topics: Topics
    ) -> None:
        topics.ask("long", "word " * 40_000, "a", 5)
        store.add(topics.new(), {})
        assert len(page(browser, "/queue")) < 30_000
        assert page(browser, "/requests/long").count("word ") >= 40_000


class TestActions:
    def test_a_correction_is_one_record_with_what_was_shown(self, browser: TestClient, sent: Sent) -> None:
        form = {
            "inputs": '"Where is the bank?"', "request_id": "plain", "target": "at the corner", "note": "moved",
            "rephrases": "Where's the bank?\n\n Bank? ",
        }  # fmt: skip
        answer = browser.post("/correct", data=form, headers=SAME_ORIGIN)
        record = sent.only()
        assert answer.status_code == 303
        assert answer.headers["location"] == f"/feedback/{record.pop('feedback_id')}"
        assert record == {
            "v": 1, "inputs": "Where is the bank?", "target": "at the corner", "request_id": "plain", "note": "moved",
            "author": "console", "rephrases": ["Where's the bank?", "Bank?"],
        }  # fmt: skip

    def test_a_form_that_is_sent_twice_is_one_record(self, browser: TestClient, sent: Sent) -> None:
        form = {"inputs": '"q"', "target": "a", "nonce": nonce_of(page(browser, "/requests/plain"))}
        other = form | {"target": "b"}
        later = form | {"nonce": nonce_of(page(browser, "/requests/plain"))}
        places = [
            browser.post("/correct", data=one, headers=SAME_ORIGIN).headers["location"]
            for one in (form, form, other, later)
        ]
        assert places[0] == places[1]
        assert len(set(places)) == 3
        assert sent.records[0] == sent.records[1]

    def test_an_exception_and_an_undo(self, browser: TestClient, sent: Sent) -> None:
        form = {"inputs": '"q"', "request_id": "edited", "entry_id": "e1", "note": ""}
        browser.post("/except", data=form, headers=SAME_ORIGIN)
        browser.post("/undo", data={"feedback_id": "f1", "note": "wrong"}, headers=SAME_ORIGIN)
        first, second = map(json.loads, sent.records)
        assert (first["except_from"], first["request_id"], first["author"]) == ("e1", "edited", "console")
        assert (second["undo"], second["note"]) == ("f1", "wrong")

    def test_a_form_that_is_no_feedback_sends_nothing(self, browser: TestClient, sent: Sent) -> None:
        for form in ({"inputs": '"q"', "target": " "}, {"inputs": '"q"', "target": "a", "rephrases": "q"}):
            answer = browser.post("/correct", data=form, headers=SAME_ORIGIN)
            assert answer.status_code == 400
            assert "This did not work" in answer.text
        assert sent.records == []

    @pytest.mark.parametrize("inputs", ["", "not json", "{}", "7", '["a"]'])
    def test_inputs_that_are_not_those_of_a_page_are_an_error_of_the_form(
        self, browser: TestClient, sent: Sent, inputs: str
    ) -> None:
        answer = browser.post("/correct", data={"inputs": inputs, "target": "a"}, headers=SAME_ORIGIN)
        assert answer.status_code == 400
        assert sent.records == []

    def test_a_kafka_that_does_not_answer_is_said(self, browser: TestClient, sent: Sent) -> None:
        sent.fails = True
        answer = browser.post("/undo", data={"feedback_id": "f1"}, headers=SAME_ORIGIN)
        assert answer.status_code == 503
        assert "It may still arrive" in answer.text

    def test_with_a_key_records_are_signed_for_the_codebook(self, sent: Sent) -> None:
        key = Ed25519PrivateKey.generate()
        sender = FeedbackSender(sent, "ann", "default", key)  # type: ignore[arg-type]
        sender.undo("n", "f1", "")
        assert verify(sent.records[0], [key.public_key()], "default")
        assert not verify(sent.records[0], [key.public_key()], "another")
        assert sent.only()["author"] == "ann"


class TestExports:
    def test_csv_holds_all_deltas(self, browser: TestClient) -> None:
        rows = list(csv.DictReader(io.StringIO(page(browser, "/history.csv"))))
        assert [row["feedback"] for row in rows] == ["u1", "f2", "f1", ""]
        assert [row["target"] for row in rows] == ["", "2", "1", ""]
        assert list(csv.DictReader(io.StringIO(page(browser, "/history.csv?author=nobody")))) == []

    @pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@a", "\t=1"])
    def test_no_cell_of_csv_is_a_formula(self, text: str) -> None:
        assert _spreadsheet_safe(text) == f"'{text}"
        assert _spreadsheet_safe("1-1") == "1-1"

    def test_json_lines_hold_the_same(self, browser: TestClient) -> None:
        lines = [json.loads(line) for line in page(browser, "/history.jsonl").splitlines()]
        assert [line["seq"] for line in lines] == [4, 3, 2, 1]
        assert lines[0]["op"] == "undo"


class TestSecurity:
    @pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "10.0.0.1:8090", ""])
    def test_a_foreign_host_name_is_rejected(self, browser: TestClient, host: str) -> None:
        assert browser.get("/queue", headers={"Host": host}).status_code == 403

    @pytest.mark.parametrize("host", ["localhost:8090", "127.0.0.1", "[::1]:8090"])
    def test_a_loopback_name_is_accepted(self, browser: TestClient, host: str) -> None:
        assert browser.get("/queue", headers={"Host": host}).status_code == 200

    @pytest.mark.parametrize(
        "headers",
        [
            {}, {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}, {"Sec-Fetch-Site": "none"},
            {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": "http://127.0.0.1:9000"},
            {"Origin": HOST, "Sec-Fetch-Site": "cross-site"},
        ],
    )  # fmt: skip
    def test_other_sites_cannot_act(self, browser: TestClient, sent: Sent, headers: dict[str, str]) -> None:
        assert browser.post("/undo", data={"feedback_id": "f1"}, headers=headers).status_code == 403
        assert sent.records == []

    def test_a_browser_without_fetch_metadata_is_known_by_its_origin(self, browser: TestClient, sent: Sent) -> None:
        assert browser.post("/undo", data={"feedback_id": "f1"}, headers={"Origin": HOST}).status_code == 303
        assert len(sent.records) == 1

    @pytest.mark.parametrize("address", ["/queue", "/nothing", "/static/keys.js", "/history.csv"])
    def test_every_answer_forbids_other_scripts(self, browser: TestClient, address: str) -> None:
        policy = browser.get(address).headers["content-security-policy"]
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy

    def test_an_action_needs_a_post(self, browser: TestClient) -> None:
        assert browser.get("/undo?feedback_id=f1").status_code == 405

    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
    def test_it_listens_on_loopback_addresses(self, host: str) -> None:
        require_loopback(host)

    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "no.such.name.invalid"])
    def test_it_listens_on_no_other_address(self, host: str) -> None:
        with pytest.raises(AccessError, match="GRACESTREAM_CONSOLE_HOST"):
            require_loopback(host)
