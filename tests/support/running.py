"""Shared parts of tests with processes: tiny checkpoints on disk, records of topics, users, and waits."""

import dataclasses
import logging
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from kafka import TopicPartition
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from gracestream.deploy.local.kafka import LocalKafka
from gracestream.pipeline.client import Client
from gracestream.pipeline.kafka.clients import admin, consumer
from gracestream.pipeline.settings import Settings, load_settings
from gracestream.schemas.deltas import Delta, decode_delta
from gracestream.schemas.messages import Feedback, Outcome, Prediction, Request, decode
from tests.support.tiny_models import CHAT, SIZE, bert, tokenizer

T = TypeVar("T")
TIMEOUT = 60.0
"""Seconds after which a wait fails, long enough for a busy machine."""

LIMITS = {
    "max_input_tokens": 40,
    "max_target_tokens": 6,
    "default_max_new_tokens": 6,
    "session_timeout": 8.0,
    "shutdown_timeout": 25.0,
}
"""Limits of each deployment. Tests of timeouts set their own."""


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk, and the settings under which the tests edit it.

    The queries of causal models are the layer's, so that tests load no encoder unless they are about its queries.
    """

    folder: Path
    layer: str
    replace: str = "auto"
    query: str = "auto"

    def settings(self) -> dict[str, Any]:
        """The settings of a deployment with this model."""
        own = {"layer": self.layer, "inject_tokens": self.replace, "query_source": self.query}
        return {**LIMITS, "model": str(self.folder), **own}


def llama(positions: int = 64) -> Any:
    """A model wide enough to learn every one-word target, whatever its random weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=SIZE, hidden_size=192, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=4, max_position_embeddings=positions, initializer_range=0.1, pad_token_id=0,
            bos_token_id=2, eos_token_id=4,
        )
    )  # fmt: skip


def t5() -> Any:
    """As `llama`, an encoder-decoder."""
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=SIZE, d_model=192, d_kv=12, d_ff=384, num_layers=3, num_decoder_layers=3, num_heads=4,
            pad_token_id=0, eos_token_id=4, decoder_start_token_id=0, initializer_factor=2.0,
        )
    )  # fmt: skip


BUILDERS: dict[str, tuple[Callable[[], Any], str, str, str]] = {
    "llama": (llama, "", "model.layers[0].mlp.down_proj", "auto"),
    "chat": (llama, "", "model.layers[0].mlp.down_proj", "auto"),
    "bert": (bert, "bert", "bert.encoder.layer[1].output.dense", "auto"),
    "t5": (t5, "t5", "encoder.block[0].layer[1].DenseReluDense.wo", "all"),
}


def save_checkpoint(kind: str, folder: Path) -> Checkpoint:
    """A tiny model of one kind, with the same random weights each time."""
    build, special_tokens, layer, replace = BUILDERS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build()
    model.save_pretrained(folder)
    tokenizer(special_tokens, chat_template=CHAT if kind == "chat" else None).save_pretrained(folder)
    return Checkpoint(folder, layer, replace, "last" if build is llama else "auto")


def wait_until(found: Callable[[], T], timeout: float = TIMEOUT, what: str = "") -> T:
    """Call `found` every 50 ms until its result is truthy, and return it; the test fails after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        timed_out = time.monotonic() > deadline
        if answer := found():
            return answer
        if timed_out:
            pytest.fail(f"{what or 'it'} did not happen in {timeout:g} s; the last answer was {answer!r}")
        time.sleep(0.05)


def records(settings: Settings, topic: str) -> list[Any]:
    """Every committed record of a topic, in order of partition and offset."""
    reader = consumer(settings.kafka, fetch_max_wait_ms=50)
    try:
        name = settings.kafka.topic(topic)
        partitions = [TopicPartition(name, number) for number in sorted(reader.partitions_for_topic(name))]
        reader.assign(partitions)
        reader.seek_to_beginning()
        ends = reader.end_offsets(partitions)
        found: list[Any] = []
        while any(reader.position(partition) < end for partition, end in ends.items()):
            for some in reader.poll(timeout_ms=500).values():
                found += some
        return sorted(found, key=lambda record: (record.partition, record.offset))
    finally:
        reader.close()


def wait_for_open_transactions(settings: Settings, *topics: str) -> None:
    """Wait until no transaction is open on any of the topics. Kafka ends a transaction partition by partition."""
    committed, whole = consumer(settings.kafka), consumer(settings.kafka, isolation_level="read_uncommitted")
    try:
        names = [settings.kafka.topic(topic) for topic in topics]
        partitions = [TopicPartition(name, each) for name in names for each in whole.partitions_for_topic(name)]
        wait_until(
            lambda: committed.end_offsets(partitions) == whole.end_offsets(partitions), what="the end of transactions"
        )
    finally:
        committed.close()
        whole.close()


def headers_of(record: Any) -> dict[str, str]:
    """A record's headers as text."""
    return {name: value.decode() for name, value in record.headers}


