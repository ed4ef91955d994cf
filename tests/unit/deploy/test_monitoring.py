"""Alerts and the dashboard ask for what the workers export."""

import json
import re
from typing import get_args

import pytest
import yaml
from prometheus_client.metrics import MetricWrapperBase

from gracestream.pipeline.editor.editor import BLOCKED_REMEDY
from gracestream.pipeline.observability import metrics
from gracestream.schemas.messages import Status
from tests.support.deployment_files import (
    DASHBOARD,
    DEPLOY,
    PROMETHEUS,
    compose,
    in_compose,
    pods,
)
from tests.support.monitoring import alerts, expressions, panels


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
KEYWORDS = {"and", "or", "unless", "by", "on", "without", "ignoring", "offset"}


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


class TestMonitoring:
    @pytest.mark.parametrize("expression", expressions())
    def test_every_series_and_label_is_exported(self, expression: str) -> None:
        assert unknown_names(expression) == set()

    @pytest.mark.parametrize(
        ("expression", "wrong"),
        [
            ("gracestream_readi == 0", "gracestream_readi"),
            ("rate(gracestream_model_seconds_bucket[1m])", "gracestream_model_seconds_bucket"),
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
                assert str(discovered["port"]) == in_compose(job["job_name"])["GRACESTREAM_HTTP_PORT"]

    @pytest.mark.parametrize(
        ("name", "rules"),
        [("prometheus.yml", ["alerts.yml", "compose-alerts.yml"]), ("kubernetes.yml", ["alerts.yml"])],
    )
    def test_the_rules_are_loaded(self, name: str, rules: list[str]) -> None:
        assert yaml.safe_load((PROMETHEUS / name).read_text())["rule_files"] == rules

    def test_every_alert_says_what_is_wrong_and_how_bad_it_is(self) -> None:
        for name, rule in alerts().items():
            assert rule["labels"]["severity"] in {"warning", "critical"}, name
            assert {"summary", "description"} <= rule["annotations"].keys(), name

    def test_feedback_that_nobody_can_read_raises_an_alert_that_names_the_remedy(self) -> None:
        (rule,) = (rule for rule in alerts().values() if "gracestream_feedback_blocked" in rule["expr"])
        assert rule["labels"]["severity"] == "critical"
        for command in ("find-hanging", "abort"):
            assert f"kafka-transactions.sh {command}" in rule["annotations"]["description"]
            assert f"kafka-transactions.sh {command}" in BLOCKED_REMEDY

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
