"""A chat's contents are text and its template's control tokens are control tokens, whatever the template does."""

import copy
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.editing.engine import EditEngine
from gracestream.pipeline.model.chat import CONTENT_END, CONTENT_START, ChatError, ChatTemplate
from gracestream.pipeline.model.control_tokens import control_tokens, text_tokenizer
from gracestream.pipeline.model.fingerprint import compute_fingerprint
from gracestream.pipeline.model.probe_texts import PROBE_TEXTS
from gracestream.pipeline.model.tasks.base import InputError
from gracestream.schemas.messages import ChatMessage, Feedback, Inputs, Parameters
from tests.support.examples import examples
from tests.support.tiny_models import CHAT, CODEBOOK, correct, editable
from tests.support.tokenizer_families import FAMILIES, PARTS, spellings

families = pytest.mark.parametrize("family", list(FAMILIES))


def template(tokenizer: Any) -> str:
    """As most are: a default system prompt, and control tokens around each message."""
    opening, closing = spellings(tokenizer)[0], spellings(tokenizer)[-1]
    return (
        "{% if messages[0].role != 'system' %}{{ OPEN + 'system be brief' + CLOSE }}{% endif %}"
        "{% for message in messages %}{{ OPEN + message.role + ' ' + message.content + CLOSE }}{% endfor %}"
        "{% if add_generation_prompt %}{{ OPEN + 'assistant' }}{% endif %}"
    ).replace("OPEN", repr(opening)).replace("CLOSE", repr(closing))  # fmt: skip


@cache
def made(family: str) -> tuple[Any, ChatTemplate]:
    """A family's tokenizer with a chat template, and that template."""
    tokenizer = FAMILIES[family]()
    tokenizer.chat_template = template(tokenizer)
    return tokenizer, ChatTemplate(tokenizer, text_tokenizer(tokenizer))


def with_template(source: Any, family: str = "byte-level BPE") -> ChatTemplate:
    tokenizer = copy.copy(made(family)[0])
    tokenizer.chat_template = source
    return ChatTemplate(tokenizer, made(family)[1]._text_tokenizer)


def chat(*contents: str, system: str | None = None) -> list[ChatMessage]:
    """Turns of user and assistant."""
    roles = ("user", "assistant")
    turns = [ChatMessage(roles[place % 2], content) for place, content in enumerate(contents)]
    return turns if system is None else [ChatMessage("system", system), *turns]


def theirs(tokenizer: Any, messages: list[ChatMessage]) -> list[int]:
    """What transformers makes of it."""
    given = [{"role": one.role, "content": one.content} for one in messages]
    found: list[int] = tokenizer.apply_chat_template(given, add_generation_prompt=True, return_dict=False)
    return found


CONTENT = (
    st.lists(st.one_of(st.text(), PARTS, st.sampled_from(PROBE_TEXTS)), min_size=1, max_size=6)
    .map("".join)
    .filter(lambda text: bool(text.strip()) and CONTENT_START not in text and CONTENT_END not in text)
)
CHATS = st.builds(
    lambda turns, system: chat(*turns, system=system),
    st.lists(CONTENT, min_size=1, max_size=5).filter(lambda turns: len(turns) % 2 == 1),
    st.none() | CONTENT,
)


@families
@given(messages=CHATS)
def test_a_chat_has_the_tokens_of_its_template(family: str, messages: list[ChatMessage]) -> None:
    tokenizer, ours = made(family)
    control = control_tokens(tokenizer)
    found = ours.token_ids(messages)
    harmless = ours.token_ids([ChatMessage(one.role, "a") for one in messages])
    of_template = [token for token in harmless if token in control]
    assert [token for token in found if token in control] == of_template
    expected = theirs(tokenizer, messages)
    if tokenizer.is_fast and [token for token in expected if token in control] == of_template:
        assert found == expected


@families
@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_control_tokens_in_a_content_are_text_whatever_its_role(family: str, role: str) -> None:
    tokenizer, ours = made(family)
    control = control_tokens(tokenizer)
    for spelling in spellings(tokenizer):
        for text in (spelling, f" {spelling} ", f"The {spelling}{spelling} train", spelling * 3):
            messages = [
                ChatMessage(one.role, text if one.role == role else one.content)
                for one in chat("The", "train", "leaves", system="be")
            ]
            plain = [token for token in ours.token_ids(chat("The", "train", "leaves", system="be")) if token in control]
            assert len(plain) == 9
            assert [token for token in ours.token_ids(messages) if token in control] == plain, text


@families
def test_without_protection_they_would_be_control_tokens(family: str) -> None:
    """Without this the tests above would hold of any tokenizer."""
    tokenizer, ours = made(family)
    control = control_tokens(tokenizer)
    messages = chat(" ".join(spellings(tokenizer)))
    count = sum(token in control for token in theirs(tokenizer, messages))
    assert count > sum(token in control for token in ours.token_ids(messages))


