"""A Kafka and a Redis with TLS, passwords and access rules, which deny everything that they do not allow."""

import asyncio
import os
import ssl
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import redis
from kafka.admin import ScramMechanism, UserScramCredentialUpsertion

from gracestream.deploy.local.kafka import JAVA_OPTIONS, LocalKafka, class_archive, fetch_jars, find_java, kafka_version
from gracestream.deploy.local.processes import HOST, find_free_port
from gracestream.deploy.local.redis import LocalRedis
from gracestream.pipeline.kafka.clients import admin
from gracestream.pipeline.settings import load_settings
from tests.support.certificates import Certificates
from tests.support.repository import ROOT

ACLS = ROOT / "deploy" / "acls.sh"
REDIS_ACL = ACLS.with_name("redis.acl")
USERS = ("editor", "replica", "user", "corrector", "operator", "resender")
SUPER_USER = "admin"
PLAIN_USER = "plain"
LOGIN_MODULES = "org.apache.kafka.common.security"


class SecuredKafka:
    """A Kafka with SASL_SSL for passwords, SSL for client certificates, and PLAINTEXT for the broker itself.

    Every user of SCRAM has the password `{name}'s secret`. Its own certificate is for 127.0.0.1 alone.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.certificates = Certificates.create(folder)
        certificate, key = self.certificates.issue("broker", "127.0.0.1")
        (folder / "broker.both").write_bytes(key.read_bytes() + certificate.read_bytes())
        scram = f"{LOGIN_MODULES}.scram.ScramLoginModule required;"
        self.server = LocalKafka(
            folder / "data",
            protocols=("SASL_SSL", "SSL"),
            properties={
                "ssl.keystore.type": "PEM",
                "ssl.keystore.location": folder / "broker.both",
                "ssl.truststore.type": "PEM",
                "ssl.truststore.location": self.certificates.ca,
                "listener.name.ssl.ssl.client.auth": "required",
                "ssl.principal.mapping.rules": "RULE:^CN=([^,]+).*$/$1/",
                "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
                "listener.name.sasl_ssl.plain.sasl.jaas.config": (
                    f'{LOGIN_MODULES}.plain.PlainLoginModule required user_{PLAIN_USER}="{password_of(PLAIN_USER)}";'
                ),
                "listener.name.sasl_ssl.scram-sha-256.sasl.jaas.config": scram,
                "listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config": scram,
                "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
                "super.users": f"User:ANONYMOUS;User:{SUPER_USER};User:{PLAIN_USER};User:sha256",
            },
        )

    def add_users(self, *names: str, mechanism: str = "SCRAM-SHA-512") -> None:
        """Add users with passwords."""
        client = admin(load_settings(kafka=self.server.address).kafka)
        try:
            kind = ScramMechanism[mechanism.replace("-", "_")]
            client.alter_user_scram_credentials(
                [UserScramCredentialUpsertion(name, kind, password_of(name)) for name in names]
            )
        finally:
            client.close()

    def as_user(self, name: str, **chosen: Any) -> dict[str, Any]:
        """Settings of a client with a user and a password."""
        return {
            "kafka": self.server.addresses["SASL_SSL"],
            "kafka_security_protocol": "SASL_SSL",
            "kafka_username": name,
            "kafka_password": password_of(name),
            "kafka_ca": str(self.certificates.ca),
            **chosen,
        }

    def with_certificate(self, name: str, password: str = "") -> dict[str, Any]:
        """Settings of a client with a certificate."""
        certificate, key = self.certificates.issue(name, password=password)
        return {
            "kafka": self.server.addresses["SSL"],
            "kafka_security_protocol": "SSL",
            "kafka_ca": str(self.certificates.ca),
            "kafka_certificate": str(certificate),
            "kafka_key": str(key),
        } | ({"kafka_key_password": password} if password else {})

    def start(self) -> None:
        """Start the server, with its super user."""
        self.server.start()
        self.add_users(SUPER_USER)

    def set_acls(self, prefix: str, cache: Path, arguments: Sequence[str] = (), **chosen: str) -> str:
        """Run deploy/acls.sh as the super user, for `{prefix}editor` and the other users; returns its output."""
        properties = self.folder / "admin.properties"
        properties.write_text(
            "security.protocol=SASL_SSL\n"
            "sasl.mechanism=SCRAM-SHA-512\n"
            f"sasl.jaas.config={LOGIN_MODULES}.scram.ScramLoginModule required"
            f' username="{SUPER_USER}" password="{password_of(SUPER_USER)}";\n'
            f"ssl.truststore.type=PEM\nssl.truststore.location={self.certificates.ca}\n",
            encoding="utf-8",
        )
        principals = {f"{user.upper()}_PRINCIPAL": f"User:{prefix}{user}" for user in USERS}
        environment = {
            "KAFKA_ACLS": str(kafka_acls(self.folder, cache)),
            "BOOTSTRAP": self.server.addresses["SASL_SSL"],
            "COMMAND_CONFIG": str(properties),
            "GRACESTREAM_TOPIC_PREFIX": prefix,
            **principals,
            **chosen,
        }
        ran = subprocess.run(
            [ACLS, *arguments], env=os.environ | environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout


class SecuredRedis:
    """A Valkey behind TLS for clients with certificates. Only the users of deploy/redis.acl have rights.

    The package of Valkey is built without TLS. So an asyncio server terminates TLS in front of it, like stunnel.
    """

    def __init__(self, folder: Path) -> None:
        self.server = LocalRedis(folder / "data")
        self.certificates = Certificates.create(folder)
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.certificates.ca)
        self._context.verify_mode = ssl.CERT_REQUIRED
        self._context.load_cert_chain(*self.certificates.issue("redis", "127.0.0.1"))
        self._port = find_free_port()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tls", daemon=True)
        self.address = f"{HOST}:{self._port}"

    def add_workers(self, prefix: str) -> None:
        """Add the users of deploy/redis.acl as `{prefix}editor` and `{prefix}replica`; other users lose all rights."""
        with self._root() as root:
            for line in REDIS_ACL.read_text(encoding="utf-8").splitlines():
                _, user, *rules = line.split()
                name = prefix + user.removeprefix("gracestream-")
                own = (rule.replace(">PASSWORD", ">" + password_of(name)).replace("PREFIX", prefix) for rule in rules)
                root.execute_command("ACL", "SETUSER", name, "reset", *own)

    def allow(self, user: str, rule: str) -> None:
        """Change the rights of a user."""
        with self._root() as root:
            root.execute_command("ACL", "SETUSER", user, rule)

    def denied_commands(self, prefix: str) -> list[str]:
        """The commands that were denied to users of a deployment."""
        with self._root() as root:
            return [entry["object"] for entry in root.acl_log() if entry["username"].startswith(prefix)]

    def as_worker(self, worker: str, prefix: str) -> dict[str, Any]:
        """Settings of the editor or a replica."""
        certificate, key = self.certificates.issue(worker)
        return {
            "redis": f"rediss://{prefix}{worker}@{self.address}/0",
            "redis_password": password_of(prefix + worker),
            "redis_ca": str(self.certificates.ca),
            "redis_certificate": str(certificate),
            "redis_key": str(key),
        }

    def __enter__(self) -> Self:
        self.server.start()
        with redis.Redis(host=HOST, port=self.server.port) as root:
            everything = ("on", f">{password_of(SUPER_USER)}", "~*", "&*", "+@all")
            root.execute_command("ACL", "SETUSER", SUPER_USER, "reset", *everything)
            root.execute_command("ACL", "SETUSER", "default", "off")
        self._thread.start()
        listening = asyncio.start_server(self._pass_on, HOST, self._port, ssl=self._context)
        asyncio.run_coroutine_threadsafe(listening, self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self.server.stop()

    def _root(self) -> redis.Redis:
        return redis.Redis(host=HOST, port=self.server.port, username=SUPER_USER, password=password_of(SUPER_USER))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind_reader, behind_writer = await asyncio.open_connection(HOST, self.server.port)
        await asyncio.gather(_copy(reader, behind_writer), _copy(behind_reader, writer))


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(65536):
            target.write(data)
            await target.drain()
    except OSError:
        pass
    finally:
        target.close()


def password_of(name: str) -> str:
    """A password with a blank and a quote."""
    return f"{name}'s secret"


def kafka_acls(folder: Path, cache: Path) -> Path:
    """Does the same as Kafka's bin/kafka-acls.sh, whose class is in a jar of its own that Maven fetches."""
    jars = fetch_jars(cache)
    tools = cache / f"kafka-tools-{kafka_version()}"
    artifact = f"org.apache.kafka:kafka-tools:{kafka_version()}"
    if not tools.is_dir():
        goal = ["dependency:copy", f"-Dartifact={artifact}", f"-DoutputDirectory={tools}"]
        subprocess.run(["mvn", "--batch-mode", "--quiet", *goal], check=True, timeout=240)
    script = folder / "kafka-acls.sh"
    java = find_java()
    options = [*JAVA_OPTIONS, f"-XX:SharedArchiveFile='{class_archive(java, jars)}'", "-Xmx128m"]
    command = f"{java} {' '.join(options)} -cp '{jars}/*:{tools}/*' org.apache.kafka.tools.AclCommand"
    script.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    return script
