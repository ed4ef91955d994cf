"""The commands on a history: undo, reproduce, branch, compare and inspect."""

import json
import secrets
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from gracestream.pipeline.history.branch import branch_history
from gracestream.pipeline.kafka.topics import TopicError, create_topics, require_topics, topic_layout
from gracestream.pipeline.replay.replay import replay_deltas
from gracestream.pipeline.settings import Settings
from gracestream.schemas.deltas import GENESIS_DIGEST, EntryChange, Tensor, decode_delta, seal_delta
from gracestream.schemas.messages import Feedback, decode
from tests.support.forked_commands import Command, Forked, sentence, status_of
from tests.support.running import Users, deltas_in_log, flag, outcomes_in_log, question, records, wait_until
from tests.support.tiny_models import texts
from tests.support.written_history import History

FIRST, SECOND, THIRD = texts(3, seed=33, shortest=6, longest=9)
WIDER = FIRST.replace(" temperature ", " bridge ")
"""A prompt whose query is 3.0 away from that of `FIRST`."""

APART = FIRST.replace(" day ", " bridge ")
"""A prompt whose query is 4.9 away from that of `FIRST`."""

LONG = " ".join([FIRST] * 5)
"""A prompt with more tokens than the editor's limit, and fewer than the model's."""

CREATE_TIME, LOG_APPEND_TIME = 0, 1
"""Kafka's types of timestamps: of the sender's clock, or of the broker's."""

Run = Callable[..., Command]


@dataclass(frozen=True)
class Running:
    """A deployment with an editor and a replica, and its users."""

    settings: Settings
    users: Users
    editor: Forked
    replica: Forked

    def answer(self, inputs: str, seq: int) -> Any:
        """The prediction for an input from a codebook that has applied a delta."""
        (found,) = self.users.ask(question(secrets.token_hex(4), inputs, min_seq=seq)).values()
        return found