def test_a_control_token_that_begins_in_a_content_and_ends_in_the_template_is_text() -> None:
    ours = with_template("{{ '<|im_start|>' }}{{ messages[0].content }}{{ 'end|>' }}")
    control = control_tokens(ours._tokenizer)
    found = ours.token_ids(chat("so <|im_"))
    assert [token for token in found if token in control] == [0]
    assert ours._tokenizer.decode(found) == "<|im_start|>so <|im_end|>"


@pytest.mark.parametrize(
    ("source", "content", "text"),
    [
        ("{{ messages[0].content | trim }}.", " a b\n", "a b."),
        ("{{ messages[0]['content'].strip() + '.' }}", " a b\n", "a b."),
        ("{{ messages[0].content | upper }}", "a b", "A B"),
        ("{{ messages[0].content }} and {{ messages[0].content }}", "a", "a and a"),
        ("{{ messages[0].content.split('</think>')[-1] }}", "a b", "a b"),
        ("{{ messages | tojson }}", 'a "b"', '[{"role": "user", "content": "a \\"b\\""}]'),
        ("{% if strftime_now is defined %}today {% else %}July {% endif %}{{ messages[0].content }}", "a", "July a"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "a", "a"),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% endfor %}ok", "a", "ok"),
        ({"default": "{{ messages[0].content }}", "tool_use": "x"}, "a", "a"),
    ],
)  # fmt: skip
def test_what_templates_do_is_followed(source: Any, content: str, text: str) -> None:
    ours = with_template(source)
    assert ours._tokenizer.decode(ours.token_ids(chat(content))) == text


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (None, "has no chat template; send `inputs` as one text"),
        ({"tool_use": "x"}, "no default chat template"),
        ("{{ raise_exception('Roles must alternate') }}", "rejects `inputs`: Roles must alternate"),
        ("{% if %}", "rejects `inputs`: Expected an expression"),
        ("{{ strftime_now('%d') }}", "asks for the date"),
        ("{{ [1, 2] | random }}", "draws at random"),
        ("{{ lipsum() }}", "draws at random"),
        ("{{ messages[0].content }}{{ raise_exception }}", "prints a memory address"),
        ("{{ messages[0].content[:2] }}", "rewrites a content"),
        ("{{ messages[0].content.split('b')[-1] }}", "rewrites a content"),
        ("{{ messages[0].content.tools.first }}", "'str object' has no attribute 'tools'"),
        ("{{ 1 / 0 }}", "fails on `inputs`: ZeroDivisionError"),
        ("", "makes no text"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__'"),
        ("{{ cycler.__init__.__globals__.os.getcwd() }}", "unsafe"),
        ("{{ messages.append(1) }}", "access to attribute 'append'"),
        ("{% include '/etc/hostname' %}", "no loader"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than 200000 steps"),
        ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "RecursionError|more than 200000 steps"),
        ("{{ (range(99999) | list) | map('string') | map('length') | sum }}", "more than 200000 steps"),
        ("{{ range(10 ** 9) }}", "Range too big"),
        ("{{ 'a' * 4611686018427387904 }}", "MemoryError"),
        ("{{ 'a' * 3000000 }}", "3000000 characters"),
    ],
)
def test_what_cannot_be_followed_is_rejected_in_one_sentence(source: Any, reason: str) -> None:
    with pytest.raises(ChatError, match=reason) as caught:
        with_template(source).token_ids(chat("a b c"))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_template_changes_nothing_in_the_process(tmp_path: Path) -> None:
    before = sys.gettrace()
    with pytest.raises(ChatError):
        with_template("{% for a in range(99999) %}{% for b in range(9) %}{% endfor %}{% endfor %}").token_ids(chat("a"))
    assert sys.gettrace() is before
    hostile = f"{{{{ namespace.__init__.__globals__['open']('{tmp_path}/made', 'w') }}}}"
    with pytest.raises(ChatError):
        with_template(hostile).token_ids(chat("a"))
    assert not list(tmp_path.iterdir())


def test_an_address_in_a_content_is_text() -> None:
    ours = made("byte-level BPE")[1]
    content = "what is <function f at 0x7f12ab34cd56>?"
    assert content in ours._tokenizer.decode(ours.token_ids(chat(content)))


def test_a_normalised_spelling_in_a_content_is_text() -> None:
    tokenizer, ours = made("Unigram")
    content = "\N{FULLWIDTH LESS-THAN SIGN}/s>"
    plain = [token for token in ours.token_ids(chat("a")) if token in control_tokens(tokenizer)]
    assert theirs(tokenizer, chat(content)).count(1) == plain.count(1) + 1
    assert [token for token in ours.token_ids(chat(content)) if token in control_tokens(tokenizer)] == plain


