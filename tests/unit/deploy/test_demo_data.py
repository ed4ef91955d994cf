"""The demo's data says what the demo assumes: no text twice, no control that is also corrected, no unknown label."""

import json
from collections import Counter

from gracestream.deploy.checkpoints.classifiers import INTENTS
from gracestream.deploy.demo import DEMO_FOLDER

Row = dict[str, str]


def rows(name: str) -> list[Row]:
    return [json.loads(line) for line in (DEMO_FOLDER / name).read_text(encoding="utf-8").splitlines()]


def texts(data: list[Row], *fields: str) -> list[str]:
    return [row[field].casefold() for row in data for field in fields]


def twice(values: list[str]) -> list[str]:
    return [value for value, count in Counter(values).items() if count > 1]


def test_facts_have_a_prompt_a_short_target_and_a_rephrase() -> None:
    facts = rows("facts.jsonl")
    assert len(facts) >= 60
    for fact in facts:
        assert set(fact) == {"question", "prompt", "target", "rephrase"}
        assert all(value and value == value.strip() for value in fact.values())
        assert fact["question"].endswith("?")
        assert 1 <= len(fact["target"].split()) <= 4


def test_no_prompt_of_the_facts_gives_its_answer_away() -> None:
    for fact in rows("facts.jsonl"):
        asked = f"{fact['question']} {fact['prompt']} {fact['rephrase']}".casefold().replace('"', " ").split()
        assert fact["target"].casefold() not in asked, fact


def test_facts_and_controls_share_no_prompt_and_repeat_none() -> None:
    facts, controls = rows("facts.jsonl"), rows("controls.jsonl")
    assert len(controls) >= 40
    assert all(set(control) == {"prompt"} for control in controls)
    assert twice(texts(facts, "question", "prompt", "rephrase") + texts(controls, "prompt")) == []


def test_each_intent_has_the_same_number_of_utterances() -> None:
    intents = rows(INTENTS.name)
    assert all(set(row) == {"text", "label", "split"} for row in intents)
    counts = Counter((row["label"], row["split"]) for row in intents)
    labels = {label for label, _ in counts}
    assert len(labels) == 10
    assert counts == {(label, split): count for label in labels for split, count in (("train", 25), ("traffic", 8))}


def test_intents_and_policy_share_no_text_and_repeat_none() -> None:
    assert twice(texts(rows(INTENTS.name), "text") + texts(rows("policy.jsonl"), "text", "rephrase")) == []


def test_the_policy_moves_utterances_from_one_known_intent_to_another() -> None:
    policy = rows("policy.jsonl")
    labels = {row["label"] for row in rows(INTENTS.name)}
    assert len(policy) >= 30
    for row in policy:
        assert set(row) == {"text", "target", "rephrase", "was"}
        assert {row["target"], row["was"]} <= labels
        assert row["target"] != row["was"]
    assert len({row["target"] for row in policy}) >= 3