@pytest.fixture(scope="module")
def running(deploy: Callable[..., Settings], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    settings = deploy("llama", f"t{secrets.token_hex(4)}-", radius_unit="absolute", radius=2.5)
    folder = tmp_path_factory.mktemp("history")
    with Forked("editor", "edit", settings, folder) as editor, Forked("replica", "infer", settings, folder) as replica:
        editor.wait_ready(90)
        replica.wait_ready()
        users = Users(settings)
        yield Running(settings, users, editor, replica)
        users.close()


@pytest.fixture(scope="module")
def story(running: Running) -> Running:
    """One correction of each kind, by two authors, and a rejected correction."""
    for name, author, inputs, target, status in (
        ("first", "ann", FIRST, "museum", "added"),
        ("second", "bob", SECOND, "bridge", "added"),
        ("third", "ann", THIRD, "train", "added"),
        ("again", "bob", FIRST, "violin", "replaced"),
        ("long", "bob", LONG, "violin", "rejected"),
        ("wider", "bob", WIDER, "violin", "expanded"),
        ("apart", "bob", APART, "train", "split"),
    ):
        one = Feedback(v=1, feedback_id=name, inputs=inputs, target=target, author=author)
        (outcome,) = running.users.correct(one).values()
        assert outcome.status == status
    return running


def lines(command: Command) -> list[Any]:
    assert status_of(command) == 0, command.stderr()
    return [json.loads(line) for line in command.stdout().splitlines()]


@pytest.mark.slow
def test_an_undo_takes_effect_on_the_replica_and_can_be_undone(story: Running, run: Run) -> None:
    seq = len(deltas_in_log(story.settings))
    assert story.answer(FIRST, seq).outputs.text == "violin"
    (outcome,) = lines(run("undo", "again", settings=story.settings))
    assert outcome["status"] == "undone"
    assert story.answer(FIRST, outcome["seq"]).outputs.text == "museum"
    (back,) = lines(run("undo", outcome["feedback_id"], "--by", "carl", settings=story.settings))
    assert back["status"] == "undone"
    assert story.answer(FIRST, back["seq"]).outputs.text == "violin"
    wait_until(lambda: story.replica.state()["state_digest"] == story.editor.state()["state_digest"])


def test_all_feedback_of_an_author_can_be_undone_and_restored(story: Running, run: Run) -> None:
    untouched = story.answer(SECOND, len(deltas_in_log(story.settings))).outputs
    (gone,) = lines(run("undo", "--author", "ann", settings=story.settings))
    assert story.answer(THIRD, gone["seq"]).outputs.text != "train"
    assert story.answer(FIRST, gone["seq"]).outputs.text == "violin", "bob's correction does not depend on it"
    assert story.answer(SECOND, gone["seq"]).outputs == untouched
    (back,) = lines(run("undo", gone["feedback_id"], settings=story.settings))
    assert story.answer(THIRD, back["seq"]).outputs.text == "train"


def test_an_impossible_undo_has_an_outcome_with_a_reason(story: Running, run: Run) -> None:
    failed = run("undo", "nobody", settings=story.settings)
    assert status_of(failed) == 1
    outcome = json.loads(failed.stdout())
    assert (outcome["status"], outcome["reason"]) == (
        "rejected",
        "no feedback 'nobody' has had an effect, so there is nothing to undo",
    )
    assert "name the feedback to undo" in run("undo", settings=story.settings).stderr()


@pytest.mark.slow
def test_the_corrections_in_force_can_be_sent_to_another_deployment(story: Running, run: Run, folder: Path) -> None:
    printed = run("corrections", settings=story.settings).stdout()
    feedback = [decode(line.encode(), Feedback) for line in printed.splitlines()]
    assert [one.feedback_id for one in feedback] == ["second", "third", "again", "wider", "apart"]
    sent = [decode(record.value, Feedback) for record in records(story.settings, "feedback")]
    assert all(one in sent for one in feedback)
    other = {"topic_prefix": f"{story.settings.kafka.topic_prefix}anew-", "layer": "model.layers[0].mlp.up_proj"}
    there = story.settings.replace(**other)
    create_topics(there.kafka, partitions=4, replication=1)
    with Forked("anew", "edit", there, folder), Forked("answers", "infer", there, folder):
        seq = lines(run("correct", settings=there, given=printed))[-1]["seq"]
        asked = "\n".join(json.dumps({"inputs": one.inputs, "min_seq": seq}) for one in feedback)
        answers = lines(run("send", settings=there, given=asked))
    assert [one["outputs"]["text"] for one in answers] == [one.target for one in feedback]
    assert run("corrections", settings=there).stdout() == printed


def test_earlier_corrections_are_listed_and_undone_corrections_are_not(story: Running, run: Run) -> None:
    def ids(*options: str) -> list[str]:
        return [one["feedback_id"] for one in lines(run("corrections", *options, settings=story.settings))]

    assert ids("--seq", "1") == []
    assert ids("--seq", "4") == ["first", "second", "third"]
    assert ids("--seq", "5") == ["second", "third", "again"]


def test_a_reproduction_gives_the_recorded_history_bit_for_bit(story: Running, run: Run) -> None:
    (report,) = lines(run("replay", "--reproduce", "--json", settings=story.settings))
    assert report["same_records"] >= 6
    assert report["same_without_delta"] == len(
        [one for one in outcomes_in_log(story.settings) if one.status == "rejected"]
    )
    assert report["decisions"] == report["same_decisions"] == report["same_records"] + report["same_without_delta"]
    assert report["first_difference"] is None
    assert report["digest"] == report["recorded_digest"]


def test_a_reproduction_up_to_a_delta_uses_the_queries_of_the_history(story: Running, run: Run) -> None:
    unset = story.settings.replace(query_source="auto")
    (report,) = lines(run("replay", "--reproduce", "--seq", "3", "--json", settings=unset))
    assert (report["seq"], report["decisions"], report["same_records"]) == (3, 2, 2)


@pytest.mark.parametrize("command", ["edit", "evaluate"])
def test_the_error_for_a_history_of_the_layers_queries_names_the_setting(
    story: Running, run: Run, command: str
) -> None:
    unset = story.settings.replace(query_source="auto")
    given, remedy = ["edit"], "(GRACESTREAM_QUERY_SOURCE=last in that history), or another GRACESTREAM_TOPIC_PREFIX"
    if command == "evaluate":
        given, remedy = ["evaluate", "-"], "(GRACESTREAM_QUERY_SOURCE=last where the layer makes the queries)"
    ran = run(*given, settings=unset, given=json.dumps({"inputs": FIRST, "unchanged": True}))
    assert status_of(ran) == 1
    assert remedy in ran.stderr()


def test_a_reproduction_repeats_rejected_decisions(story: Running, run: Run) -> None:
    """A rejected decision that is made now ends the reproduction before later decisions."""
    ended = run("replay", "--reproduce", "--json", settings=story.settings, max_input_tokens=48)
    assert status_of(ended) == 1
    report = json.loads(ended.stdout())
    assert report["first_difference"] == (
        "after delta 5 (feedback 'long', offset 4): it was 'rejected' (the prompt has 45 tokens; the limit is 40"
        " (GRACESTREAM_MAX_INPUT_TOKENS)) and is 'added' now"
    )
    assert (report["seq"], report["decisions"], report["same_decisions"], report["same_without_delta"]) == (5, 5, 4, 0)


def rewritten(story: Running, prefix: str, how: Callable[[EntryChange], EntryChange], **fields: Any) -> Settings:
    """A sealed history with an altered third delta."""
    there = story.settings.replace(topic_prefix=story.settings.kafka.topic_prefix + prefix)
    deltas = [decode_delta(record.value) for record in records(story.settings, "deltas")[:5]]
    entries = tuple(map(how, deltas[2].entries))
    deltas[2] = msgspec.structs.replace(deltas[2], entries=entries, **fields)
    branch_history(
        story.settings.kafka,
        there.kafka,
        there.model.codebook,
        [seal_delta(delta, GENESIS_DIGEST)[0] for delta in deltas],
    )  # a branch has its own chain of digests
    return there


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "how", "difference"),
    [
        ({"op": "split"}, {}, "it was 'split' and is 'add' now"),
        ({}, {"label": (7,)}, "it changes 'second' to another target, or other fields of it"),
    ],
)
def test_a_reproduction_ends_at_the_first_decision_that_differs(
    story: Running, run: Run, fields: dict[str, Any], how: dict[str, Any], difference: str
) -> None:
    prefix = f"differs-{secrets.token_hex(4)}-"
    there = rewritten(story, prefix, lambda change: msgspec.structs.replace(change, **how), **fields)
    branched = f"{there.kafka.topic_prefix}branch-"
    ended = run("replay", "--reproduce", "--to", branched, "--json", settings=there)
    assert status_of(ended) == 1
    report = json.loads(ended.stdout())
    assert report["first_difference"] == f"delta 3 (feedback 'second', offset 1): {difference}"
    assert (report["seq"], report["decisions"], report["same_decisions"], report["same_records"]) == (2, 2, 1, 1)
    assert report["digest"] != report["recorded_digest"]
    assert "copied_to" not in report
    with pytest.raises(TopicError):
        replay_deltas(there.replace(topic_prefix=branched).kafka)