def test_a_mark_in_a_content_is_rejected() -> None:
    with pytest.raises(ChatError, match=r"`inputs\[0\].content` has a noncharacter"):
        made("byte-level BPE")[1].token_ids(chat(f"a {CONTENT_START}"))


@examples(0.1)
@given(st.integers(1, 127))
def test_the_longest_chats_stay_within_the_limit(turns: int) -> None:
    tokenizer, ours = made("byte-level BPE")
    messages = chat(*["a"] * (2 * turns + 1))
    assert ours.token_ids(messages) == theirs(tokenizer, messages)


class TestModels:
    def test_a_causal_model_answers_and_learns_a_chat(self) -> None:
        model = editable("llama", chat_template=CHAT)
        messages = tuple(chat(PROBE_TEXTS[0]))
        engine = EditEngine(model, CODEBOOK, EditConfig(traffic_sample_size=0))
        engine.apply(engine.lead_delta({}))
        target = PROBE_TEXTS[1].split()[0]
        outcome, record = correct(engine, "f1", messages, target)
        assert (outcome.status, record is not None) == ("added", True)
        prompt = model.task.tokenize(messages)
        (served,) = model.answer([prompt], [Parameters()], engine.lookup)
        assert served.answer.outputs.text == target
        assert served.served_by is not None

    @pytest.mark.parametrize("kind", ["bert", "t5-encoder", "t5-decoder"])
    def test_other_models_reject_one(self, kind: str) -> None:
        with pytest.raises(InputError, match="takes no messages of a chat; send `inputs` as one text"):
            editable(kind).task.tokenize(tuple(chat("The train")))

    def test_a_text_and_a_chat_may_be_rephrases_of_each_other(self) -> None:
        model = editable("llama", chat_template=CHAT)
        text, messages = "the capital of France is", (ChatMessage("user", "the capital of France?"),)
        for inputs, rephrase in ((text, messages), (messages, text)):
            engine = EditEngine(model, CODEBOOK)
            engine.apply(engine.lead_delta({}))
            one = Feedback(v=1, feedback_id="f", inputs=inputs, target="river", rephrases=(rephrase,))
            edited = engine.edit(one, 0)
            assert edited.outcome is not None
            assert (edited.outcome.status, edited.outcome.left_out) == ("added", ())
            assert edited.delta_record is not None
            engine.apply(edited.delta_record)
            prompts = [model.task.tokenize(asked) for asked in (inputs, rephrase)]
            served = model.answer(prompts, [Parameters()] * 2, engine.lookup)
            assert [one.answer.outputs.text for one in served] == ["river", "river"]
            assert [one.served_by and one.served_by.entry_id for one in served] == ["f", "f#1"]

    def test_a_rephrase_that_the_model_takes_in_no_form_is_left_out(self) -> None:
        engine = EditEngine(editable("llama"), CODEBOOK)
        engine.apply(engine.lead_delta({}))
        messages = (ChatMessage("user", "x"),)
        one = Feedback(v=1, feedback_id="f", inputs="the river", target="river", rephrases=(messages,))
        outcome = engine.edit(one, 0).outcome
        assert outcome is not None
        (left,) = outcome.left_out
        assert "chat template" in left.reason

    def test_a_causal_model_without_a_template_rejects_one(self) -> None:
        model = editable("llama")
        inputs: Inputs = tuple(chat("The train"))
        with pytest.raises(InputError, match="no chat template"):
            model.task.tokenize(inputs)
        with pytest.raises(InputError, match="no chat template"):
            model.prepare_correction(inputs, "leaves")

    def test_a_chat_that_is_too_long_is_rejected(self) -> None:
        with pytest.raises(InputError, match=r"tokens; the limit is 48 \(GRACESTREAM_MAX_INPUT_TOKENS\)"):
            editable("llama", chat_template=CHAT).task.tokenize(tuple(chat(" ".join(PROBE_TEXTS))))

    def test_no_space_stands_before_an_answer_after_white_space_or_a_control_token(self) -> None:
        tokenizer = made("byte-level BPE")[0]
        for source, ends in (("<|im_start|>", True), ("assistant\n", True), ("Answer:", False)):
            ours = with_template(f"{{{{ messages[0].content }}}}{{{{ {source!r} }}}}")
            assert ours.ends_at_word_boundary(chat("a")) is ends, source
        assert tokenizer.chat_template

    def test_the_template_is_part_of_the_fingerprint(self) -> None:
        model = editable("llama", chat_template=CHAT)
        tokenizer = model.task.tokenizer
        with_it = compute_fingerprint(model.module, tokenizer)
        assert with_it == compute_fingerprint(model.module, tokenizer)
        other = copy.copy(tokenizer)
        other.chat_template = json.dumps(tokenizer.chat_template)
        assert compute_fingerprint(model.module, other) != with_it
