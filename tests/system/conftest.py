"""Fixtures of the tests of whole systems."""

from tests.support.deployment_fixtures import (
    checkpoints,
    cluster,
    deploy,
    deployment,
    folder,
    logged,
    mirror_of,
    own_kafka,
    quick,
    run,
    secured_kafka,
    users,
    users_of,
)

__all__ = [
    "checkpoints",
    "cluster",
    "deploy",
    "deployment",
    "folder",
    "logged",
    "mirror_of",
    "own_kafka",
    "quick",
    "run",
    "secured_kafka",
    "users",
    "users_of",
]
