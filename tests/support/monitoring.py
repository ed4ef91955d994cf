"""Readers of the alerts and the dashboard."""

import json
from typing import Any

import yaml

from tests.support.deployment_files import (
    DASHBOARD,
    PROMETHEUS,
)


def alerts() -> dict[str, dict[str, Any]]:
    files = [yaml.safe_load((PROMETHEUS / name).read_text()) for name in ("alerts.yml", "compose-alerts.yml")]
    return {rule["alert"]: rule for file in files for group in file["groups"] for rule in group["rules"]}


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    shown = [target["expr"] for panel in panels() for target in panel["targets"]]
    return [*(rule["expr"] for rule in alerts().values()), *shown]
