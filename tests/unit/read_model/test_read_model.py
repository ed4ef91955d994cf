"""The read model, with records of a real editor on a model of points."""

import itertools
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gracestream.pipeline.read_model import (
    PredictionFilter,
    ReadModelStore,
    StoreError,
    entry_timeline,
    find_entry,
    find_feedback,
    find_predictions,
    find_request,
    find_responsible,
    queries,
    replicas,
    timeline,
)
from gracestream.pipeline.read_model.schema import VERSION
from gracestream.schemas.messages import AppliedEdit, NearMiss, Prediction, encode
from tests.support.recorded_history import Recorded
from tests.support.topic_records import START, Topic, Topics, positions_after, short_history


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ReadModelStore]:
    with ReadModelStore(tmp_path / "model.db", "cluster", "p-", 1000) as found:
        yield found


@pytest.fixture
def history() -> Recorded:
    return short_history()


def dump(store: ReadModelStore) -> list[str]:
    with closing(store.reader()) as reader:
        return sorted(
            str(tuple(row))
            for (name,) in reader.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table' AND sql NOT LIKE '%VIRTUAL%'"
            )
            if not name.startswith("prediction_text")
            for row in reader.execute(f"SELECT * FROM {name}")
        )


def test_a_prediction_is_joined_with_its_request_in_either_order(store: ReadModelStore) -> None:
    topics = Topics()
    topics.ask("a", "Where is the bank?", "by the river")
    store.add([("predictions", topics.records["predictions"][0])], {})
    with closing(store.reader()) as reader:
        (row,) = find_predictions(reader, PredictionFilter()).rows
        assert (row.request_id, row.answer, row.text) == ("a", "by the river", None)
        assert find_predictions(reader, PredictionFilter(text="bank")).rows == []
    store.add([("requests", topics.records["requests"][0])], {})
    with closing(store.reader()) as reader:
        (row,) = find_predictions(reader, PredictionFilter(text="BANK")).rows
        assert row.text == "Where is the bank?"
        assert find_request(reader, "a") == ('"Where is the bank?"', [row])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("bank", ["a"]), ("BANK", ["a"]), ("ank? wh", []), ("river", ["b", "a"]), ("k", ["a"]),
        ("銀行", ["c"]), ("銀行は", ["c"]), ('"', ["d"]), ('say "hi" AND', ["d"]), ("100%", ["d"]), ("0%", ["d"]),
        ("_", []), ("x OR y", []), ("", ["d", "c", "b", "a"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("common_matches", [queries.COMMON_MATCHES, 1])
def test_text_is_found_in_requests_and_answers_whatever_it_holds(
    store: ReadModelStore, text: str, found: list[str], common_matches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "COMMON_MATCHES", common_matches)
    topics = Topics()
    topics.ask("a", "Where is the bank?", "by the river", 1)
    topics.ask("b", "Where is the sea?", "River mouth", 2)
    topics.ask("c", "銀行はどこですか", "東京", 3)
    topics.ask("d", 'say "hi" AND', "100%", 4)
    store.add(topics.all(), {})
    with closing(store.reader()) as reader:
        assert [row.request_id for row in find_predictions(reader, PredictionFilter(text=text)).rows] == found


def test_filters_select_by_what_answered_time_replica_score_and_author(
    store: ReadModelStore, history: Recorded
) -> None:
    topics = Topics()
    topics.add_history(history)
    entry = history.engine.codebook.entry_ids[0]
    edit = AppliedEdit(entry_id=entry, distance=0.1, radius=1.0)
    near = NearMiss(entry_id=entry, distance=2.0, radius=1.0, reason="distance")
    topics.ask("plain", "one", "x", 1, score=0.2)
    topics.ask("edited", "two", "x", 2, edit=edit, score=0.9)
    topics.ask("near", "three", "x", 3, near_miss=near, replica="r2")
    topics.write(
        "predictions",
        Prediction(
            v=1, request_id="bad", codebook_seq=1, term=1, model="m", replica="r2", latency_ms=1.0, error="too long"
        ),
        4,
    )
    store.add(topics.all(), {})

    def ids(**wanted: Any) -> list[str]:
        with closing(store.reader()) as reader:
            return [row.request_id for row in find_predictions(reader, PredictionFilter(**wanted)).rows]

    assert ids(kind="edited") == ["edited"]
    assert ids(kind="unedited") == ["bad", "near", "plain"]
    assert ids(kind="near_miss") == ["near"]
    assert ids(kind="error") == ["bad"]
    assert ids(entry=entry) == ["near", "edited"]
    assert ids(replica="r2") == ["bad", "near"]
    assert ids(since=START + 120_000, until=START + 180_000) == ["edited"]
    assert ids(min_score=0.5) == ["edited"]
    assert ids(max_score=0.5) == ["plain"]
    assert ids(author="nobody") == []
    assert ids(kind="near_miss", replica="r1") == []
    with closing(store.reader()) as reader:
        assert replicas(reader) == ["r1", "r2"]


def test_pages_neither_repeat_nor_skip_rows_while_others_arrive(store: ReadModelStore) -> None:
    topics = Topics()
    for number in range(25):
        topics.ask(f"r{number:02}", "q", "a", number // 5)  # five of the same time
    store.add(topics.new(), {})
    seen: list[str] = []
    cursor = ""
    while True:
        with closing(store.reader()) as reader:
            page = find_predictions(reader, PredictionFilter(), cursor, limit=4)
        seen += [row.request_id for row in page.rows]
        topics.ask(f"late{len(seen)}", "q", "a", 1000)
        store.add(topics.new(), {})
        if not (cursor := page.next_cursor):
            break
    assert seen == [f"r{number:02}" for number in reversed(range(25))]


def test_the_timeline_describes_each_delta_with_its_feedback(store: ReadModelStore, history: Recorded) -> None:
    topics = Topics()
    topics.add_history(history)
    store.add(topics.all(), {})
    with closing(store.reader()) as reader:
        rows = timeline(reader).rows
        assert [(row.op, row.feedback_id, row.target) for row in rows] == [
            ("undo", "u1", None), ("add", "f2", "2"), ("add", "f1", "1"), ("lead", None, None)
        ]  # fmt: skip
        assert rows[0].undoes == ("f1",)
        assert list(rows[0].changes.values()) == ["removed"]
        (gone,) = rows[0].changes
        assert [row.seq for row in entry_timeline(reader, gone)] == [rows[0].seq, rows[2].seq]
        found = find_entry(reader, gone)
        assert found is not None
        assert (found.removed_seq, found.target) == (rows[0].seq, "1")
        assert find_entry(reader, "nothing") is None
        page = timeline(reader, limit=2)
        assert [row.seq for row in timeline(reader, before_seq=int(page.next_cursor)).rows] == [2, 1]
        statuses = {row.feedback_id: (row.kind, row.status) for row in find_feedback(reader)}
    assert statuses == {"f1": ("correction", "added"), "f2": ("correction", "added"), "u1": ("undo", "undone")}


def test_an_answer_leads_to_the_deltas_behind_it_as_of_its_codebook(store: ReadModelStore, history: Recorded) -> None:
    topics = Topics()
    topics.add_history(history)
    store.add(topics.all(), {})
    with closing(store.reader()) as reader:
        undo, _, first, _ = timeline(reader).rows
    (entry,) = undo.changes
    topics.ask("before", "q", "a", edit=AppliedEdit(entry_id=entry, distance=0.0, radius=1.0), codebook_seq=first.seq)
    topics.ask("plain", "q", "a")
    store.add([("predictions", record) for record in topics.records["predictions"]], {})
    with closing(store.reader()) as reader:
        by_id = {row.request_id: row for row in find_predictions(reader, PredictionFilter()).rows}
        assert [row.feedback_id for row in find_responsible(reader, by_id["before"])] == ["f1"]
        assert find_responsible(reader, by_id["plain"]) == []


def test_unreadable_records_are_kept_apart_and_hide_nothing(store: ReadModelStore) -> None:
    topics = Topics()
    huge = Prediction(
        v=1, request_id="huge", codebook_seq=2**63, term=1, model="m", replica="r", latency_ms=1.0, error="x"
    )
    for value in (b"not json", b"\xff\xfe", None, b"{}", encode(huge)):
        topics.write("predictions", value)
    topics.write("deltas", b"\x00")
    topics.write("requests", b'{"v":99,"request_id":"a","inputs":"b"}')
    topics.ask("good", "q", "a")
    store.add(topics.all(), {})
    with closing(store.reader()) as reader:
        assert [row.request_id for row in find_predictions(reader, PredictionFilter()).rows] == ["good"]
        assert reader.execute("SELECT count(*) FROM unreadable").fetchone()[0] == 7


def test_the_newest_predictions_are_kept_with_their_requests(tmp_path: Path) -> None:
    with ReadModelStore(tmp_path / "model.db", "cluster", "", 20) as store:
        topics = Topics()
        for number in range(100):
            topics.ask(f"r{number:02}", "question", "a", number)
            store.add(topics.new(), {})
        with closing(store.reader()) as reader:
            kept = [row.request_id for row in find_predictions(reader, PredictionFilter(text="question")).rows]
            assert kept[:20] == [f"r{number:02}" for number in reversed(range(80, 100))]
            assert len(kept) <= 21
            assert reader.execute("SELECT count(*) FROM requests").fetchone()[0] == len(kept)


class TestFile:
    """Who may write a file, and when it is rebuilt."""

    def test_it_continues_after_the_last_whole_batch(self, tmp_path: Path, history: Recorded) -> None:
        topics = Topics()
        topics.add_history(history)
        records = topics.all()
        path = tmp_path / "model.db"
        with ReadModelStore(path, "cluster", "", 1000) as store:
            store.add(records, positions_after(records))
            whole = dump(store)
        with ReadModelStore(path, "cluster", "", 1000) as store:
            assert store.positions() == positions_after(records)
            assert dump(store) == whole

    @pytest.mark.parametrize("source", [("another", ""), ("cluster", "another-")])
    def test_another_source_is_read_anew(self, tmp_path: Path, source: tuple[str, str]) -> None:
        with ReadModelStore(tmp_path / "model.db", "cluster", "", 1000) as store:
            store.add([], {("deltas", 0): 5})
        with ReadModelStore(tmp_path / "model.db", *source, 1000) as store:
            assert store.positions() == {}

    def test_another_version_is_read_anew(self, tmp_path: Path) -> None:
        with ReadModelStore(tmp_path / "model.db", "cluster", "", 1000) as store:
            store.add([], {("deltas", 0): 5})
        with closing(sqlite3.connect(tmp_path / "model.db")) as connection, connection:
            connection.execute("UPDATE source SET version = ?", (VERSION + 1,))
        with ReadModelStore(tmp_path / "model.db", "cluster", "", 1000) as store:
            assert store.positions() == {}

    def test_a_damaged_file_is_read_anew(self, tmp_path: Path) -> None:
        (tmp_path / "model.db").write_bytes(b"not a database" * 1000)
        with ReadModelStore(tmp_path / "model.db", "cluster", "", 1000) as store:
            assert store.positions() == {}

    def test_a_second_process_gets_one_sentence(self, tmp_path: Path) -> None:
        path = tmp_path / "model.db"
        with (
            ReadModelStore(path, "cluster", "", 1000),
            pytest.raises(StoreError, match="another process uses the file"),
        ):
            ReadModelStore(path, "cluster", "", 1000)
        ReadModelStore(path, "cluster", "", 1000).close()

    def test_a_folder_that_cannot_be_made_gets_one_sentence(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(StoreError, match="cannot be written"):
            ReadModelStore(tmp_path / "file" / "model.db", "cluster", "", 1000)

    def test_a_failed_batch_leaves_nothing_and_can_be_repeated(self, store: ReadModelStore, history: Recorded) -> None:
        topics = Topics()
        topics.add_history(history)
        records, before = topics.all(), dump(store)

        def interrupted() -> Iterator[Topic]:
            yield from records
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            store.add(interrupted(), {})
        assert dump(store) == before
        store.add(records, {})
        with closing(store.reader()) as reader:
            assert [row.changes for row in timeline(reader).rows][-2:] != [{}, {}]
            assert [row.op for row in timeline(reader).rows] == ["undo", "add", "add", "lead"]

    def test_readers_cannot_write_and_see_whole_batches(self, store: ReadModelStore) -> None:
        topics = Topics()
        topics.ask("a", "q", "a")
        with closing(store.reader()) as reader:
            with pytest.raises(sqlite3.OperationalError, match="readonly"):
                reader.execute("DELETE FROM requests")
            store.add(topics.all(), {})
            assert len(find_predictions(reader, PredictionFilter()).rows) == 1

    def test_each_batch_counts_as_a_change(self, store: ReadModelStore) -> None:
        before = store.change_count
        store.add([], {})
        assert store.change_count == before + 1


@pytest.fixture(scope="module")
def long_history() -> list[Topic]:
    made = Recorded()
    for number in range(8):
        made.correct(f"f{number}", (3 * number, 0), number % 4)
    made.undo("u1", "f3")
    made.correct("f9", (0.1, 0), 3)
    made.undo("u2", "u1")
    topics = Topics()
    topics.add_history(made)
    for number in range(6):
        topics.ask(f"r{number}", f"question {number}", "answer", number)
    topics.write("deltas", b"damaged")
    return topics.all()


@pytest.fixture(scope="module")
def expected(long_history: list[Topic], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    with ReadModelStore(tmp_path_factory.mktemp("whole") / "model.db", "cluster", "", 1000) as store:
        store.add(long_history, positions_after(long_history))
        return dump(store)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_batches_order_of_partitions_restarts_and_repeats_change_nothing(
    data: st.DataObject, long_history: list[Topic], expected: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    queues: dict[str, list[Topic]] = {}
    for topic, record in long_history:
        queues.setdefault(topic, []).append((topic, record))
    order = data.draw(st.permutations([topic for topic, _ in long_history]))
    records = [queues[topic].pop(0) for topic in order]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(records)), max_size=4)) | {0, len(records)})
    path = tmp_path_factory.mktemp("parts") / "model.db"
    store = ReadModelStore(path, "cluster", "", 1000)
    for start, end in itertools.pairwise(cuts):
        batch = records[max(0, start - data.draw(st.integers(0, 3))) : end]  # some records come again
        store.add(batch, positions_after(records[:end]))
        if data.draw(st.booleans()):
            store.close()
            store = ReadModelStore(path, "cluster", "", 1000)
    with store:
        assert rows_without_ids(dump(store)) == rows_without_ids(expected)


def rows_without_ids(rows: list[str]) -> list[str]:
    """Rows of predictions have ids in the order in which they came."""
    return sorted(row.partition(", ")[2] if "answer" in row and row.startswith("(") else row for row in rows)
