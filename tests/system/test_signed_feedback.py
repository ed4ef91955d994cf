"""Admission: an editor accepts feedback that listed authors sign, rejects other feedback, and applies rate limits."""

import json
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from msgspec import UNSET

from gracestream.pipeline.client import SignedFeedback
from gracestream.pipeline.settings import Settings
from tests.support.forked_commands import Command, Forked, sentence, status_of
from tests.support.running import (
    Users,
    deltas_in_log,
    flag,
    headers_of,
    outcomes_in_log,
    records,
    wait_until,
)
from tests.support.signers import ANN, BOB, CARL, PROMPTS, STRANGER, Deployment, line, signed

LIST = {"ann": (ANN, 0), "bob": (BOB, 2), "carl": (CARL, 0)}


@pytest.fixture(scope="module")
def running(deploy: Callable[..., Settings], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("running")
    authors = folder / "authors.toml"
    authors.write_text("".join(line(name, key, limit) for name, (key, limit) in LIST.items()))
    settings = deploy("llama", f"t{secrets.token_hex(4)}-", authors_file=str(authors), require_signature=True)
    deployment = Deployment(settings, folder)
    with deployment.editor as editor:
        editor.wait_ready(90)
        yield deployment
        deployment.users.close()
        assert editor.running, editor.stderr()[-3000:]


def test_feedback_signed_by_a_listed_author_is_accepted_unchanged(running: Deployment) -> None:
    sent = signed("ann", PROMPTS[0], ANN)
    (outcome,) = running.send(sent)
    assert outcome.status in {"added", "unchanged"}
    assert [record.value for record in records(running.settings, "feedback")].count(sent.record) == 1
    (edit,) = [record for record in records(running.settings, "edits") if record.key == sent.feedback_id.encode()]
    assert headers_of(edit)["author"] == "ann"


def test_unsigned_forged_or_altered_feedback_is_rejected_and_changes_nothing(running: Deployment) -> None:
    before = len(deltas_in_log(running.settings))
    tampered = signed("ann", PROMPTS[1], ANN)
    bad = {
        "is not signed": SignedFeedback("unsigned", json.dumps(
            {"v": 1, "feedback_id": "unsigned", "inputs": PROMPTS[1], "target": "museum", "author": "ann"}
        ).encode()),
        "'mallory' is not on the list": signed("mallory", PROMPTS[1], STRANGER),
        "not valid for author 'bob'": signed("bob", PROMPTS[1], STRANGER),
        "not valid for author 'carl'": signed("carl", PROMPTS[1], CARL, codebook="another deployment's"),
        "valid for author 'ann'": SignedFeedback(tampered.feedback_id, tampered.record.replace(b"museum", b"bridge")),
    }  # fmt: skip
    for outcome, reason in zip(running.send(*bad.values()), bad, strict=True):
        assert outcome.status == "rejected"
        assert reason in str(outcome.reason)
        assert outcome.seq is UNSET
    assert len(deltas_in_log(running.settings)) == before
    assert records(running.settings, "feedback.dlq") == [], "all records are readable, so none is dead-lettered"
    (taken,) = running.send(signed("bob", PROMPTS[2], BOB))
    assert taken.status != "rejected", "forged records do not count towards the author's limit"


def test_a_copy_of_a_signed_record_changes_nothing(running: Deployment) -> None:
    sent = signed("ann", PROMPTS[3], ANN)
    running.send(sent)
    before = deltas_in_log(running.settings)[-1].seq
    (again,) = running.send(sent)
    assert again.status == "unchanged"
    assert "its signed id was used at offset " in str(again.reason)
    assert deltas_in_log(running.settings)[-1].seq == before


def test_an_author_taken_off_the_list_is_rejected_while_the_editor_runs_and_a_broken_list_changes_nothing(
    running: Deployment,
) -> None:
    whole = running.authors.read_text()
    assert running.send(signed("carl", PROMPTS[4], CARL))[0].status != "rejected"
    running.authors.write_text("".join(line(name, key) for name, (key, _) in LIST.items() if name != "carl"))
    (rejected,) = running.send(signed("carl", PROMPTS[5], CARL))
    assert "author 'carl' is not on the list of authors" in str(rejected.reason)
    running.authors.write_text("carl = ")
    (rejected, taken) = running.send(signed("carl", PROMPTS[6], CARL), signed("ann", PROMPTS[7], ANN))
    assert (rejected.status, taken.status == "rejected") == ("rejected", False)
    assert "authors_reload_failed" in running.editor.stderr()
    running.authors.write_text(whole)
    assert running.send(signed("carl", PROMPTS[8], CARL))[0].status != "rejected"


@pytest.mark.slow
def test_a_limit_holds_across_editors(deploy: Callable[..., Settings], prefix: str, folder: Path) -> None:
    settings = deploy("llama", prefix, feedback_rate_limit=3)
    users = Users(settings)
    with Forked("editor", "edit", settings, folder) as editor:
        editor.wait_ready(90)
        first = users.correct(*[flag(f"f{number}", PROMPTS[number], "museum") for number in range(2)])
        editor.kill()
        users.client.send([flag(f"f{number}", PROMPTS[number], "museum") for number in (2, 3)])
        editor.start()
        wait_until(lambda: len(outcomes_in_log(settings)) == 4, 60, what="an outcome of each")
    users.close()
    outcomes = {outcome.feedback_id: outcome for outcome in outcomes_in_log(settings)}
    assert all(outcome.status != "rejected" for outcome in first.values())
    assert outcomes["f2"].status != "rejected"
    assert outcomes["f3"].status == "rejected"
    assert "feedback without an author is limited to 3 a minute; send this again after " in str(outcomes["f3"].reason)
    admitted = {edit.key: "admitted" in headers_of(edit) for edit in records(settings, "edits")}
    assert admitted == {b"f0": True, b"f1": True, b"f2": True, b"f3": False}


class TestCommands:
    def test_a_new_key_signs_the_feedback_of_correct(
        self, running: Deployment, run: Callable[..., Command], folder: Path
    ) -> None:
        key = folder / "dora.pem"
        made = run("keys", "new", "--author", "dora", "--output", str(key))
        assert status_of(made) == 0, made.stderr()
        with running.authors.open("a") as authors:
            authors.write(made.stdout())
        given = [
            {"inputs": PROMPTS[9], "target": "museum", "note": "caf\u00e9"},
            {"inputs": PROMPTS[10], "target": "museum", "feedback_id": "mine"},
        ]
        signed_by = run("keys", "sign", str(key), "--author", "dora", given="\n".join(map(json.dumps, given)))
        assert status_of(signed_by) == 0, signed_by.stderr()
        sent = run("correct", settings=running.settings, given=signed_by.stdout() + "\n")
        assert status_of(sent) == 0, sent.stderr()
        outcomes = [json.loads(one) for one in sent.stdout().splitlines()]
        assert [outcome["status"] == "rejected" for outcome in outcomes] == [False, False]
        assert outcomes[1]["feedback_id"] == "mine"
        values = [record.value for record in records(running.settings, "feedback")]
        assert all(values.count(one.encode()) == 1 for one in signed_by.stdout().splitlines())
        printed = run("corrections", settings=running.settings).stdout().splitlines()
        assert set(signed_by.stdout().splitlines()) <= set(printed), "unchanged"

    def test_an_undo_is_signed_like_a_correction(
        self, running: Deployment, run: Callable[..., Command], folder: Path
    ) -> None:
        wrong = signed("carl", PROMPTS[11], CARL)
        running.send(wrong)
        command = run("undo", wrong.feedback_id, "--by", "carl", settings=running.settings)
        assert status_of(command) == 1
        assert "it is not signed" in json.loads(command.stdout())["reason"]
        key = folder / "carl.pem"
        key.write_bytes(CARL.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        given = json.dumps({"undo": wrong.feedback_id})
        line = run("keys", "sign", str(key), "--author", "carl", given=given).stdout()
        sent = run("correct", settings=running.settings, given=line)
        assert json.loads(sent.stdout())["status"] == "undone", sent.stderr()
        undo_id = json.loads(line)["feedback_id"]
        forged = run("undo", undo_id, "--by", "bob", "--key", str(key), settings=running.settings)
        assert "not valid for author 'bob'" in json.loads(forged.stdout())["reason"]
        assert status_of(forged) == 1
        back = run("undo", undo_id, "--by", "carl", "--key", str(key), settings=running.settings)
        assert (status_of(back), json.loads(back.stdout())["status"]) == (0, "undone"), back.stderr()
        elsewhere = run(
            "undo", undo_id, "--by", "carl", "--key", str(key), "--codebook", "x", settings=running.settings
        )
        assert "not valid for author 'carl'" in json.loads(elsewhere.stdout())["reason"]

    def test_a_key_signs_in_the_name_of_an_author(self, run: Callable[..., Command], folder: Path) -> None:
        unnamed = run("undo", "f", "--key", str(folder / "key.pem"))
        assert status_of(unnamed) == 2
        assert "--key signs in an author's name, so it needs --by" in " ".join(unnamed.stderr().split())
        assert "key.pem cannot be read" in sentence(run("undo", "f", "--by", "ann", "--key", str(folder / "key.pem")))

    def test_a_key_is_not_overwritten_and_only_its_line_is_printed(
        self, run: Callable[..., Command], folder: Path
    ) -> None:
        arguments = ["keys", "new", "--author", "ann 濡", "--output", str(folder / "key.pem")]
        printed = run(*arguments).stdout()
        assert printed.startswith('"ann 濡" = { keys = ["')
        assert printed.count("\n") == 1
        assert "key.pem exists, and a key is never overwritten" in sentence(run(*arguments))

    @pytest.mark.parametrize(
        ("given", "complaint"),
        [
            ('{"inputs": "a"}', "line 1: not a valid feedback"),
            ('{"inputs": "a", "target": "b", "author": "bob"}', "line 1: it names another author, 'bob'"),
            ('{"inputs": "a", "target": "b", "signature": "x"}', "line 1: it is signed already"),
            ("{", "line 1 is not JSON"),
        ],
    )
    def test_a_line_that_cannot_be_signed_is_named_and_nothing_is_printed(
        self, run: Callable[..., Command], folder: Path, given: str, complaint: str
    ) -> None:
        key = folder / "key.pem"
        run("keys", "new", "--author", "ann", "--output", str(key))
        command = run("keys", "sign", str(key), "--author", "ann", given=given)
        assert status_of(command) == 2
        assert complaint in " ".join(command.stderr().split())
        assert command.stdout() == ""

    def test_a_signed_line_that_would_need_a_further_field_is_not_sent(
        self, running: Deployment, run: Callable[..., Command]
    ) -> None:
        before = len(records(running.settings, "feedback"))
        given = json.dumps({"v": 1, "inputs": "a", "target": "b", "signature": "x"})
        command = run("correct", settings=running.settings, given=given)
        assert status_of(command) == 2
        assert "missing required field `feedback_id`" in " ".join(command.stderr().split())
        assert len(records(running.settings, "feedback")) == before

    def test_the_error_for_a_missing_key_is_one_sentence(self, run: Callable[..., Command], folder: Path) -> None:
        (folder / "rubbish").write_text("rubbish")
        message = sentence(run("keys", "sign", str(folder / "rubbish"), "--author", "ann", given="{}"))
        assert message == f"{folder / 'rubbish'} is not a private key in PEM; `gracestream keys new` makes one"

    @pytest.mark.parametrize(
        ("content", "complaint"),
        [(None, "cannot be read: No such file"), ("ann = 3", "author 'ann': Expected `object`, got `int`")],
    )
    def test_an_editor_does_not_start_with_an_invalid_list(
        self, run: Callable[..., Command], deployment: Settings, folder: Path, content: str | None, complaint: str
    ) -> None:
        authors = folder / "authors.toml"
        if content is not None:
            authors.write_text(content)
        message = sentence(run("edit", settings=deployment, authors_file=str(authors)))
        assert str(authors) in message
        assert complaint in message

    def test_an_editor_does_not_require_signatures_without_a_list(
        self, run: Callable[..., Command], deployment: Settings
    ) -> None:
        message = sentence(run("edit", settings=deployment, require_signature=True))
        assert message == "GRACESTREAM_REQUIRE_SIGNATURE needs a list of authors; set GRACESTREAM_AUTHORS_FILE"