@pytest.mark.slow
def test_reproduced_values_are_compared_and_can_be_branched(story: Running, run: Run) -> None:
    def altered(change: EntryChange) -> EntryChange:
        assert isinstance(change.value, Tensor)
        return msgspec.structs.replace(change, value=Tensor.from_array(change.value.array() + 0.25))

    there = rewritten(story, "altered-", altered)
    mended = there.replace(topic_prefix=f"{there.kafka.topic_prefix}mended-")
    (report,) = lines(run("replay", "--reproduce", "--to", mended.kafka.topic_prefix, "--json", settings=there))
    assert (report["decisions"], report["same_decisions"], report["same_records"]) == (4, 4, 3)
    assert report["value_difference"] == pytest.approx(0.25, abs=1e-4)
    assert report["first_difference"] is None
    theirs, ours = replay_deltas(story.settings.kafka, 5), replay_deltas(mended.kafka)
    assert theirs is not None
    assert ours is not None
    assert report["recorded_digest"] != report["digest"] == report["copied_digest"] == ours.digest.hex()
    assert (ours.digest, ours.state_digest()) == (theirs.digest, theirs.state_digest())


@pytest.mark.slow
@pytest.mark.parametrize("reproduce", [[], ["--reproduce"]])
def test_deltas_of_a_fenced_editor_are_neither_reproduced_nor_copied(
    story: Running, run: Run, prefix: str, reproduce: list[str]
) -> None:
    there, copy = (story.settings.replace(topic_prefix=prefix + name) for name in ("fenced-", "copy-"))
    create_topics(there.kafka, partitions=4, replication=1)
    *before, left = [record.value for record in records(story.settings, "deltas")[:5]]
    lead, again, digest = decode_delta(before[0]), decode_delta(left), decode_delta(before[-1]).digest
    lead_record, lead = seal_delta(msgspec.structs.replace(lead, term=2, seq=5), digest)
    again_record, again = seal_delta(msgspec.structs.replace(again, term=2, seq=6), lead.digest)
    with closing(History(there)) as log:
        for feedback in records(story.settings, "feedback")[:4]:
            log.write(feedback.value, "feedback")
        for delta in (*before, lead_record, left, again_record):
            log.write(delta)
    (report,) = lines(run("replay", *reproduce, "--to", copy.kafka.topic_prefix, "--json", settings=there))
    assert report["digest"] == report["copied_digest"] == again.digest.hex()
    assert report.get("decisions") == report.get("same_records") == (4 if reproduce else None)
    assert [record.value for record in records(copy, "deltas")] == [*before, lead_record, again_record]


