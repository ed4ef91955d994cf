"""The Compose files are valid, and run what the tests run."""

import json
import re
from pathlib import Path
from textwrap import dedent

import pytest
import yaml
from jsonschema import Draft202012Validator

from tests.support.deployment_files import (
    COMPOSE,
    COMPOSE_EXTERNAL,
    COMPOSE_GPU,
    DEPLOY,
    DOCKERFILE,
    PROJECT,
    compose,
    published_ports,
)
from tests.support.repository import ROOT

COMPOSE_FILES = [
    pytest.param((), id="cpu"),
    pytest.param((COMPOSE_GPU,), id="gpu"),
    pytest.param((COMPOSE_EXTERNAL,), id="external"),
    pytest.param((COMPOSE_GPU, COMPOSE_EXTERNAL), id="gpu and external"),
]

OPEN = "# open to other hosts:"
"""Begins the comment that says why a port is bound to more than the loopback address."""


def unexplained(path: Path) -> list[str]:
    """The hosts of ports that other hosts reach, where no comment says why."""
    return [host for host, said in published_ports(path) if host != "127.0.0.1" and OPEN not in said]


class TestCompose:
    @pytest.mark.parametrize("overrides", COMPOSE_FILES)
    def test_is_valid_by_the_compose_specification(self, overrides: tuple[Path, ...]) -> None:
        schema = json.loads((ROOT / "tests" / "data" / "compose-spec.json").read_text())
        problems = [
            f"{error.json_path}: {error.message}"
            for error in Draft202012Validator(schema).iter_errors(compose(*overrides))
        ]
        assert problems == []

    def test_the_override_of_the_documentation_is_valid_and_mounts_a_model(self) -> None:
        found = re.search(
            r"^    x-model:.*?(?=^\S)",
            (ROOT / "docs" / "how-to" / "production.md").read_text(),
            re.MULTILINE | re.DOTALL,
        )
        assert found
        override = yaml.safe_load(dedent(found[0]))
        schema = json.loads((ROOT / "tests" / "data" / "compose-spec.json").read_text())
        assert list(Draft202012Validator(schema).iter_errors(override)) == []
        for worker in ("editor", "inference"):
            assert worker in compose()["services"]
            assert override["services"][worker]["volumes"][0]["target"] == "/model"

    def test_the_schema_does_reject_what_is_wrong(self) -> None:
        schema = json.loads((ROOT / "tests" / "data" / "compose-spec.json").read_text())
        document = compose()
        document["services"]["editor"]["helthcheck"] = {}
        assert not Draft202012Validator(schema).is_valid(document)

    def test_only_the_gpu_overlay_needs_a_gpu_and_there_the_editor_never_trains_on_the_cpu(self) -> None:
        assert all("deploy" not in service for service in compose()["services"].values())
        services = compose(COMPOSE_GPU)["services"]
        assert [name for name, service in services.items() if "deploy" in service] == ["editor"]
        assert services["editor"]["deploy"]["resources"]["reservations"]["devices"]
        assert services["editor"]["environment"]["GRACESTREAM_DEVICE"] == "cuda"
        assert services["editor"]["build"]["args"]["VARIANT"] == "gpu"

    @pytest.mark.parametrize("overrides", COMPOSE_FILES)
    def test_each_image_is_built_by_one_service(self, overrides: tuple[Path, ...]) -> None:
        services = compose(*overrides)["services"].values()
        built = [service["image"] for service in services if "build" in service]
        assert len(set(built)) == len(built)
        for service in services:
            if service["image"].startswith("gracestream-"):
                assert service["image"] in built
                assert service["pull_policy"] == ("build" if "build" in service else "never")

    def test_what_is_there_already_is_not_started_and_nobody_waits_for_it(self) -> None:
        services = compose(COMPOSE_EXTERNAL)["services"]
        left = {name: service for name, service in services.items() if not service.get("profiles")}
        assert left.keys() == {"topics", "editor", "inference"}
        for service in left.values():
            needed = {name for name, how in service["depends_on"].items() if how.get("required", True)}
            assert needed <= {"topics"}
            for name in ("GRACESTREAM_KAFKA", "GRACESTREAM_REDIS"):
                assert service["environment"][name].startswith(f"${{{name}:?")
            assert service["environment"]["GRACESTREAM_HTTP_PORT"] == "8080"

    @pytest.mark.parametrize("overrides", COMPOSE_FILES)
    def test_every_service_has_a_health_check_or_runs_once(self, overrides: tuple[Path, ...]) -> None:
        services = compose(*overrides)["services"]
        once = {
            name
            for service in services.values()
            for name, needed in service.get("depends_on", {}).items()
            if needed["condition"] == "service_completed_successfully"
        }
        assert once == {"topics"}
        for name, service in services.items():
            if name in once:
                assert service["restart"] == "no", name
            else:
                assert service["healthcheck"]["test"], name
                assert service["restart"] == "unless-stopped", name

    def test_replicas_can_be_scaled(self) -> None:
        inference = compose()["services"]["inference"]
        assert not {"container_name", "ports", "hostname"} & inference.keys()

    @pytest.mark.parametrize("path", [COMPOSE, *sorted(DEPLOY.glob("compose*.yml"))], ids=lambda path: path.name)
    def test_no_port_is_open_to_other_hosts_unless_the_file_says_why(self, path: Path) -> None:
        assert unexplained(path) == []

    def test_the_ports_of_kafka_and_of_the_monitoring_are_among_those_checked(self) -> None:
        assert [host for host, _ in published_ports(COMPOSE)] == ["127.0.0.1"] * 3

    @pytest.mark.parametrize(
        ("service", "hosts"),
        [
            ('ports: ["9092:9092"]', [""]),
            ("ports: [9092]", [""]),
            ("ports: [0.0.0.0:9092:9092]", ["0.0.0.0"]),
            ("ports: ['[::]:9092:9092']", ["::"]),
            ("ports: [{target: 9092, published: 9092}]", [""]),
            ("ports: [{target: 9092, host_ip: 0.0.0.0}]", ["0.0.0.0"]),
            ("network_mode: host", ["host"]),
            ("ports: [127.0.0.1:9092:9092]", []),
            ("ports: [{target: 9092, host_ip: 127.0.0.1}]", []),
            ('ports: ["9092:9092"]  # open to other hosts: they fetch from it', []),
        ],
    )
    def test_an_open_port_would_be_found(self, service: str, hosts: list[str], tmp_path: Path) -> None:
        path = tmp_path / "compose.yml"
        path.write_text(f"services:\n  kafka:\n    {service}\n")
        assert unexplained(path) == hosts

    def test_mounted_files_exist(self) -> None:
        services = compose()["services"].values()
        mounts = [mount.split(":") for service in services for mount in service.get("volumes", [])]
        assert mounts
        for source, *_ in mounts:
            if source.startswith("."):
                assert (ROOT / source).exists(), source
            else:
                assert source in compose()["volumes"], source

    def test_kafka_is_the_version_that_the_tests_run(self) -> None:
        pom = (DEPLOY / "local" / "broker" / "pom.xml").read_text()
        found = re.search(r"<kafka\.version>(.+?)<", pom)
        assert found
        assert compose()["services"]["kafka"]["image"] == f"apache/kafka:{found[1]}"

    @pytest.mark.parametrize("overrides", COMPOSE_FILES)
    def test_images_are_built_from_a_variant_and_bear_the_project_s_version(self, overrides: tuple[Path, ...]) -> None:
        built = [service for service in compose(*overrides)["services"].values() if "build" in service]
        assert built
        for service in built:
            variant = service["build"]["args"]["VARIANT"]
            assert service["image"] == f"gracestream-{variant}:{PROJECT['version']}"
            assert ROOT / service["build"]["dockerfile"] == DOCKERFILE
