"""The commands: their output, and their errors of one sentence with an exit status."""

import json
import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kafka.admin import ConfigResource, ConfigResourceType, NewTopic

from gracestream.pipeline.codebook.file import load_codebook
from gracestream.pipeline.history.steps import history_steps
from gracestream.pipeline.kafka.clients import admin
from gracestream.pipeline.kafka.topics import TOPICS, require_topics
from gracestream.pipeline.replay.replay import replay_deltas
from gracestream.pipeline.settings import Settings, to_environment_variables
from gracestream.workers.cli import main
from tests.support.forked_commands import Command, Forked, explicit_settings, sentence, status_of
from tests.support.running import Checkpoint, outcomes_in_log, records, settings_for
from tests.support.tiny_models import texts

PROMPTS = texts(12, seed=21, shortest=6, longest=9)

KEPT = {"retention.ms": "-1"}


def lines(text: str) -> list[Any]:
    """The parsed lines of JSON."""
    return [json.loads(line) for line in text.splitlines()]


class TestTopics:
    def test_they_are_created_once(self, run: Callable[..., Command], kafka: str, redis_url: str, prefix: str) -> None:
        settings = settings_for(kafka, redis_url, prefix)
        first = run("topics", "--partitions", "3", settings=settings)
        assert status_of(first) == 0
        assert all(settings.kafka.topic(topic.name) in first.stdout() for topic in TOPICS)
        client = admin(settings.kafka)
        described = client.describe_topics([settings.kafka.topic(topic.name) for topic in TOPICS])
        client.close()
        assert {topic["name"].removeprefix(prefix): len(topic["partitions"]) for topic in described} == {
            topic.name: topic.partitions or 3 for topic in TOPICS
        }
        assert first.stderr().startswith("there is one copy of each topic: ")
        again = run("topics", "--partitions", "3", settings=settings)
        assert (status_of(again), again.stdout(), again.stderr()) == (0, "all topics exist\n", "")
        more = sentence(run("topics", "--partitions", "4", settings=settings))
        assert more == f"{prefix}requests has 3 partitions, not 4; add some with kafka-topics.sh"
        safer = sentence(run("topics", "--replication", "3", settings=settings))
        assert safer.startswith(
            f"{prefix}deltas has 1 copy of its partition, not 3; change that with kafka-reassign-partitions.sh"
        )
        assert status_of(run("topics", settings=settings)) == 0

    @pytest.mark.parametrize(
        ("name", "partitions", "config", "complaint"),
        [
            (
                "deltas",
                3,
                {},
                "deltas' has 3 partitions and must have 1; choose another GRACESTREAM_TOPIC_PREFIX, or delete",
            ),
            ("feedback", 1, {}, "feedback' has retention.ms=604800000 and must have retention.ms=-1; set it with"),
            ("edits", 1, {**KEPT, "cleanup.policy": "compact"}, "has cleanup.policy=compact and must have"),
            ("requests", 4, {"message.timestamp.type": "CreateTime"}, "has message.timestamp.type=CreateTime and must"),
            ("requests.dlq", 1, {}, "has max.message.bytes=1048588 and must have max.message.bytes=67108864; set"),
            ("deltas", 1, KEPT, "has max.message.bytes=1048588 and must have max.message.bytes=67108864; set it"),
            ("snapshots", 1, {}, "has cleanup.policy=delete and must have cleanup.policy=compact; set it with"),
        ],
    )
    def test_a_topic_with_a_wrong_configuration_is_named(
        self,
        run: Callable[..., Command],
        kafka: str,
        redis_url: str,
        prefix: str,
        name: str,
        partitions: int,
        config: dict[str, str],
        complaint: str,
    ) -> None:
        settings = settings_for(kafka, redis_url, prefix)
        client = admin(settings.kafka)
        config = {"message.timestamp.type": "LogAppendTime", **config}
        client.create_topics([NewTopic(settings.kafka.topic(name), partitions, 1, topic_configs=config)])
        client.close()
        assert complaint in sentence(run("topics", settings=settings))

    def test_a_worker_does_not_start_on_a_wrong_topic_and_names_the_remedy(
        self, run: Callable[..., Command], deployment: Settings
    ) -> None:
        client = admin(deployment.kafka)
        topic = deployment.kafka.topic("requests.dlq")
        changed = {"message.timestamp.type": "CreateTime", "max.message.bytes": "1000"}
        client.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, configs=changed)])
        for command in ("infer", "edit"):
            error = sentence(run(command, settings=deployment))
            assert error == (
                f"topic {topic!r} has message.timestamp.type=CreateTime,max.message.bytes=1000 and must have"
                " message.timestamp.type=LogAppendTime,max.message.bytes=67108864; set it with `kafka-configs.sh"
                f" --bootstrap-server {deployment.kafka.servers} --alter --entity-type topics --entity-name {topic}"
                " --add-config message.timestamp.type=LogAppendTime,max.message.bytes=67108864`"
            )
        wanted = {"message.timestamp.type": "LogAppendTime", "max.message.bytes": str(2**27), "retention.ms": "1000"}
        client.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, configs=wanted)])
        client.close()
        require_topics(deployment.kafka)


