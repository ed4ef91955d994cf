"""The files that run gracestream, read."""

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
COMPOSE = ROOT / "docker-compose.yml"
COMPOSE_CPU = DEPLOY / "compose.cpu.yml"
COMPOSE_EXTERNAL = DEPLOY / "compose.external.yml"
KUBERNETES = DEPLOY / "kubernetes"
DOCKERFILE = DEPLOY / "image" / "Dockerfile"
PROMETHEUS = DEPLOY / "prometheus"
DASHBOARD = DEPLOY / "grafana" / "gracestream.json"
ACLS = DEPLOY / "acls.sh"

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RESET = object()


class ComposeLoader(yaml.SafeLoader):
    """YAML with the tag by which an override removes what the file below it says."""


ComposeLoader.add_constructor("!reset", lambda _loader, _node: RESET)


def merged(base: Any, over: Any) -> Any:
    """`over` laid over `base`, as Compose does with mappings; no override of ours has a list where there is one."""
    if not isinstance(base, dict) or not isinstance(over, dict):
        assert not isinstance(over, list) or base is None, "Compose would append to the list below"
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


def manifests() -> list[dict[str, Any]]:
    resources = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["resources"]
    return [document for name in resources for document in yaml.safe_load_all((KUBERNETES / name).read_text())]


def of_kind(*kinds: str) -> list[dict[str, Any]]:
    return [document for document in manifests() if document["kind"] in kinds]


def pods() -> dict[str, dict[str, Any]]:
    """Pod templates by the name of what makes them."""
    return {owner["metadata"]["name"]: owner["spec"]["template"] for owner in of_kind("Deployment", "Job")}


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def in_kubernetes(name: str) -> dict[str, str]:
    """The environment of a Deployment's or a Job's container, as far as it is written down."""
    (config,) = of_kind("ConfigMap")
    own = {
        variable["name"]: variable["value"]
        for variable in container(pods()[name]).get("env", [])
        if "value" in variable
    }
    return {**config["data"], **own}


def in_compose(name: str) -> dict[str, str]:
    """The environment of a service on a host that sets nothing."""
    given = compose()["services"][name]["environment"]
    return {key: re.sub(r"\$\{\w+:-(.*?)\}", r"\1", value) for key, value in given.items() if value is not None}


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions with their arguments, without comments, each on one line."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [(name, arguments.strip()) for name, _, arguments in (line.partition(" ") for line in joined)]