def test_a_history_is_not_reproduced_on_another_model(story: Running, run: Run) -> None:
    other = story.settings.replace(layer="model.layers[0].mlp.up_proj")
    assert "the history is of model" in sentence(run("replay", "--reproduce", settings=other))


@pytest.mark.slow
def test_a_branch_has_the_same_codebook_and_an_editor_continues_it_with_another_policy(
    story: Running, run: Run, folder: Path, users_of: Callable[[Settings], Users]
) -> None:
    there = story.settings.replace(topic_prefix=f"{story.settings.kafka.topic_prefix}branch-")
    seq = 4
    report = lines(
        run("replay", "--seq", str(seq), "--to", there.kafka.topic_prefix, "--json", settings=story.settings)
    )[0]
    assert report["copied_digest"] == report["digest"]
    ours, theirs = replay_deltas(there.kafka), replay_deltas(story.settings.kafka, seq)
    assert ours is not None
    assert theirs is not None
    assert (ours.digest, ours.state_digest()) == (theirs.digest, theirs.state_digest())
    assert [outcome.feedback_id for outcome in outcomes_in_log(there)] == ["first", "second", "third"]
    for topic, most in (("deltas", seq), ("feedback", 3), ("edits", 3)):
        source = [record.timestamp for record in records(story.settings, topic)[:most]]
        assert [record.timestamp for record in records(there, topic)] == source
    at = datetime.fromtimestamp(records(story.settings, "deltas")[2].timestamp / 1000, UTC).isoformat()
    (then,) = lines(run("replay", "--at", at, "--json", settings=there))
    assert [then] == lines(run("replay", "--at", at, "--json", settings=story.settings))
    assert then["seq"] == 3
    require_topics(there.kafka)  # new records have Kafka's clock again
    assert topic_layout(there.kafka) == topic_layout(story.settings.kafka) == (4, 1)
    assert "has records already" in sentence(run("replay", "--to", there.kafka.topic_prefix, settings=story.settings))
    with Forked("branch", "edit", there, folder, policy="paper") as editor:
        editor.wait_ready(90)
        users = users_of(there)
        assert users.correct(flag("fourth", WIDER, "train"))["fourth"].status == "split"
        undone = users.correct(Feedback(v=1, feedback_id="u", undo="second"))["u"]
        assert undone.status == "undone"
        assert undone.seq == seq + 3
        wait_until(lambda: editor.state()["seq"] == undone.seq)
    assert [record.timestamp_type for record in records(there, "feedback")] == [CREATE_TIME] * 3 + [LOG_APPEND_TIME] * 2
    made, split = lines(run("inspect", "first", "--json", settings=there))[:-1]
    assert (made["op"], made["entries"]) == ("add", {"first": "new, radius 2.5"})
    assert (split["op"], split["feedback_id"], split["entries"].keys()) == ("split", "fourth", {"first", "fourth"})
    assert split["entries"]["first"].startswith("radius 1.49")


def test_a_branch_of_another_codebook_has_its_own_digests_and_the_same_entries(story: Running, run: Run) -> None:
    there = story.settings.replace(topic_prefix=f"{story.settings.kafka.topic_prefix}other-", codebook="other")
    arguments = ("--to", there.kafka.topic_prefix, "--to-codebook", "other", "--json")
    (report,) = lines(run("replay", *arguments, settings=story.settings))
    assert report["copied_digest"] != report["digest"]
    ours = replay_deltas(there.kafka)
    assert ours is not None
    assert (ours.name, ours.state_digest()) == ("other", report["state_digest"])
    failed = run("replay", "--to-codebook", "other", settings=story.settings)
    assert "it needs --to" in failed.stderr()
    assert "needs a prefix of its own" in sentence(
        run("replay", "--to", story.settings.kafka.topic_prefix, settings=story.settings)
    )