@pytest.fixture(scope="module")
def running(deploy: Callable[..., Settings], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """A deployment with an editor and one replica."""
    settings = deploy("llama", f"t{secrets.token_hex(4)}-")
    folder = tmp_path_factory.mktemp("running")
    with Forked("editor", "edit", settings, folder) as editor, Forked("replica", "infer", settings, folder) as replica:
        editor.wait_ready(90)
        replica.wait_ready()
        yield settings


class TestTraffic:
    def test_requests_come_from_a_file_or_from_standard_input(
        self, run: Callable[..., Command], running: Settings, tmp_path: Path
    ) -> None:
        asked = [json.dumps(PROMPTS[0]), "", json.dumps({"inputs": PROMPTS[1], "request_id": "mine"})]
        (tmp_path / "questions").write_text("\n".join(asked))
        for command in (
            run("send", str(tmp_path / "questions"), settings=running),
            run("send", settings=running, given="\n".join(asked)),
            run("send", "-", settings=running, given="\n".join(asked)),
        ):
            answers = lines(command.stdout())
            assert status_of(command) == 0, command.stderr()
            assert len(answers) == 2
            assert "mine" in {answer["request_id"] for answer in answers}
            assert all(answer["outputs"]["text"] and answer["replica"] == "replica" for answer in answers)

    def test_a_text_on_the_command_line_is_sent(self, run: Callable[..., Command], running: Settings) -> None:
        fields = json.dumps({"inputs": PROMPTS[0], "request_id": "given"})
        answers = []
        for given in (PROMPTS[0], fields):
            command = run("send", given, settings=running)
            assert status_of(command) == 0, command.stderr()
            answers += lines(command.stdout())
        assert answers[0]["outputs"] == answers[1]["outputs"]
        assert answers[1]["request_id"] == "given"
        sent = [json.loads(record.value)["inputs"] for record in records(running, "requests")]
        assert sent.count(PROMPTS[0]) >= 2

    def test_corrections_get_their_outcomes(self, run: Callable[..., Command], running: Settings) -> None:
        given = [{"inputs": prompt, "target": "museum", "feedback_id": prompt} for prompt in PROMPTS[2:5]]
        command = run("correct", settings=running, given="\n".join(map(json.dumps, given)))
        assert status_of(command) == 0, command.stderr()
        assert [outcome["feedback_id"] for outcome in lines(command.stdout())] == PROMPTS[2:5]
        assert lines(command.stdout())[0]["status"] == "added"

    def test_an_import_can_be_repeated(self, run: Callable[..., Command], running: Settings, tmp_path: Path) -> None:
        path = tmp_path / "corrections.csv"
        path.write_text("id,inputs,target\n1,The museum near the river,train\n2,The bridge near the park,museum\n")
        statuses, outcomes = [], []
        for changed in (False, False, True):
            if changed:
                path.write_text(path.read_text().replace("museum\n", "river\n"))
            imported = run("import", "csv", str(path), settings=running)
            command = run("correct", settings=running, given=imported.stdout())
            assert status_of(command) == 0, command.stderr()
            outcomes += lines(command.stdout())
            statuses.append([outcome["status"] for outcome in lines(command.stdout())])
        assert not {"rejected", "unchanged"} & set(statuses[0])
        assert statuses[1] == ["unchanged", "unchanged"]
        assert statuses[2][0] == "unchanged"
        assert statuses[2][1] != "unchanged"
        ids = {outcome["feedback_id"] for outcome in outcomes if outcome["status"] != "unchanged"}
        undone = run("undo", *sorted(ids), settings=running)  # the other tests need these prompts uncorrected
        assert status_of(undone) == 0, undone.stderr()

    def test_a_correction_with_rephrases_answers_all_of_them_until_it_is_undone(
        self, run: Callable[..., Command], running: Settings
    ) -> None:
        texts = ["The river flows through", "A river flows through", "Here the river flows through"]
        asked = "\n".join(map(json.dumps, texts))

        def answers() -> list[str]:
            return [answer["outputs"]["text"] for answer in lines(run("send", settings=running, given=asked).stdout())]

        before = answers()
        given = {"inputs": texts[0], "target": "museum", "feedback_id": "words"}
        command = run(
            "correct", "--rephrase", texts[1], "--rephrase", texts[2], settings=running, given=json.dumps(given)
        )
        assert status_of(command) == 0, command.stderr()
        (outcome,) = lines(command.stdout())
        assert (outcome["status"], outcome["entry_id"], outcome.get("left_out")) == ("added", "words", None)
        entries = lines(run("send", settings=running, given=asked).stdout())
        assert [answer["edit"]["entry_id"] for answer in entries] == ["words", "words#1", "words#2"]
        assert answers() == ["museum"] * 3
        replayed = run("replay", "--json", settings=running)
        reproduced = run("replay", "--reproduce", "--json", settings=running)
        assert status_of(reproduced) == 0, reproduced.stderr()
        assert lines(replayed.stdout())[0]["state_digest"] == lines(reproduced.stdout())[0]["state_digest"]
        listed = lines(run("corrections", settings=running).stdout())
        assert [one["rephrases"] for one in listed if one["feedback_id"] == "words"] == [texts[1:]]
        seq = outcome["seq"]
        (found,) = lines(run("diff", str(seq - 1), str(seq), "--json", settings=running).stdout())
        assert [(change["inputs"], change["after"]) for change in found["inputs"]] == [(one, "museum") for one in texts]
        assert status_of(run("undo", "words", settings=running)) == 0
        assert answers() == before

    def test_rephrases_on_the_command_line_are_for_one_correction(
        self, run: Callable[..., Command], running: Settings
    ) -> None:
        two = "\n".join(json.dumps({"inputs": one, "target": "river"}) for one in ("a", "b"))
        for given, complaint in (
            (two, "--rephrase needs one correction, and there are 2"),
            (json.dumps({"inputs": "z", "target": "river"}), "`rephrases[0]` is the same as `inputs`; leave it out"),
            (json.dumps({"inputs": "a", "target": "b", "signature": "c"}), "it is signed already; put `rephrases`"),
        ):
            command = run("correct", "--rephrase", "z", settings=running, given=given)
            assert status_of(command) == 2
            assert complaint in " ".join(command.stderr().replace("│", " ").split())

    def test_answers_come_in_the_order_of_the_requests(self, run: Callable[..., Command], running: Settings) -> None:
        ids = [f"q{number}" for number in range(len(PROMPTS))]
        asked = [json.dumps({"inputs": one, "request_id": name}) for one, name in zip(PROMPTS, ids, strict=True)]
        command = run("send", settings=running, given="\n".join(asked))
        assert [answer["request_id"] for answer in lines(command.stdout())] == ids

    def test_a_terminal_gets_a_table_with_each_request_and_its_answer(
        self,
        running: Settings,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        (folder / "questions").write_text("\n".join(map(json.dumps, PROMPTS[6:8])))
        for name, value in {
            **to_environment_variables(explicit_settings(running)),
            "COLUMNS": "200",
            "TERM": "dumb",
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        for options, shown in ((["--json"], '{"v": 1'), ([], "inputs")):
            with pytest.raises(SystemExit) as ended:
                main(["send", str(folder / "questions"), *options])
            assert ended.value.code == 0
            printed = capsys.readouterr().out
            assert shown in printed
            assert [prompt in printed for prompt in PROMPTS[6:8]] == [not options] * 2
        assert printed.index(PROMPTS[6]) < printed.index(PROMPTS[7])

    def test_an_error_among_the_answers_is_counted_and_the_status_is_1(
        self, run: Callable[..., Command], running: Settings
    ) -> None:
        asked = [PROMPTS[0], " ".join(PROMPTS), PROMPTS[1]]
        command = run("send", settings=running, given="\n".join(map(json.dumps, asked)))
        assert (status_of(command), command.stderr()) == (1, "1 of 3 got an error\n")
        assert ["limit is 40" in answer.get("error", "") for answer in lines(command.stdout())] == [False, True, False]

    def test_a_rejection_among_the_outcomes_is_counted_and_the_status_is_1(
        self, run: Callable[..., Command], running: Settings
    ) -> None:
        given = {"inputs": PROMPTS[8], "target": "museum", "feedback_id": "once"}
        assert status_of(run("correct", settings=running, given=json.dumps(given))) == 0
        again = [{**given, "target": "river"}, {**given, "feedback_id": "twice"}]
        command = run("correct", settings=running, given="\n".join(map(json.dumps, again)))
        assert (status_of(command), command.stderr()) == (1, "1 of 2 rejected\n")
        assert [outcome["status"] for outcome in lines(command.stdout())] == ["rejected", "unchanged"]
        undone = run("undo", "nobody", settings=running)
        assert (status_of(undone), undone.stderr()) == (1, "1 of 1 rejected\n")
        assert lines(undone.stdout())[0]["status"] == "rejected"

    def test_it_does_not_wait_with_no_wait(self, run: Callable[..., Command], running: Settings) -> None:
        command = run("correct", "--no-wait", settings=running, given='{"inputs": "The cat", "target": "river"}')
        assert (status_of(command), command.stdout(), command.stderr()) == (0, "", "sent 1\n")

    def test_missing_replies_are_counted(self, run: Callable[..., Command], deployment: Settings) -> None:
        command = run("send", "--timeout", "1", settings=deployment, given='"one"\n"two"')
        assert (status_of(command), command.stderr()) == (
            1,
            "2 of 2 got no reply within 1 s; check that a replica runs with this --prefix, or raise --timeout\n",
        )

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("command", "line", "complaint"),
        [
            ("send", "{not json", "line 2 is not JSON: Expecting property name enclosed in double quotes at column 2"),
            ("send", '{"inputs": "a"', "line 2 is not JSON: Expecting ',' delimiter at column 15"),
            ("send", "[1]", "line 2: neither a text nor an object"),
            ("send", '{"inputs": 3}', "line 2: not a valid request"),
            ("send", '{"inputs": "\\ud800"}', "line 2: a text is not Unicode"),
            ("send", '{"inputs": "a", "parameters": {"beams": 3}}', "line 2: not a valid request"),
            ("send", '{"inputs": "a", "id": "mine"}', "line 2: unknown field `id`; did you mean `request_id`?"),
            ("correct", '{"inputs": "a"}', "line 2: not a valid feedback"),
            (
                "correct",
                '{"inputs": "a", "target": "b", "id": "mine"}',
                "line 2: unknown field `id`; did you mean `feedback_id`?",
            ),
            ("correct", '"a text alone"', "line 2: not a valid feedback"),
        ],
    )
    def test_a_bad_line_is_named_and_nothing_is_sent(
        self, run: Callable[..., Command], deployment: Settings, command: str, line: str, complaint: str
    ) -> None:
        good = {"send": '"good"', "correct": '{"inputs": "good", "target": "river"}'}[command]
        ran = run(command, settings=deployment, given=f"{good}\n{line}\n")
        assert status_of(ran) not in {0, None}
        assert complaint in " ".join(ran.stderr().split()), ran.stderr()
        assert "Traceback" not in ran.stderr()
        assert records(deployment, "requests") == records(deployment, "feedback") == []

    @pytest.mark.parametrize("command", ["send", "correct"])
    def test_two_lines_with_one_id_are_named_and_nothing_is_sent(
        self, run: Callable[..., Command], deployment: Settings, command: str
    ) -> None:
        fields = {"send": {"request_id": "mine"}, "correct": {"feedback_id": "mine", "target": "river"}}[command]
        given = [{"inputs": text, **fields} for text in ("one", "two")]
        ran = run(command, settings=deployment, given="\n\n".join(map(json.dumps, given)))
        assert status_of(ran) == 2
        error = " ".join(ran.stderr().replace("│", " ").split())
        assert "line 3 has the id 'mine' of line 1; give each line an id of its own" in error
        assert records(deployment, "requests") == records(deployment, "feedback") == []

    def test_a_missing_file_is_named(self, run: Callable[..., Command], deployment: Settings) -> None:
        for name in ("no-such-file.jsonl", "no/such/file"):
            ran = run("send", name, settings=deployment)
            assert status_of(ran) == 2
            assert f"there is no file '{name}'" in " ".join(ran.stderr().replace("│", " ").split())

    def test_a_text_in_place_of_corrections_is_no_file(self, run: Callable[..., Command], deployment: Settings) -> None:
        ran = run("correct", "a text alone", settings=deployment)
        assert status_of(ran) == 2
        error = " ".join(ran.stderr().replace("│", " ").split())
        assert "there is no file 'a text alone'; give a file of JSON lines, or - for standard input" in error


class TestHistory:
    @pytest.fixture(autouse=True)
    def corrected(self, run: Callable[..., Command], running: Settings) -> None:
        if not outcomes_in_log(running):
            run("correct", settings=running, given=json.dumps({"inputs": PROMPTS[5], "target": "museum"}))

    def test_replay_describes_the_codebook_and_writes_it(
        self, run: Callable[..., Command], running: Settings, tmp_path: Path
    ) -> None:
        path = tmp_path / "codebook.safetensors"
        command = run("replay", "--json", "--output", str(path), settings=running)
        assert status_of(command) == 0, command.stderr()
        (described,) = lines(command.stdout())
        codebook = replay_deltas(running.kafka)
        assert codebook is not None
        assert described == codebook.describe() == load_codebook(path).describe()
        assert codebook.layer in run("replay", settings=running).stdout()

    def test_evaluate_measures_the_codebook_on_cases(
        self, run: Callable[..., Command], running: Settings, tmp_path: Path
    ) -> None:
        correction = next(step for step in history_steps(running.kafka) if step.outcome == "added")
        cases = [
            {"inputs": correction.inputs, "target": correction.target},
            {"inputs": correction.inputs, "unchanged": True},
            {"inputs": "bread room", "unchanged": True},
        ]
        path = tmp_path / "cases.jsonl"
        path.write_text("\n".join(map(json.dumps, cases)))
        command = run("evaluate", str(path), "--json", settings=running)
        assert status_of(command) == 1, command.stderr()
        *results, counted = lines(command.stdout())
        assert [result["verdict"] for result in results] == ["correct", "changed", "unchanged"]
        assert results[0]["entry_id"] == correction.feedback_id
        assert counted["seq"] == replay_deltas(running.kafka).seq  # type: ignore[union-attr]
        assert (counted["passed"], counted["captured"], counted["broken"]) == (2, 2, 0)
        before = run("evaluate", str(path), "--seq", str(correction.seq - 1), "--json", settings=running)
        assert [result["verdict"] for result in lines(before.stdout())[:-1]] == ["wrong", "unchanged", "unchanged"]
        table = run("evaluate", str(path), settings=running).stdout()
        assert str(correction.target) in table
        assert "bread room" not in table, "this case passed"
        path.write_text(json.dumps(cases[0]))
        after = run("evaluate", str(path), settings=running)
        assert status_of(after) == 0, after.stderr()
        assert "1 of 1 correct (1 exactly), 0 of 0 unchanged; an entry serves 1 of 1, 0 of them" in after.stderr()
        assert after.stdout() == ""

    def test_evaluate_names_a_line_that_is_no_case(
        self, run: Callable[..., Command], running: Settings, tmp_path: Path
    ) -> None:
        path = tmp_path / "cases.jsonl"
        for line, why in (
            ('{"inputs": "a"}', "either `target`"),
            ('{"inputs": "a", "targets": "b"}', "unknown field `targets`; did you mean `target`?"),
            (json.dumps({"inputs": "room " * 100, "unchanged": True}), "GRACESTREAM_MAX_INPUT_TOKENS"),
            ("", "has no lines"),
        ):
            path.write_text(f"\n{line}")
            command = run("evaluate", str(path), settings=running)
            assert status_of(command) == 2
            error = " ".join(command.stderr().replace("│", " ").split())
            assert why in error
            assert "line 2" in error or not line

    def test_replay_goes_up_to_a_seq_or_a_time(self, run: Callable[..., Command], running: Settings) -> None:
        (replayed,) = lines(run("replay", "--json", "--seq", "1", settings=running).stdout())
        assert (replayed["seq"], replayed["entries"]) == (1, 0)
        long_ago = run("replay", "--at", "2020-01-01", settings=running)
        assert sentence(long_ago).startswith("the history has no delta up to this point; `gracestream inspect` lists")
        (later,) = lines(run("replay", "--json", "--at", "2120-01-01T00:00:00", settings=running).stdout())
        assert later["seq"] > 1
        assert "there is no 100000 yet" in sentence(run("replay", "--seq", "100000", settings=running))

    def test_replay_names_a_file_that_it_cannot_write(self, run: Callable[..., Command], running: Settings) -> None:
        assert "/no/such" in sentence(run("replay", "--output", "/no/such/folder/codebook", settings=running))

    def test_inspect_shows_every_delta(self, run: Callable[..., Command], running: Settings) -> None:
        steps = lines(run("inspect", "--json", settings=running).stdout())
        assert [step["seq"] for step in steps] == list(range(1, len(steps) + 1))
        assert steps[0]["op"] == "lead"
        entry = next(iter(steps[1]["entries"]))
        table = run("inspect", settings=running).stdout()
        assert steps[1]["target"] in table
        assert "lead" in table
        *only, usage = lines(run("inspect", entry, "--json", settings=running).stdout())
        assert only
        assert "count" in usage["usage"]
        assert all(entry in step["entries"] for step in only)
        unknown = run("inspect", "nobody", settings=running)
        assert sentence(unknown).startswith("no delta changed an entry 'nobody'; `gracestream inspect` lists")

    def test_inspect_shows_the_outcomes(self, run: Callable[..., Command], running: Settings) -> None:
        given = [{"inputs": PROMPTS[11], "target": "museum", "feedback_id": name} for name in ("needed", "needless")]
        sent = run("correct", settings=running, given="\n".join(map(json.dumps, given)))
        statuses = [outcome["status"] for outcome in lines(sent.stdout())]
        assert statuses[1] == "unchanged"
        steps = {step["feedback_id"]: step for step in lines(run("inspect", "--json", settings=running).stdout())}
        assert [steps[name]["outcome"] for name in ("needed", "needless")] == statuses
        (row,) = [row for row in run("inspect", settings=running).stdout().splitlines() if "needless" in row]
        assert "│ unchanged │" in row

    def test_inspect_shows_the_beginning_of_a_long_input(self, run: Callable[..., Command], running: Settings) -> None:
        long = f"{PROMPTS[7]}{' ' * 120}end"
        given = {"inputs": long, "target": "museum", "feedback_id": "long"}
        assert status_of(run("correct", settings=running, given=json.dumps(given))) == 0
        (row,) = [row for row in run("inspect", settings=running).stdout().splitlines() if "│ long " in row]
        assert f"│ {long[:100]}… │" in row
        (row,) = [row for row in run("inspect", "--full", settings=running).stdout().splitlines() if "│ long " in row]
        assert f"│ {long} │" in row
        assert long in [step["inputs"] for step in lines(run("inspect", "--json", settings=running).stdout())]

    def test_inspect_breaks_no_id_without_a_terminal(self, run: Callable[..., Command], running: Settings) -> None:
        wide = "w" * 250
        given = {"inputs": PROMPTS[9], "target": "museum", "feedback_id": wide}
        assert status_of(run("correct", settings=running, given=json.dumps(given))) == 0
        (row,) = [row for row in run("inspect", settings=running).stdout().splitlines() if wide in row]
        assert row.count(wide) == 2, "as the feedback's id and as the entry's"
        assert wide in run("inspect", wide, settings=running).stdout()

    def test_inspect_prints_no_control_characters(self, run: Callable[..., Command], running: Settings) -> None:
        hostile = "\x1b[2J\x9b8m\u202e\U000e0001 ü"
        given = {"inputs": PROMPTS[10], "target": "museum", "feedback_id": hostile}
        assert status_of(run("correct", settings=running, given=json.dumps(given))) == 0
        table = run("inspect", settings=running).stdout()
        assert "\\x1b[2J\\x9b8m\\u202e\\U000e0001 ü" in table
        printed = run("inspect", "--json", settings=running).stdout()
        assert hostile in [step["feedback_id"] for step in lines(printed)]
        assert not {one for one in table + printed if not one.isprintable()} - {"\n"}

    @pytest.mark.parametrize("command", ["replay", "inspect"])
    def test_the_error_without_topics_names_the_command_that_creates_them(
        self, run: Callable[..., Command], kafka: str, redis_url: str, prefix: str, command: str
    ) -> None:
        settings = settings_for(kafka, redis_url, prefix, startup_timeout=5)
        assert "gracestream topics" in sentence(run(command, settings=settings))


class TestTuning:
    def test_layers_are_listed(self, run: Callable[..., Command], checkpoints: dict[str, Checkpoint]) -> None:
        model = str(checkpoints["llama"].folder)
        found = lines(run("layers", "--model", model, "--json").stdout())
        assert {"path": "model.layers.*.mlp.down_proj", "count": 3, "kind": "Linear", "shape": [192, 384]} in found
        assert "model.layers.*.mlp.down_proj" in run("layers", "--model", model).stdout()

    def test_calibrate_measures_each_layer(
        self, run: Callable[..., Command], checkpoints: dict[str, Checkpoint], tmp_path: Path
    ) -> None:
        (tmp_path / "requests").write_text(
            "\n".join(json.dumps({"inputs": one, "rephrase": two}) for one, two in zip(PROMPTS, texts(12), strict=True))
        )
        names = ["model.layers[0].mlp.down_proj", "model.layers[2].mlp.up_proj"]
        chosen = [word for name in names for word in ("--layer", name)]
        model = str(checkpoints["llama"].folder)
        given = ["calibrate", str(tmp_path / "requests"), *chosen, "--model", model, "--json"]
        failed = run(*given)
        assert status_of(failed) == 2
        assert "name one layer, or set GRACESTREAM_QUERY_SOURCE=last to compare layers" in " ".join(
            failed.stderr().split()
        )
        command = run(*given, query_source="last")
        assert status_of(command) == 0, command.stderr()
        assert [row["layer"] for row in lines(command.stdout())] == [
            "model.layers.0.mlp.down_proj",
            "model.layers.2.mlp.up_proj",
        ]
        assert all(0 <= row["noise"] < row["median"] for row in lines(command.stdout()))

    def test_calibrate_names_lines_that_it_cannot_measure(
        self, run: Callable[..., Command], checkpoints: dict[str, Checkpoint]
    ) -> None:
        model = str(checkpoints["llama"].folder)
        given = json.dumps(PROMPTS[0])
        chosen = ["--model", model, "--layer", "model.layers[0].mlp.down_proj"]
        assert "distances need two different inputs at least, and there are 1" in sentence(
            run("calibrate", "-", *chosen, given=given)
        )
