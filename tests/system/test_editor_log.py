"""Editors and the log: each correction is written whole or not at all, by one writer, and exactly once."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from msgspec import UNSET

from gracestream.deploy.local.kafka import LocalKafka
from gracestream.pipeline.codebook.codebook import Codebook
from gracestream.pipeline.kafka.topics import EDITS, REQUESTS, create_topics
from gracestream.pipeline.replay.replay import replay_deltas
from gracestream.pipeline.settings import Settings
from gracestream.schemas.messages import Feedback
from tests.chaos.dying import hang, train_slowly, undo_slowly
from tests.support.forked_commands import Forked
from tests.support.running import (
    Users,
    deltas_in_log,
    flag,
    metric,
    outcomes_in_log,
    question,
    records,
    wait_for_open_transactions,
    wait_until,
)
from tests.support.tiny_models import LAYER, MODEL, added, sealed, texts
from tests.support.written_history import History

PROMPTS = texts(40, seed=11, shortest=6, longest=9)

SESSION = 15.0
"""The session timeout of the pair, in seconds."""

ALLOWANCE = 14.0
"""Seconds that a standby may take on a busy machine once the leadership is free."""


def leads(editor: Forked) -> bool:
    """True if the editor reports that it leads."""
    return bool(editor.state()["leadership"] == "leading")


@pytest.mark.slow
def test_an_editor_killed_again_and_again_gives_every_feedback_record_one_outcome(
    deployment: Settings, users: Users, folder: Path
) -> None:
    given = [flag(f"f{number}", prompt, "museum") for number, prompt in enumerate(PROMPTS)]
    editor = Forked("editor", "edit", deployment, folder)
    with editor:
        users.client.send(given)
        for share in (0.1, 0.4, 0.75):
            wait_until(lambda share=share: len(records(deployment, EDITS)) > share * len(given), 60)  # type: ignore[misc]
            editor.kill()
            editor.start()
            editor.wait_ready()
        wait_until(lambda: len(records(deployment, EDITS)) >= len(given), what="every outcome")
        editor.wait_ready()
        wait_until(lambda: editor.state()["seq"] == deltas_in_log(deployment)[-1].seq)
        outcomes, deltas = outcomes_in_log(deployment), deltas_in_log(deployment)
        assert [outcome.feedback_id for outcome in outcomes] == [one.feedback_id for one in given]
        assert [delta.seq for delta in deltas] == list(range(1, len(deltas) + 1))
        assert [delta.term for delta in deltas if delta.op == "lead"] == [1, 2, 3, 4]
        causes = Counter(delta.cause.feedback_id for delta in deltas if delta.cause is not UNSET)
        assert max(causes.values()) == 1
        assert {o.feedback_id: o.seq for o in outcomes if o.seq is not UNSET} == {
            delta.cause.feedback_id: delta.seq for delta in deltas if delta.cause is not UNSET
        }
        replayed = replay_deltas(deployment.kafka)
        assert replayed is not None
        assert replayed.digest.hex() == editor.state()["digest"]
        assert replayed.state_digest() == editor.state()["state_digest"]


@pytest.fixture
def pair(deployment: Settings, folder: Path) -> Iterator[tuple[Forked, Forked]]:
    """One leading editor and one standby, with sessions so long that waiting for two of them would fail the test."""
    deployment = deployment.replace(session_timeout=SESSION)
    with Forked("first", "edit", deployment, folder) as first:
        first.wait_ready(90)
        assert leads(first)
        with Forked("second", "edit", deployment, folder) as second:
            second.wait_ready(90)
            assert second.state()["leadership"] == "standby"
            yield first, second


class TestStandby:
    """Two editors of one codebook: one leads, and the standby has the same state."""

    def test_it_follows_and_takes_over_at_once_when_the_leader_stops(
        self, deployment: Settings, users: Users, pair: tuple[Forked, Forked]
    ) -> None:
        first, second = pair
        assert users.correct(flag("f0", PROMPTS[0], "museum"))["f0"].seq == 2
        wait_until(lambda: second.state()["seq"] == first.state()["seq"] == 2)
        assert second.state()["state_digest"] == first.state()["state_digest"]
        assert not second.state()["degraded"], "a standby writes no radii"
        assert leads(first)
        assert first.stop() == 0
        assert users.correct(flag("f1", PROMPTS[1], "river"))["f1"].seq == 4
        assert leads(second)
        assert [delta.term for delta in deltas_in_log(deployment)] == [1, 1, 2, 2]

    def test_it_takes_over_when_the_leader_is_killed(
        self, deployment: Settings, users: Users, pair: tuple[Forked, Forked]
    ) -> None:
        first, second = pair
        given = [flag(f"f{number}", prompt, "museum") for number, prompt in enumerate(PROMPTS[:12])]
        users.client.send(given)
        wait_until(lambda: len(outcomes_in_log(deployment)) > 3)
        first.kill()
        wait_until(lambda: leads(second), SESSION + ALLOWANCE, "a take-over in time")
        wait_until(lambda: len(outcomes_in_log(deployment)) == len(given), 60)
        assert [outcome.feedback_id for outcome in outcomes_in_log(deployment)] == [one.feedback_id for one in given]

    @pytest.mark.slow
    def test_a_leader_that_hung_stops_when_it_wakes_and_changes_nothing(
        self, deployment: Settings, users: Users, pair: tuple[Forked, Forked]
    ) -> None:
        first, second = pair
        users.client.send([flag(f"f{number}", PROMPTS[number], "museum") for number in range(12)])
        wait_until(lambda: len(outcomes_in_log(deployment)) > 1)
        first.pause()
        wait_until(lambda: leads(second), SESSION + ALLOWANCE, "a take-over in time")
        wait_until(lambda: len(outcomes_in_log(deployment)) == 12, 60)
        first.resume()
        assert first.wait() == 1
        assert leads(second)
        assert users.correct(flag("after", PROMPTS[20], "river"))["after"].status != "rejected"
        assert [outcome.feedback_id for outcome in outcomes_in_log(deployment)] == [
            *(f"f{number}" for number in range(12)),
            "after",
        ]
        assert [delta.term for delta in deltas_in_log(deployment) if delta.op == "lead"] == [1, 2]
        assert [event["event"] for event in first.events()].count("editor_stopped") == 1
        assert not [event for event in first.events() if "exception" in event]

    def test_an_editor_of_another_layer_stops_before_it_joins(
        self, deployment: Settings, users: Users, folder: Path
    ) -> None:
        with Forked("first", "edit", deployment, folder) as first:
            first.wait_ready(90)
            users.correct(flag("f0", PROMPTS[0], "museum"))
            other = Forked("other", "edit", deployment, folder, layer="model.layers[0].mlp.up_proj")
            assert other.run(90) == 1
            assert "is of layer" in other.stderr() or "is of model" in other.stderr()
            assert users.correct(flag("f1", PROMPTS[1], "river"))["f1"].seq == 3
            assert leads(first)
        assert [delta.term for delta in deltas_in_log(deployment)] == [1, 1, 1]


@pytest.mark.slow
def test_of_three_editors_one_leads_and_another_takes_over_each_time(
    deployment: Settings, users: Users, folder: Path
) -> None:
    given = [flag(f"f{number}", prompt, "museum") for number, prompt in enumerate(PROMPTS)]
    with ExitStack() as running:
        editors = [running.enter_context(Forked(name, "edit", deployment, folder)) for name in ("one", "two", "three")]
        for editor in editors:
            editor.wait_ready(90)
        users.client.send(given)
        for share in (0.2, 0.6):
            wait_until(lambda share=share: len(outcomes_in_log(deployment)) > share * len(given), 60)  # type: ignore[misc]
            (leader,) = filter(leads, editors)
            editors.remove(leader)
            assert {editor.state()["leadership"] for editor in editors} == {"standby"}
            leader.kill()
            bound = deployment.kafka.session_timeout + ALLOWANCE
            wait_until(lambda: any(leads(editor) for editor in editors), bound, "a take-over in time")
        wait_until(lambda: len(outcomes_in_log(deployment)) == len(given), 60)
        assert leads(editors[0])
        deltas = deltas_in_log(deployment)
        assert [outcome.feedback_id for outcome in outcomes_in_log(deployment)] == [one.feedback_id for one in given]
        assert [delta.seq for delta in deltas] == list(range(1, len(deltas) + 1))
        assert [delta.term for delta in deltas if delta.op == "lead"] == [1, 2, 3]
        assert max(Counter(delta.cause.feedback_id for delta in deltas if delta.cause is not UNSET).values()) == 1


@pytest.mark.slow
def test_a_decision_longer_than_two_sessions_keeps_the_leadership(
    deployment: Settings, users: Users, folder: Path
) -> None:
    seconds = 2 * deployment.kafka.session_timeout
    with Forked("slow", "edit", deployment, folder, sabotage=partial(train_slowly, seconds)) as slow:
        slow.wait_ready(90)
        with Forked("standby", "edit", deployment, folder) as standby, users.client.outcomes() as outcomes:
            standby.wait_ready(90)
            users.client.send([flag("f", PROMPTS[0], "museum")])

            def decided() -> bool:
                assert (leads(slow), leads(standby)) == (True, False)
                assert slow.live() == (200, "ok\n")
                return bool(outcomes.wait(["f"], 0.2))

            wait_until(decided, 6 * seconds)
            taken = outcomes.wait(["f"], 0)["f"].seconds
            assert taken is not UNSET
            assert taken >= seconds
            assert users.correct(Feedback(v=1, feedback_id="undo", undo="f"))["undo"].status == "undone"
            assert decided()
    assert [outcome.feedback_id for outcome in outcomes_in_log(deployment)] == ["f", "undo"]
    assert [(delta.term, delta.op) for delta in deltas_in_log(deployment)] == [(1, "lead"), (1, "add"), (1, "undo")]


@pytest.mark.slow
def test_a_leader_with_a_stalled_decision_loses_the_leadership_and_stops_later(
    deployment: Settings, users: Users, folder: Path
) -> None:
    settings = deployment.replace(stall_timeout=8.0)
    with Forked("stuck", "edit", settings, folder, sabotage=partial(train_slowly, 35.0)) as stuck:
        stuck.wait_ready(90)
        with Forked("standby", "edit", settings, folder) as standby:
            standby.wait_ready(90)
            users.client.send([flag("f", PROMPTS[0], "museum")])
            wait_until(lambda: "training_slowly" in stuck.stderr())
            wait_until(lambda: leads(standby), settings.kafka.stall_timeout + ALLOWANCE, "a take-over in time")
            assert stuck.live()[0] == 503
            assert metric(stuck.port, "gracestream_stalled") == 1
            assert metric(stuck.port, "gracestream_feedback_lag") == 1
            wait_until(lambda: outcomes_in_log(settings))
            assert stuck.wait(60) == 1
            assert "set GRACESTREAM_STALL_TIMEOUT higher" in stuck.stderr()
            assert "another editor has taken the lead, in term 2" in stuck.stderr()
            assert users.correct(flag("g", PROMPTS[1], "river"))["g"].seq == 4
    assert [outcome.feedback_id for outcome in outcomes_in_log(settings)] == ["f", "g"]
    assert [(delta.term, delta.op) for delta in deltas_in_log(settings)][:3] == [(1, "lead"), (2, "lead"), (2, "add")]


@pytest.mark.slow
def test_an_editor_with_a_stalled_decision_ends_itself(deployment: Settings, users: Users, folder: Path) -> None:
    settings = deployment.replace(stall_timeout=3.0)
    with Forked("stuck", "edit", settings, folder, sabotage=partial(hang, 2.0)) as stuck:
        stuck.wait_ready(90)
        assert metric(stuck.port, "gracestream_stalled") == 0
        users.client.send([flag("f", PROMPTS[0], "museum")])
        assert stuck.wait(60) == 1
        assert "killed_after_stall" in stuck.stderr()
        assert "the editor is stalled: it has been at one piece of work for" in stuck.stderr()
    with Forked("next", "edit", settings, folder), users.client.outcomes() as outcomes:
        assert outcomes.wait(["f"], 60)["f"].status == "added"


def test_an_undo_may_take_longer_than_the_stall_timeout(deployment: Settings, users: Users, folder: Path) -> None:
    settings = deployment.replace(stall_timeout=8.0)
    with Forked("slow", "edit", settings, folder, sabotage=partial(undo_slowly, 3.0)) as slow:
        slow.wait_ready(90)
        users.correct(*(flag(f"f{number}", PROMPTS[number], "museum") for number in range(6)))
        seconds = 3.0 * len(deltas_in_log(settings))
        assert seconds > 2 * settings.kafka.stall_timeout
        with Forked("standby", "edit", settings, folder) as standby, users.client.outcomes() as outcomes:
            standby.wait_ready(90)
            users.client.send([Feedback(v=1, feedback_id="undo", undo="f0"), flag("after", PROMPTS[6], "river")])

            def decided() -> bool:
                assert (leads(slow), leads(standby)) == (True, False)
                assert slow.live() == (200, "ok\n")
                return len(outcomes.wait(["undo", "after"], 0.2)) == 2

            wait_until(decided, 4 * seconds)
            found = outcomes.wait(["undo", "after"], 0)
    assert found["undo"].status == "undone"
    assert found["after"].seq is not UNSET
    assert {delta.term for delta in deltas_in_log(settings)} == {1}


@pytest.mark.slow
def test_an_editor_goes_on_after_kafka_was_restarted(
    deployment: Settings, users_of: Callable[[Settings], Users], folder: Path
) -> None:
    with LocalKafka(folder / "kafka") as kafka:
        settings = deployment.replace(kafka=kafka.bootstrap)
        create_topics(settings.kafka, partitions=1, replication=1)
        users = users_of(settings)
        with Forked("editor", "edit", settings, folder) as editor:
            editor.wait_ready(90)
            users.client.send([flag(f"f{number}", PROMPTS[number], "museum") for number in range(12)])
            wait_until(lambda: len(outcomes_in_log(settings)) > 1)
            kafka.kill()
            kafka.start()
            users.client.send([flag("after", PROMPTS[20], "museum")])
            wait_until(lambda: len(outcomes_in_log(settings)) == 13, 60, "every outcome")
            assert editor.running
        given = [*(f"f{number}" for number in range(12)), "after"]
        assert [outcome.feedback_id for outcome in outcomes_in_log(settings)] == given


class TestRedis:
    """An editor, and a Redis that differs from the log."""

    def in_redis(self, history: History) -> Codebook:
        """The codebook of the log, once Redis agrees with it."""
        wait_for_open_transactions(history.settings, "deltas")
        replayed = replay_deltas(history.settings.kafka)
        assert replayed is not None
        radii = {entry: float(radius) for entry, radius in zip(replayed.entry_ids, replayed.radii_N, strict=True)}
        head = wait_until(lambda: history.store.read_head(0))
        wait_until(lambda: (found := history.store.read_head(0)) is not None and found.seq == replayed.seq)
        assert history.store.read_radii() == pytest.approx(radii, rel=1e-6)
        head = history.store.read_head(0)
        assert head is not None
        assert (head.term, head.digest) == (replayed.term, replayed.digest.hex())
        return replayed

    def test_an_empty_or_old_redis_is_brought_up_to_date(
        self, deployment: Settings, users: Users, folder: Path
    ) -> None:
        history = History(deployment)
        with Forked("editor", "edit", deployment, folder) as editor:
            editor.wait_ready(90)
            users.correct(*(flag(f"f{number}", prompt, "museum") for number, prompt in enumerate(PROMPTS[:4])))
            before = self.in_redis(history)

            editor.kill()
            history.empty_redis()
            editor.start()
            editor.wait_ready()
            assert self.in_redis(history).seq == before.seq + 1, "a new term"

            editor.kill()
            older = replay_deltas(deployment.kafka, seq=3)
            assert older is not None
            history.empty_redis()
            history.store.rebuild(older)
            editor.start()
            editor.wait_ready()
            assert len(self.in_redis(history)) == len(before)

            history.empty_redis()
            assert len(self.in_redis(history)) == len(before), "an idle editor fills Redis again"

            editor.pause()
            users.client.send([flag(f"f{number}", PROMPTS[number], "museum") for number in (4, 5)])
            history.empty_redis()
            editor.resume()
            wait_until(lambda: len(outcomes_in_log(deployment)) == 6)
            assert len(self.in_redis(history)) > len(before), "a busy editor does so, too"
        history.close()

    def test_a_redis_ahead_of_the_log_stops_the_editor(self, deployment: Settings, folder: Path) -> None:
        history = History(deployment)
        elsewhere = Codebook(deployment.model.codebook, MODEL, LAYER)
        elsewhere.apply(sealed(elsewhere, op="lead", term=7))
        elsewhere.apply(sealed(elsewhere, added("e", [1.0], 1.0)))
        history.store.rebuild(elsewhere)
        editor = Forked("editor", "edit", deployment, folder)
        assert editor.run(90) == 1
        assert "Redis has delta 2 of term 7, and the log ends with delta 0 of term 0: another editor" in editor.stderr()
        assert deltas_in_log(deployment) == []
        assert not [event for event in editor.events() if "exception" in event]
        history.close()


def test_requests_before_a_correction_are_read_before_its_decision(
    deployment: Settings, users: Users, folder: Path
) -> None:
    with Forked("editor", "edit", deployment, folder) as editor:
        editor.wait_ready()
        editor.pause()
        users.client.send([question(f"q{number}", text) for number, text in enumerate(PROMPTS)])
        users.client.send([flag("f0", PROMPTS[0], "museum")])
        editor.resume()
        wait_until(lambda: outcomes_in_log(deployment))
        cause = deltas_in_log(deployment)[-1].cause
        assert cause is not UNSET
        assert cause.traffic == dict(Counter(str(record.partition) for record in records(deployment, REQUESTS)))


def test_an_editor_becomes_ready_while_traffic_flows(deployment: Settings, users: Users, folder: Path) -> None:
    stop = threading.Event()

    def traffic() -> None:
        number = 0
        while not stop.is_set():
            users.client.send([question(f"q{number}", PROMPTS[number % len(PROMPTS)])])
            number += 1
            time.sleep(0.01)

    flowing = threading.Thread(target=traffic)
    flowing.start()
    try:
        with Forked("editor", "edit", deployment, folder) as editor:
            editor.wait_ready(60)
            wait_until(lambda: editor.state()["traffic"] > 0)
    finally:
        stop.set()
        flowing.join(10)
