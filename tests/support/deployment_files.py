"""Readers of the deployment files: Compose, Kubernetes, Dockerfile."""

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from tests.support.repository import ROOT

DEPLOY = ROOT / "deploy"
COMPOSE = ROOT / "docker-compose.yml"
COMPOSE_GPU = DEPLOY / "compose.gpu.yml"
COMPOSE_EXTERNAL = DEPLOY / "compose.external.yml"
KUBERNETES = DEPLOY / "kubernetes"
DOCKERFILE = DEPLOY / "image" / "Dockerfile"
PROMETHEUS = DEPLOY / "prometheus"
DASHBOARD = DEPLOY / "grafana" / "gracestream.json"
ACLS = DEPLOY / "acls.sh"

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RESET = object()


class ComposeLoader(yaml.SafeLoader):
    """Loads YAML with the tag by which a Compose override removes a value of the file below it."""


ComposeLoader.add_constructor("!reset", lambda _loader, _node: RESET)


def merged(base: Any, over: Any) -> Any:
    """`base` overridden by `over`, as Compose does with mappings. Lists are not merged: no override has one."""
    if not isinstance(base, dict) or not isinstance(over, dict):
        assert not isinstance(over, list) or base is None, "Compose would append to the list of the file below"
        return over
    both = base | {key: merged(base.get(key), value) for key, value in over.items()}
    return {key: value for key, value in both.items() if value is not RESET}


def compose(*overrides: Path) -> dict[str, Any]:
    document: Any = {}
    for path in (COMPOSE, *overrides):
        loaded = yaml.load(path.read_text(), ComposeLoader)
        document = merged(document, loaded) if document else loaded
    assert isinstance(document, dict)
    return document


def published_ports(path: Path) -> list[tuple[str, str]]:
    """The ports that a Compose file publishes: each with the host's address, empty for all, and the line of the file.

    On the host's own network (address `host`), every port that a container listens on is published.
    """
    text = path.read_text()
    lines, found = text.splitlines(), list[tuple[str, str]]()

    def visit(node: yaml.Node | None) -> None:
        if isinstance(node, yaml.SequenceNode):
            for one in node.value:
                visit(one)
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.value == "ports":
                    found.extend((_address(port), lines[port.start_mark.line]) for port in value.value)
                elif key.value == "network_mode" and value.value == "host":
                    found.append(("host", lines[value.start_mark.line]))
                visit(value)

    visit(yaml.compose(text, ComposeLoader))
    return found


def _address(port: yaml.Node) -> str:
    if isinstance(port, yaml.MappingNode):  # the long syntax
        return str({key.value: value.value for key, value in port.value}.get("host_ip", ""))
    written = re.sub(r"\$\{\w+:-(\d+)\}", r"\1", str(port.value))
    before_the_container_s_port = written.rpartition(":")[0]
    return before_the_container_s_port.rpartition(":")[0].strip("[]")


def manifests() -> list[dict[str, Any]]:
    resources = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["resources"]
    return [document for name in resources for document in yaml.safe_load_all((KUBERNETES / name).read_text())]


def of_kind(*kinds: str) -> list[dict[str, Any]]:
    return [document for document in manifests() if document["kind"] in kinds]


def pods() -> dict[str, dict[str, Any]]:
    """Pod templates by the name of their deployment or job."""
    return {owner["metadata"]["name"]: owner["spec"]["template"] for owner in of_kind("Deployment")}


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def containers() -> dict[str, dict[str, Any]]:
    """All containers of all pods by name, including init containers."""
    found = [one for pod in pods().values() for one in (*pod["spec"].get("initContainers", ()), container(pod))]
    by_name = {f"gracestream-{one['name']}": one for one in found}
    assert len(by_name) == len(found)
    return by_name


def in_kubernetes(name: str) -> dict[str, str]:
    """The environment of a container, as far as the manifests give it."""
    (config,) = of_kind("ConfigMap")
    own = {variable["name"]: variable["value"] for variable in containers()[name].get("env", []) if "value" in variable}
    return {**config["data"], **own}


def in_compose(name: str) -> dict[str, str]:
    """The environment of a service on a host without variables of its own."""
    given = compose()["services"][name]["environment"]
    return {key: re.sub(r"\$\{\w+:-(.*?)\}", r"\1", value) for key, value in given.items() if value is not None}


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions with their arguments, each on one line, without comments."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [(name, arguments.strip()) for name, _, arguments in (line.partition(" ") for line in joined)]
