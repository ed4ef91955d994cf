"""What runs gracestream agrees with what gracestream is: its settings, metrics, files and commands."""

import json
import os
import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from jsonschema import Draft202012Validator
from prometheus_client.metrics import MetricWrapperBase

from pipeline import metrics
from pipeline.settings import Settings, load_settings
from schemas.messages import Status

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = ROOT / "docker-compose.yml"
COMPOSE_CPU = DEPLOY / "compose.cpu.yml"
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
    """`over` laid over `base`, as Compose does with mappings; lists stay out of our override."""
    if not isinstance(base, dict) or not isinstance(over, dict):
        assert not isinstance(over, list), "Compose would append to the list below"
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


COMPOSE_FILES = [pytest.param((), id="gpu"), pytest.param((COMPOSE_CPU,), id="cpu")]


class TestCompose:
    @pytest.mark.parametrize("overrides", COMPOSE_FILES)
    def test_is_valid_by_the_compose_specification(self, overrides: tuple[Path, ...]) -> None:
        schema = json.loads((ROOT / "tests" / "data" / "compose-spec.json").read_text())
        problems = [
            f"{error.json_path}: {error.message}"
            for error in Draft202012Validator(schema).iter_errors(compose(*overrides))
        ]
        assert problems == []

    def test_the_schema_does_refuse_what_is_wrong(self) -> None:
        schema = json.loads((ROOT / "tests" / "data" / "compose-spec.json").read_text())
        document = compose()
        document["services"]["editor"]["helthcheck"] = {}
        assert not Draft202012Validator(schema).is_valid(document)

    def test_no_editor_needs_a_gpu_under_the_cpu_override(self) -> None:
        assert compose()["services"]["editor"]["deploy"]["resources"]["reservations"]["devices"]
        editor = compose(COMPOSE_CPU)["services"]["editor"]
        assert "deploy" not in editor
        assert editor["build"]["args"]["VARIANT"] == "cpu"
        assert editor["image"] == compose()["services"]["inference"]["image"]

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

    def test_no_port_is_open_to_other_hosts(self) -> None:
        ports = [port for service in compose()["services"].values() for port in service.get("ports", [])]
        assert "127.0.0.1:9092:9092" in ports
        assert all(port.startswith("127.0.0.1:") for port in ports)

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
        assert len(built) == 3
        for service in built:
            variant = service["build"]["args"]["VARIANT"]
            assert service["image"] == f"gracestream-{variant}:{PROJECT['version']}"
            assert ROOT / service["build"]["dockerfile"] == DOCKERFILE


KNOWN_SETTINGS = {f"GRACESTREAM_{field.upper()}" for field in Settings.model_fields}


def settings_files() -> list[Path]:
    """The files that people write by hand here and that name settings."""
    folders = [KUBERNETES, PROMETHEUS, DEPLOY / "grafana", DEPLOY / "image"]
    return [COMPOSE, COMPOSE_CPU, ACLS, *(path for folder in folders for path in folder.rglob("*") if path.is_file())]


def unknown_settings(text: str) -> set[str]:
    """What looks like a setting, and is none."""
    return set(re.findall(r"\bGRACESTREAM_[A-Z0-9_]+", text)) - KNOWN_SETTINGS


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