def outcomes_in_log(settings: Settings) -> list[Outcome]:
    """Every outcome on `edits`, in order."""
    return [decode(record.value, Outcome) for record in records(settings, "edits")]


def deltas_in_log(settings: Settings) -> list[Delta]:
    """Every record of `deltas`, in order, once no transaction is open there."""
    wait_for_open_transactions(settings, "deltas")
    return [decode_delta(record.value) for record in records(settings, "deltas")]


def settings_for(kafka: str, redis_url: str, prefix: str, **chosen: Any) -> Settings:
    """Settings of a deployment of one test."""
    return load_settings(kafka=kafka, redis=redis_url, topic_prefix=prefix, **{"startup_timeout": TIMEOUT, **chosen})


def status(port: int, path: str) -> tuple[int, str]:
    """Status and body of `GET path`; status 0 if no server answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=TIMEOUT) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def metric(port: int, name: str) -> float:
    """The value of one metric without labels."""
    lines = status(port, "/metrics")[1].splitlines()
    return next(float(line.split()[-1]) for line in lines if line.split(" ")[0] == name)


def members(settings: Settings) -> list[str]:
    """The ids of the members of the replicas' consumer group."""
    logging.getLogger("kafka.admin").setLevel(
        logging.ERROR
    )  # it cannot read faust's own metadata, and says so at length
    client = admin(settings.kafka)
    try:
        group = settings.kafka.topic("inference")
        described = client.describe_groups([group])
        group_of = described[group] if isinstance(described, dict) else described[0]
        found = group_of["members"] if isinstance(group_of, dict) else group_of.members
        return [member["member_id"] if isinstance(member, dict) else member.member_id for member in found]
    finally:
        client.close()


def hang(kafka: LocalKafka) -> None:
    """Pause the server's process; returns once all of its threads have stopped."""
    kafka.child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, kafka.child.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


def resume(kafka: LocalKafka) -> None:
    """Let a paused server run, and wait until it answers: its controller may have expelled its broker meanwhile."""
    kafka.child.send_signal(signal.SIGCONT)
    if kafka.child.running:
        wait_until(lambda: kafka.is_responding(TIMEOUT))


kafka_outages = pytest.mark.parametrize(
    ("leave", "come_back"), [(hang, resume), (LocalKafka.kill, LocalKafka.start)], ids=["hangs", "is dead"]
)
"""The ways in which a Kafka is unavailable for a while."""


class Users:
    """Users of a deployment: they send requests and feedback, and wait for answers and outcomes."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.client = Client(settings)

    def ask(self, *requests: Request, timeout: float = TIMEOUT) -> dict[str, Prediction]:
        """The first prediction for each request; the test fails if one is missing."""
        with self.client.predictions() as replies:
            self.client.send(requests)
            found = replies.wait([request.request_id for request in requests], timeout)
        assert found.keys() == {request.request_id for request in requests}, "a request got no prediction"
        return found

    def correct(self, *feedback: Feedback, timeout: float = TIMEOUT) -> dict[str, Outcome]:
        """The first outcome of each feedback record; the test fails if one is missing."""
        with self.client.outcomes() as replies:
            self.client.send(feedback)
            found = replies.wait([one.feedback_id for one in feedback], timeout)
        assert found.keys() == {one.feedback_id for one in feedback}, "feedback got no outcome"
        return found

    def close(self) -> None:
        """Close the client."""
        self.client.close()


def question(request_id: str, inputs: Any, **fields: Any) -> Request:
    """A request."""
    return Request(v=1, request_id=request_id, inputs=inputs, **fields)


def flag(feedback_id: str, inputs: Any, target: str) -> Feedback:
    """A correction."""
    return Feedback(v=1, feedback_id=feedback_id, inputs=inputs, target=target)


def own_environment() -> dict[str, str]:
    """The environment without any GRACESTREAM_ variable, as in a new shell."""
    return {name: value for name, value in os.environ.items() if not name.startswith("GRACESTREAM_")}
