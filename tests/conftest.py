"""Fixtures and hooks of all tests: a real Kafka, a real Redis or Valkey, and the reasons to skip."""

import functools
import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.rotation import COMBINATIONS, PARTS, QUARTERS, part_of_commit, rotate
from tests.support.scheduling import arrange, make_scheduler
from tests.support.shared_server import SharedServer, address_from

try:
    import hypothesis
except ModuleNotFoundError:  # the tests that run on a GPU need none of it, so that they start on a bare GPU machine
    pass
else:
    # `--hypothesis-profile` chooses another one: `make quick` takes dev, `make nightly` nightly, with random seeds.
    for name, examples, fixed in (("dev", 10, True), ("ci", 50, True), ("nightly", 1000, False)):
        hypothesis.settings.register_profile(
            name,
            deadline=None,
            derandomize=fixed,
            max_examples=examples,
            suppress_health_check=[hypothesis.HealthCheck.too_slow],
        )
    hypothesis.settings.load_profile("ci")


_KAFKA = pytest.StashKey[SharedServer]()


@contextmanager
def _run_kafka(folders: pytest.TempPathFactory) -> Iterator[str]:
    """A context with a Kafka; yields its address."""
    from gracestream.deploy.local.backends import kafka_backend  # noqa: PLC0415 - tests of the engine alone run without it

    with kafka_backend(folders.mktemp("kafka")) as backend:
        yield backend.address


@pytest.fixture(scope="session")
def kafka(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the run's Kafka. Every test begins the names of its topics with its `prefix`."""
    workerinput = getattr(request.config, "workerinput", None)
    if workerinput is not None:
        yield address_from(workerinput["kafka_socket"])
        return
    with _run_kafka(tmp_path_factory) as address:
        yield address


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the session's Redis or Valkey. Every test begins its keys with its `prefix`."""
    from gracestream.deploy.local.backends import redis_backend  # noqa: PLC0415 - likewise

    with redis_backend(tmp_path_factory.mktemp("redis")) as backend:
        yield backend.address


@pytest.fixture
def prefix() -> str:
    """The unique prefix of this test's topics, groups and keys, such as `t3f2a91c0-`."""
    return f"t{secrets.token_hex(4)}-"


def pytest_configure(config: pytest.Config) -> None:
    """Choose the part of the long runs, and let Ctrl-C be Ctrl-C in the processes of `pytest -n`, which ignore it.

    The processes of `pytest -n` get the options of the one that starts them, so all run the same part.
    """
    if config.option.part is None:
        config.option.part = part_of_commit()
    if hasattr(config, "workerinput"):
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell each process of `pytest -n` where it gets the address of the Kafka that all of them share."""
    config = node.config
    if _KAFKA not in config.stash:
        config.stash[_KAFKA] = SharedServer(functools.partial(_run_kafka, config._tmp_path_factory))
    node.workerinput["kafka_socket"] = config.stash[_KAFKA].socket


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop the Kafka of the processes of `pytest -n`."""
    if _KAFKA in config.stash:
        config.stash[_KAFKA].close()


def pytest_report_header(config: pytest.Config) -> str:
    """The part of the long runs and of the slow tests, and the options that run it again."""
    part, options = config.option.part, []
    long = slow = "all"
    if not config.option.chaos:
        long = f"part {part % PARTS} of {PARTS}"
        options = [f"--part {part}"]
    if config.option.rotate:
        slow = f"quarter {part // PARTS} of {QUARTERS}"
        options = ["--rotate", f"--part {part}"]
    again = f"; {' '.join(options)} runs the same again" if options else ""
    return f"long runs: {long}; slow tests: {slow}{again}"


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """The options of `make chaos` and `make containers`, and a setting of pyproject.toml for pytest-timeout."""
    if not pluginmanager.has_plugin("timeout"):
        parser.addini("timeout", "seconds for each test")
    text = "tell the whole story of what can fail so many times, in random orders; 0: a short one, once"
    parser.addoption("--chaos", type=int, default=0, help=text)
    text = (
        f"0 to {COMBINATIONS - 1}: the last digit is the part of each long run that is run without --chaos, the digit"
        " before it the quarter of the slow tests that is run with --rotate; default: the commit's"
    )
    parser.addoption("--part", type=int, choices=range(COMBINATIONS), help=text)
    parser.addoption("--rotate", action="store_true", help="run a quarter of the slow tests; the part chooses which")
    parser.addoption("--containers", action="store_true", help="run the Compose file, which takes minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out slow tests of other quarters, and sort the rest.

    Mark tests that use Kafka or Redis; skip tests that this machine cannot run, with a reason.
    """
    if config.option.rotate:
        items[:], left_out = rotate(items, config.option.part)
        config.hook.pytest_deselected(items=left_out)
    arrange(items)
    for item in items:
        if any("kafka" in name or "redis" in name for name in getattr(item, "fixturenames", ())):
            item.add_marker("kafka")
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU that torch can use"))
        if item.get_closest_marker("docker") and not _has_docker():
            item.add_marker(pytest.mark.skip(reason="no Docker engine answers"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The scheduler of `pytest -n --dist loadfile`; see `tests.support.scheduling`."""
    return make_scheduler(config, log)


@functools.cache
def _has_gpu() -> bool:
    import torch  # noqa: PLC0415 - takes seconds, and most runs need no answer

    return torch.cuda.is_available()


@functools.cache
def _has_docker() -> bool:
    from gracestream.deploy.local.containers import is_docker_available  # noqa: PLC0415 - likewise

    return is_docker_available()