class TestSettings:
    @pytest.mark.parametrize("path", settings_files(), ids=lambda path: path.name)
    def test_every_variable_is_a_setting(self, path: Path) -> None:
        assert unknown_settings(path.read_text()) == set()

    def test_a_typing_error_would_be_found(self) -> None:
        assert unknown_settings("GRACESTREAM_KAFAK: kafka:9092\nGRACESTREAM_REDIS: x") == {"GRACESTREAM_KAFAK"}

    @pytest.mark.parametrize(
        "environment",
        [
            *(pytest.param(in_compose(name), id=f"compose-{name}") for name in ("topics", "editor", "inference")),
            *(pytest.param(in_kubernetes(name), id=f"kubernetes-{name}") for name in pods()),
        ],
    )
    def test_every_value_is_valid_and_others_can_reach_the_worker(
        self, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in KNOWN_SETTINGS:
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        settings = load_settings()
        assert (settings.host, settings.port) == ("0.0.0.0", 8080)
        # A name such as the default `smollm2` stands for a package that no image has.
        assert "/" in settings.model
        assert environment["HF_HOME"].startswith(str(settings.cache))


def exported() -> dict[str, set[str]]:
    """The names of all series that a worker exports, each with its labels."""
    suffixes = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
    names = {}
    for metric in vars(metrics).values():
        if isinstance(metric, MetricWrapperBase):
            (family,) = metric.describe()
            for suffix in suffixes[family.type]:
                names[family.name + suffix] = {*metric._labelnames, *(["le"] if suffix == "_bucket" else [])}
    return names


SERIES = exported() | {"up": set()}
TARGET_LABELS = {"job", "instance"}
KEYWORDS = {"and", "or", "unless", "by", "on", "without", "ignoring"}


def unknown_names(expression: str) -> set[str]:
    """Series and labels in a PromQL expression that no worker exports."""
    bare = re.sub(r'"[^"]*"', '""', expression)
    selected = re.findall(r"(\w+)\{([^}]*)\}", bare)
    wrong = {
        f"{name}{{{label}}}"
        for name, matchers in selected
        for label in re.findall(r"(\w+)\s*[=!]", matchers)
        if label not in TARGET_LABELS | SERIES.get(name, set())
    }
    grouping = r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)"
    grouped = {label for labels in re.findall(grouping, bare) for label in re.findall(r"\w+", labels)}
    wrong |= grouped - TARGET_LABELS.union(*SERIES.values())
    rest = re.sub(r"\{[^}]*\}|\[[^\]]*\]", " ", re.sub(grouping, " ", bare))
    identifiers = re.findall(r"\b[A-Za-z_]\w*\b(?!\s*\()", rest)
    return wrong | (set(identifiers) - SERIES.keys() - KEYWORDS)


def alerts() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    shown = [target["expr"] for panel in panels() for target in panel["targets"]]
    return [*(rule["expr"] for rule in alerts().values()), *shown]


