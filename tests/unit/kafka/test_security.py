"""Settings of SASL and TLS: contradictions are named before anything connects, and no password is ever shown."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracestream.pipeline.kafka.security import describe_error, kafka_security_options
from gracestream.pipeline.settings import (
    VARIABLES,
    SettingsError,
    load_settings,
    secret_text,
    to_environment_variables,
)
from gracestream.pipeline.stores.redis_client import redact_url, redis_security_options
from tests.support.certificates import Certificates

SASL = {"kafka_security_protocol": "SASL_SSL", "kafka_username": "editor", "kafka_password": "hush"}


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.create(tmp_path_factory.mktemp("certificates"))


def complaint(**chosen: object) -> str:
    """The error of settings that cannot be."""
    with pytest.raises(SettingsError) as caught:
        load_settings(**chosen)
    return str(caught.value)


class TestContradictions:
    @pytest.mark.parametrize("missing", ["kafka_username", "kafka_password"])
    @pytest.mark.parametrize("protocol", ["SASL_SSL", "SASL_PLAINTEXT"])
    def test_sasl_needs_a_user_and_a_password(self, protocol: str, missing: str) -> None:
        said = complaint(**{**SASL, "kafka_security_protocol": protocol, missing: ""})
        assert said == (
            f"GRACESTREAM_{missing.upper()} is not set, and GRACESTREAM_KAFKA_SECURITY_PROTOCOL={protocol} needs it"
        )

    @pytest.mark.parametrize("protocol", ["PLAINTEXT", "SSL"])
    def test_a_password_that_would_not_be_used_is_a_mistake(self, protocol: str) -> None:
        said = complaint(kafka_security_protocol=protocol, kafka_password="hush")
        assert said.startswith(f"GRACESTREAM_KAFKA_PASSWORD is set, and GRACESTREAM_KAFKA_SECURITY_PROTOCOL={protocol}")
        assert "hush" not in said

    @pytest.mark.parametrize("field", ["kafka_ca", "kafka_certificate"])
    @pytest.mark.parametrize("protocol", ["PLAINTEXT", "SASL_PLAINTEXT"])
    def test_a_certificate_needs_tls(self, protocol: str, field: str, certificates: Certificates) -> None:
        sasl = SASL if protocol.startswith("SASL") else {}
        said = complaint(**{**sasl, "kafka_security_protocol": protocol, field: str(certificates.ca)})
        assert f"GRACESTREAM_{field.upper()} is set, and GRACESTREAM_KAFKA_SECURITY_PROTOCOL={protocol} is" in said

    def test_a_key_needs_a_certificate(self, certificates: Certificates) -> None:
        _, key = certificates.issue("lonely")
        said = complaint(kafka_security_protocol="SSL", kafka_key=str(key), kafka_key_password="hush")
        assert said.splitlines() == [
            "GRACESTREAM_KAFKA_KEY is set without GRACESTREAM_KAFKA_CERTIFICATE",
            "GRACESTREAM_KAFKA_KEY_PASSWORD is set without GRACESTREAM_KAFKA_CERTIFICATE",
        ]
        assert (
            complaint(redis="rediss://localhost", redis_key=str(key))
            == "GRACESTREAM_REDIS_KEY is set without GRACESTREAM_REDIS_CERTIFICATE"
        )

    @pytest.mark.parametrize("field", ["redis_ca", "redis_certificate"])
    def test_a_certificate_for_redis_needs_tls(self, field: str, certificates: Certificates) -> None:
        said = complaint(**{field: str(certificates.ca)})
        assert said == f"GRACESTREAM_{field.upper()} is set, and GRACESTREAM_REDIS does not begin with rediss://"

    def test_redis_has_one_password(self) -> None:
        said = complaint(redis="redis://me:hush@localhost", redis_password="hush, too")
        assert "GRACESTREAM_REDIS_PASSWORD is set, and GRACESTREAM_REDIS has a password too" in said
        assert "hush" not in said

    @pytest.mark.parametrize("field", ["kafka_ca", "kafka_certificate", "redis_ca", "redis_certificate"])
    def test_a_file_that_is_not_there_is_named(self, field: str, tmp_path: Path) -> None:
        path = str(tmp_path / "nothing.pem")
        said = complaint(redis="rediss://localhost", kafka_security_protocol="SSL", **{field: path})
        assert said == f"GRACESTREAM_{field.upper()}: {path!r} is not a readable file"

    def test_a_protocol_and_a_mechanism_that_do_not_exist(self) -> None:
        assert "GRACESTREAM_KAFKA_SECURITY_PROTOCOL: 'TLS' should be 'PLAINTEXT'" in complaint(
            kafka_security_protocol="TLS"
        )
        assert "GRACESTREAM_KAFKA_SASL_MECHANISM: 'OAUTHBEARER' should be 'PLAIN'" in complaint(
            kafka_sasl_mechanism="OAUTHBEARER"
        )


class TestFiles:
    def test_authorities_that_are_none(self, tmp_path: Path) -> None:
        path = tmp_path / "ca.pem"
        path.write_text("not a certificate")
        with pytest.raises(SettingsError, match=r"GRACESTREAM_KAFKA_CA: .*ca.pem' has no certificate in PEM"):
            kafka_security_options(load_settings(**SASL, kafka_ca=str(path)).kafka)
        with pytest.raises(SettingsError, match=r"GRACESTREAM_REDIS_CA: .*ca.pem' has no certificate in PEM"):
            redis_security_options(load_settings(redis="rediss://localhost", redis_ca=str(path)).redis)

    def test_a_certificate_with_the_key_of_another(self, certificates: Certificates) -> None:
        mine, _ = certificates.issue("mine")
        _, key = certificates.issue("theirs")
        tls = {"kafka_certificate": str(mine), "kafka_key": str(key), "kafka_security_protocol": "SSL"}
        with pytest.raises(SettingsError, match=r"GRACESTREAM_KAFKA_CERTIFICATE: .* are not a pair in PEM"):
            kafka_security_options(load_settings(**tls).kafka)
        with pytest.raises(SettingsError, match=r"GRACESTREAM_REDIS_CERTIFICATE: .* are not a pair in PEM"):
            redis_security_options(
                load_settings(redis="rediss://localhost", redis_certificate=str(mine), redis_key=str(key)).redis
            )

    def test_a_key_with_a_password_never_asks_the_terminal_for_it(self, certificates: Certificates) -> None:
        certificate, key = certificates.issue("locked", password="hush")
        tls = {"kafka_security_protocol": "SSL", "kafka_certificate": str(certificate), "kafka_key": str(key)}
        with pytest.raises(SettingsError, match=r"GRACESTREAM_KAFKA_KEY: the key in .* has a password, and none is"):
            kafka_security_options(load_settings(**tls).kafka)
        with pytest.raises(SettingsError, match="are not a pair in PEM") as caught:
            kafka_security_options(load_settings(**tls, kafka_key_password="another").kafka)
        assert "another" not in str(caught.value)
        kafka_security_options(load_settings(**tls, kafka_key_password="hush").kafka)

    def test_a_key_may_stand_in_the_file_of_the_certificate(self, certificates: Certificates, tmp_path: Path) -> None:
        certificate, key = certificates.issue("both")
        both = tmp_path / "both.pem"
        both.write_bytes(key.read_bytes() + certificate.read_bytes())
        kafka_security_options(load_settings(kafka_security_protocol="SSL", kafka_certificate=str(both)).kafka)
        options = redis_security_options(load_settings(redis="rediss://localhost", redis_certificate=str(both)).redis)
        assert (options["ssl_certfile"], options["ssl_keyfile"]) == (str(both), str(both))

    def test_the_host_is_checked_unless_told_otherwise(self) -> None:
        assert kafka_security_options(load_settings(**SASL).kafka)["ssl_context"].check_hostname
        assert not kafka_security_options(load_settings(**SASL, kafka_check_hostname=False).kafka)[
            "ssl_context"
        ].check_hostname


class TestSecrets:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """As Kubernetes mounts a Secret: each name leads into a folder of the newest version."""
        version = tmp_path / "..2026_11_21"
        version.mkdir()
        (tmp_path / "..data").symlink_to(version.name)
        for name, value in {"GRACESTREAM_KAFKA_PASSWORD": "hush\n", "gracestream_redis": "redis://:h@cache"}.items():
            (version / name).write_text(value)
            (tmp_path / name).symlink_to(f"..data/{name}")
        return tmp_path

    def test_every_setting_can_come_from_a_file(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GRACESTREAM_SECRETS_DIR", str(folder))
        settings = load_settings(kafka_security_protocol="SASL_SSL", kafka_username="editor")
        assert secret_text(settings.kafka.password) == "hush"
        assert settings.redis.url == "redis://:h@cache"

    def test_the_environment_wins_over_files(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GRACESTREAM_SECRETS_DIR", str(folder))
        monkeypatch.setenv("GRACESTREAM_KAFKA_PASSWORD", "louder")
        assert secret_text(load_settings(**{**SASL, "kafka_password": None}).kafka.password) == "louder"

    def test_a_folder_that_is_not_there_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GRACESTREAM_SECRETS_DIR", str(tmp_path / "nothing"))
        assert complaint() == f"GRACESTREAM_SECRETS_DIR: {str(tmp_path / 'nothing')!r} is not a readable folder"

    def test_a_file_that_this_user_may_not_read_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As a Compose secret whose file on the host only its owner may read."""
        with TemporaryDirectory() as name:  # not `tmp_path`, into which only its owner may look
            folder, root = Path(name), os.geteuid() == 0
            folder.chmod(0o755)
            secret = folder / "GRACESTREAM_KAFKA_PASSWORD"
            secret.write_text("hush")
            secret.chmod(0 if not root else 0o600)
            monkeypatch.setenv("GRACESTREAM_SECRETS_DIR", name)
            if root:
                os.seteuid(65534)
            try:
                said, user = complaint(), os.geteuid()
            finally:
                if root:
                    os.seteuid(0)
        remedy = f"the user {user} must have the right to read it"
        assert said == f"GRACESTREAM_SECRETS_DIR: {str(secret)!r} cannot be read: Permission denied; {remedy}"

    def test_a_file_that_is_no_text_is_named_and_not_shown(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / "GRACESTREAM_KAFKA_PASSWORD").write_bytes(b"hush\xff")
        monkeypatch.setenv("GRACESTREAM_SECRETS_DIR", str(folder))
        assert complaint() == "GRACESTREAM_SECRETS_DIR: the file of GRACESTREAM_KAFKA_PASSWORD is not text in UTF-8"

    def test_a_child_process_gets_them_in_its_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        settings = load_settings(**SASL)
        for name, value in to_environment_variables(settings.explicit_values()).items():
            monkeypatch.setenv(name, value)
        assert load_settings() == settings

    def test_settings_show_no_password(self) -> None:
        settings = load_settings(**SASL, redis="redis://me:whisper@localhost")
        assert "hush" not in f"{settings!r} {settings}"
        assert "whisper" not in f"{settings!r} {settings}"

    def test_a_wrong_secret_is_not_shown(self) -> None:
        said = complaint(kafka_password=["hush"], redis=b"\xff hush")
        assert "GRACESTREAM_KAFKA_PASSWORD: its value should be a valid string" in said
        assert "hush" not in said


class TestUrls:
    @given(user=st.text(), password=st.text(min_size=6))
    def test_no_password_is_left_in_a_url_encoded_or_not(self, user: str, password: str) -> None:
        assert redact_url(f"rediss://{user}:{password}@cache.example:6379/0") == "rediss://cache.example:6379/0"

    def test_options_go_too(self) -> None:
        assert redact_url("redis://cache:6379/1?password=hush") == "redis://cache:6379/1"

    @pytest.mark.parametrize("url", ["redis://localhost:6379/0", "unix:///run/redis.sock", "localhost"])
    def test_a_url_without_a_password_stays(self, url: str) -> None:
        assert redact_url(url) == url


def test_a_rejected_request_is_not_printed_whole() -> None:
    error = RuntimeError("[Error 29] TopicAuthorizationFailedError: Request 'CreateTopicsRequest(...)' failed")
    assert describe_error(error) == (
        "Kafka does not allow this user to do this (TopicAuthorizationFailed); deploy/acls.sh says who may do what"
    )
    assert describe_error(RuntimeError("anything else")) == "anything else"
    assert describe_error(RuntimeError()) == "RuntimeError"