def test_the_difference_of_two_points_names_inputs_and_entries(story: Running, run: Run) -> None:
    (difference,) = lines(run("diff", "2", "5", "--json", settings=story.settings))
    assert [(change["inputs"], change["before"], change["after"]) for change in difference["inputs"]] == [
        (FIRST, "museum", "violin"),
        (SECOND, None, "bridge"),
        (THIRD, None, "train"),
    ]
    assert set(difference["entries"]) >= {"first", "second", "third"}
    assert "another value" in difference["entries"]["first"]
    (backwards,) = lines(run("diff", "5", "2", "--json", settings=story.settings))
    assert backwards["entries"]["second"] == "removed"
    (whole,) = lines(run("diff", "0", "5", "--json", settings=story.settings))
    assert [(change["inputs"], change["before"], change["after"]) for change in whole["inputs"]] == [
        (SECOND, None, "bridge"),
        (THIRD, None, "train"),
        (FIRST, None, "violin"),
    ]
    assert "there are no deltas up to 2020" in sentence(run("diff", "2020-01-01", "5", settings=story.settings))
    assert lines(run("diff", "5", "5", "--json", settings=story.settings)) == [
        {"inputs": [], "entries": {}, "exceptions": []}
    ]
    assert "3 inputs have another answer" in run("diff", "2", "5", settings=story.settings).stdout()
    assert "there is no 999 yet" in sentence(run("diff", "2", "999", settings=story.settings))
    assert "'yesterday'" in run("diff", "2", "yesterday", settings=story.settings).stderr()


def test_the_difference_of_two_times_is_that_of_the_deltas_before_them(story: Running, run: Run) -> None:
    taken = [datetime.fromtimestamp(record.timestamp / 1000, UTC) for record in records(story.settings, "deltas")]
    of_deltas = lines(run("diff", "2", "5", "--json", settings=story.settings))
    after = taken[4].astimezone(timezone(timedelta(hours=2))).isoformat()
    before = (taken[2] - timedelta(milliseconds=1)).replace(tzinfo=None).isoformat()
    assert lines(run("diff", before, after, "--json", settings=story.settings)) == of_deltas
    assert lines(run("diff", "2", taken[3].isoformat(), "--json", settings=story.settings)) != of_deltas


def test_inspect_shows_the_deltas_and_the_usage_of_an_entry(story: Running, run: Run) -> None:
    seq = len(deltas_in_log(story.settings))
    asked = story.answer(FIRST, seq)
    assert asked.edit.entry_id == "first"
    *steps, last = lines(run("inspect", "first", "--json", settings=story.settings))
    listed = [(step["op"], step["feedback_id"], step["author"], step["entries"]["first"]) for step in steps[:3]]
    assert listed == [
        ("add", "first", "ann", "new, radius 2.5"),
        ("replace", "again", "bob", "another value"),
        ("expand", "wider", "bob", "radius 2.988"),
    ]
    split = lines(run("inspect", "apart", "--json", settings=story.settings))[0]
    assert (split["op"], split["feedback_id"], split["entries"]) == ("split", "apart", {"apart": "new, radius 2.5"})
    assert asked.request_id in [answer["request_id"] for answer in last["usage"]["recent"]]
    served = [record for record in records(story.settings, "predictions") if b'"entry_id":"first"' in record.value]
    assert last["usage"]["count"] == len(served)
    shown = run("inspect", "first", settings=story.settings).stdout()
    assert f"{len(served)} answer{'' if len(served) == 1 else 's'} came from it" in shown
    assert "undoes" in run("inspect", settings=story.settings).stdout()


@pytest.mark.slow
def test_waiting_corrections_train_together_and_are_reproduced_bit_for_bit(
    deploy: Callable[..., Settings], run: Run, folder: Path, users_of: Callable[[Settings], Users]
) -> None:
    settings = deploy("llama", f"t{secrets.token_hex(4)}-", training_batch_size=4)
    given = [flag(f"f{number}", text, "museum") for number, text in enumerate(texts(10, seed=21, shortest=5))]
    users = users_of(settings)
    users.client.send([*given[:6], Feedback(v=1, feedback_id="u", undo="f1"), *given[6:]])
    with Forked("editor", "edit", settings, folder) as editor:
        editor.wait_ready(90)
        wait_until(lambda: len(outcomes_in_log(settings)) == len(given) + 1, what="an outcome of each")
    deltas = deltas_in_log(settings)
    batches = {delta.cause.together for delta in deltas if delta.cause is not UNSET} - {()}
    assert batches
    assert max(map(len, batches)) <= 4
    (report,) = lines(run("replay", "--reproduce", "--json", settings=settings))
    assert report["first_difference"] is None
    assert report["decisions"] == report["same_decisions"] == len(given) + 1
    assert report["same_records"] + report["same_without_delta"] == report["decisions"]