class TestMonitoring:
    @pytest.mark.parametrize("expression", expressions())
    def test_every_series_and_label_is_exported(self, expression: str) -> None:
        assert unknown_names(expression) == set()

    @pytest.mark.parametrize(
        ("expression", "wrong"),
        [
            ("gracestream_readi == 0", "gracestream_readi"),
            ("sum(rate(gracestream_requests[1m]))", "gracestream_requests"),
            ('gracestream_feedback_total{state="rejected"}', "gracestream_feedback_total{state}"),
            ("sum by (outcom) (gracestream_requests_total)", "outcom"),
        ],
    )
    def test_a_typing_error_would_be_found(self, expression: str, wrong: str) -> None:
        assert unknown_names(expression) == {wrong}

    def test_jobs_and_statuses_in_expressions_exist(self) -> None:
        scraped = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
        jobs = {job["job_name"] for job in scraped}
        assert jobs == {"editor", "inference"}
        assert jobs <= compose()["services"].keys()
        assert jobs <= {pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in pods().values()}
        for expression in expressions():
            assert set(re.findall(r'job="(\w+)"', expression)) <= jobs
            assert set(re.findall(r'status="(\w+)"', expression)) <= set(get_args(Status))

    def test_prometheus_scrapes_the_port_on_which_workers_listen(self) -> None:
        scraped = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
        for job in scraped:
            for discovered in job["dns_sd_configs"]:
                assert str(discovered["port"]) == in_compose(job["job_name"])["GRACESTREAM_PORT"]

    @pytest.mark.parametrize("name", ["prometheus.yml", "kubernetes.yml"])
    def test_the_rules_are_loaded(self, name: str) -> None:
        assert yaml.safe_load((PROMETHEUS / name).read_text())["rule_files"] == ["alerts.yml"]

    def test_every_alert_says_what_is_wrong_and_how_bad_it_is(self) -> None:
        for name, rule in alerts().items():
            assert rule["labels"]["severity"] in {"warning", "critical"}, name
            assert {"summary", "description"} <= rule["annotations"].keys(), name

    def test_the_dashboard_finds_the_provisioned_data_source_and_file(self) -> None:
        provisioning = DEPLOY / "grafana" / "provisioning"
        (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
        (variable,) = json.loads(DASHBOARD.read_text())["templating"]["list"]
        assert variable["query"] == source["type"]
        assert source["url"] == "http://prometheus:9090"
        assert all(panel["datasource"]["uid"] == f"${{{variable['name']}}}" for panel in panels())
        (provider,) = yaml.safe_load((provisioning / "dashboards" / "gracestream.yml").read_text())["providers"]
        mounts = compose()["services"]["grafana"]["volumes"]
        assert f"./deploy/grafana/gracestream.json:{provider['options']['path']}/gracestream.json:ro" in mounts

    def test_panels_have_ids_of_their_own_and_do_not_overlap(self) -> None:
        shown = json.loads(DASHBOARD.read_text())["panels"]
        assert len({panel["id"] for panel in shown}) == len(shown)
        taken: set[tuple[int, int]] = set()
        for panel in shown:
            at = panel["gridPos"]
            cells = {(at["x"] + column, at["y"] + line) for column in range(at["w"]) for line in range(at["h"])}
            assert not cells & taken, panel["title"]
            assert at["x"] + at["w"] <= 24
            taken |= cells


class TestKubernetes:
    def test_every_file_is_applied(self) -> None:
        listed = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["resources"]
        assert {path.name for path in KUBERNETES.glob("*.yaml")} == {*listed, "kustomization.yaml"}

    def test_objects_have_names_of_their_own(self) -> None:
        names = [(document["apiVersion"], document["kind"], document["metadata"]["name"]) for document in manifests()]
        assert len(set(names)) == len(names)

    def test_selectors_match_the_labels_of_exactly_one_kind_of_pod(self) -> None:
        selectors = [
            *(
                (document, document["spec"]["selector"]["matchLabels"])
                for document in of_kind("Deployment", "PodDisruptionBudget")
            ),
            *((document, document["spec"]["selector"]) for document in of_kind("Service")),
        ]
        assert len(selectors) == 5
        for document, selector in selectors:
            matched = [name for name, pod in pods().items() if selector.items() <= pod["metadata"]["labels"].items()]
            assert matched == [document["metadata"]["name"]]

    def test_the_network_policy_covers_every_pod_and_opens_their_port(self) -> None:
        (policy,) = of_kind("NetworkPolicy")
        selector = policy["spec"]["podSelector"]["matchLabels"]
        assert all(selector.items() <= pod["metadata"]["labels"].items() for pod in pods().values())
        (rule,) = policy["spec"]["ingress"]
        assert [str(port["port"]) for port in rule["ports"]] == [
            in_kubernetes("gracestream-editor")["GRACESTREAM_PORT"]
        ]

    def test_what_pods_refer_to_exists(self) -> None:
        existing = {(document["kind"], document["metadata"]["name"]) for document in manifests()}
        for name, pod in pods().items():
            config, secret = container(pod)["envFrom"]
            assert ("ConfigMap", config["configMapRef"]["name"]) in existing
            # After the ConfigMap, so that it wins; its text is in no file.
            assert secret["secretRef"] == {"name": "gracestream-credentials", "optional": True}
            volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
            assert {mount["name"] for mount in container(pod)["volumeMounts"]} == volumes.keys(), name
            for volume in volumes.values():
                if "persistentVolumeClaim" in volume:
                    assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in existing
        (autoscaler,) = of_kind("HorizontalPodAutoscaler")
        target = autoscaler["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) in existing
        assert not of_kind("Secret")

    @pytest.mark.parametrize("name", ["gracestream-editor", "gracestream-inference"])
    def test_probes_ask_the_worker_s_port(self, name: str) -> None:
        worker = container(pods()[name])
        ports = {port["name"]: port["containerPort"] for port in worker["ports"]}
        probes = {kind: worker[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
        assert {kind: probe["path"] for kind, probe in probes.items()} == {
            "startup": "/live",
            "liveness": "/live",
            "readiness": "/ready",
        }
        assert {str(ports[probe["port"]]) for probe in probes.values()} == {in_kubernetes(name)["GRACESTREAM_PORT"]}
        service = next(document for document in of_kind("Service") if document["metadata"]["name"] == name)
        (port,) = service["spec"]["ports"]
        annotations = service["metadata"]["annotations"]
        assert port["port"] == ports[port["targetPort"]] == int(annotations["prometheus.io/port"])
        assert annotations["prometheus.io/scrape"] == "true"
        # Otherwise a replica that is not ready vanishes from Prometheus, and no alert says so.
        assert service["spec"]["publishNotReadyAddresses"] is True

    def test_there_is_one_editor_and_it_has_a_gpu(self) -> None:
        (editor,) = [
            document for document in of_kind("Deployment") if document["metadata"]["name"] == "gracestream-editor"
        ]
        assert editor["spec"]["replicas"] == 1
        assert editor["spec"]["strategy"] == {"type": "Recreate"}
        assert container(editor["spec"]["template"])["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert container(editor["spec"]["template"])["image"] == "gracestream-gpu"

    def test_no_service_can_overwrite_a_setting(self) -> None:
        for name, pod in pods().items():
            assert pod["spec"]["enableServiceLinks"] is False, name

    def test_pods_run_without_privileges_as_the_image_s_user(self) -> None:
        (user,) = [arguments for instruction, arguments in instructions() if instruction == "USER"]
        for name, pod in pods().items():
            security = pod["spec"]["securityContext"]
            assert security["runAsNonRoot"] is True, name
            assert f"{security['runAsUser']}:{security['runAsGroup']}" == user, name
            assert container(pod)["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }

    def test_images_bear_the_project_s_version_and_commands_are_those_of_compose(self) -> None:
        images = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["images"]
        assert {image["newTag"] for image in images} == {PROJECT["version"]}
        assert {container(pod)["image"] for pod in pods().values()} == {image["name"] for image in images}
        for pod in pods().values():
            component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
            assert container(pod)["args"] == compose()["services"][component]["command"]


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions with their arguments, without comments, each on one line."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [(name, arguments.strip()) for name, _, arguments in (line.partition(" ") for line in joined)]


def copied(variant: str) -> list[str]:
    """Paths that the build takes from the repository."""
    sources = [
        source
        for name, arguments in instructions()
        if name == "COPY" and "--from=" not in arguments
        for source in arguments.split()[:-1]
    ]
    return [source.replace("${VARIANT}", variant) for source in sources]


class TestImage:
    @pytest.mark.parametrize("variant", ["cpu", "gpu"])
    def test_what_it_copies_exists_and_is_let_into_the_build(self, variant: str) -> None:
        rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
        assert rules[0] == "*"
        allowed = [rule[1:] for rule in rules if rule[0] == "!"]
        refused = [rule.removeprefix("**/") for rule in rules[1:] if rule[0] != "!"]
        assert f"deploy/requirements/{variant}.txt" in copied(variant)
        for source in copied(variant):
            assert (ROOT / source).exists(), source
            assert source.split("/")[0] in allowed, source
            assert not any(fnmatch(part, rule) for part in source.split("/") for rule in refused), source

    def test_it_copies_every_package_that_the_project_consists_of(self) -> None:
        found = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
        assert {package.rstrip("*") for package in found["include"]} | {"pyproject.toml", PROJECT["readme"]} <= set(
            copied("cpu")
        )

    def test_every_requirement_is_pinned_by_hash(self) -> None:
        installs = [arguments for name, arguments in instructions() if name == "RUN" and "pip install" in arguments]
        assert len(installs) == 3
        for arguments in installs:
            assert "--require-hashes" in arguments or "--no-deps --no-build-isolation --no-index ." in arguments

    def test_it_runs_the_project_s_command_on_the_oldest_python_that_is_pinned(self) -> None:
        (entry,) = [json.loads(arguments) for name, arguments in instructions() if name == "ENTRYPOINT"]
        assert entry == list(PROJECT["scripts"])
        oldest = PROJECT["requires-python"].removeprefix(">=")
        bases = [arguments.split()[0] for name, arguments in instructions() if name == "FROM"]
        assert set(bases) == {f"python:{oldest}-slim"}
        for variant in ("cpu", "gpu"):
            assert f"--python-version {oldest} " in (DEPLOY / "requirements" / f"{variant}.txt").read_text()[:500]


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, set[str]]]:
    """What the script asks Kafka's own tool to allow, under the prefix `p.`."""
    folder = tmp_path_factory.mktemp("acls")
    recorder = folder / "kafka-acls.sh"
    recorder.write_text(f"#!/usr/bin/env bash\nprintf '%s\\t' \"$@\" >> {folder}/calls\necho >> {folder}/calls\n")
    recorder.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "KAFKA_ACLS": str(recorder), "GRACESTREAM_PREFIX": "p."}
    subprocess.run(["bash", str(ACLS)], check=True, env=environment)
    calls = [line.rstrip("\t").split("\t") for line in (folder / "calls").read_text().splitlines()]
    return [options(call) for call in calls]


def options(call: list[str]) -> dict[str, set[str]]:
    given: dict[str, set[str]] = {}
    for name, value in zip(call, [*call[1:], "--"], strict=True):
        if name.startswith("--"):
            given.setdefault(name, set()).update([] if value.startswith("--") else [value])
    return given


def allowed(rules: list[dict[str, set[str]]], operation: str, topic: str) -> set[str]:
    """Who may."""
    return {
        principal.removeprefix("User:gracestream-")
        for rule in rules
        if operation in rule["--operation"] and f"p.{topic}" in rule.get("--topic", set())
        for principal in rule["--allow-principal"]
    }


class TestAcls:
    @pytest.mark.parametrize(
        ("topic", "writers"),
        [
            ("deltas", {"editor"}),
            ("edits", {"editor"}),
            ("snapshots", {"editor"}),
            ("feedback.dlq", {"editor"}),
            ("predictions", {"replica"}),
            ("requests.dlq", {"replica"}),
            ("requests", {"user"}),
            ("feedback", {"user"}),
        ],
    )
    def test_only_these_may_write(self, rules: list[dict[str, set[str]]], topic: str, writers: set[str]) -> None:
        assert allowed(rules, "Write", topic) == writers

    @pytest.mark.parametrize(
        ("topic", "readers"),
        [
            ("requests", {"replica", "editor"}),
            ("predictions", {"user"}),
            ("feedback", {"editor"}),
            ("edits", {"user", "editor"}),
            ("deltas", {"replica", "editor"}),
            ("snapshots", {"replica", "editor"}),
        ],
    )
    def test_these_and_operators_may_read(
        self, rules: list[dict[str, set[str]]], topic: str, readers: set[str]
    ) -> None:
        assert allowed(rules, "Read", topic) == readers | {"operator"}

    def test_nobody_is_allowed_everything(self, rules: list[dict[str, set[str]]]) -> None:
        for rule in rules:
            assert "--add" in rule
            assert not rule["--operation"] & {"All", "Delete", "Alter"}
            assert "*" not in rule.get("--topic", set())
            assert all(principal.startswith("User:gracestream-") for principal in rule["--allow-principal"])

    def test_only_the_editor_has_transactions(self, rules: list[dict[str, set[str]]]) -> None:
        (rule,) = [rule for rule in rules if "--transactional-id" in rule]
        assert rule["--allow-principal"] == {"User:gracestream-editor"}
        assert rule["--operation"] == {"Write", "Describe"}
