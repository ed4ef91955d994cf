"""TLS of the clients of Kafka and Redis: what the settings mean, and which failures are final."""

import re
import ssl

from gracestream.pipeline.settings import SettingsError


def create_tls_context(ca_file: str, variable: str) -> ssl.SSLContext:
    """Trusts the authorities in a file, or those of the system where none is named."""
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise SettingsError(f"{variable}: {ca_file!r} has no certificate in PEM: {error}") from error


def load_client_cert(context: ssl.SSLContext, certificate: str, key: str, variable: str, password: str) -> None:
    """Load the client certificate; a key that wants a password gets the one given, never one from the terminal."""

    def given() -> str:
        if not password:
            raise SettingsError(f"{variable}_KEY: the key in {key or certificate!r} has a password, and none is given")
        return password

    try:
        context.load_cert_chain(certificate, key or None, given)
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"{variable}_CERTIFICATE: {certificate!r} and its key in {key or certificate!r} are no pair in PEM that"
            f" can be read: {error}"
        ) from error


def permanent_tls_failure(error: BaseException, service: str, variable: str, protocol_setting: str) -> str | None:
    """What is wrong, where a TLS failure is final; None for any other error.

    `service` names the service, `variable` its settings' prefix, and `protocol_setting` the setting that chooses TLS.
    """
    tls = _find_tls_error(error)
    if isinstance(tls, ssl.SSLCertVerificationError):
        return f"{service} is not trusted: {tls.verify_message}; check {variable}_CA, and the host's name in {variable}"
    reason = "" if tls is None else str(tls.reason)
    if reason == "WRONG_VERSION_NUMBER":
        return f"{service} does not speak TLS on that port; check {protocol_setting}"
    if re.search(r"ALERT.*(CERTIFICATE|UNKNOWN_CA|HANDSHAKE_FAILURE|ACCESS_DENIED)", reason):
        return f"{service} refuses the client's certificate ({reason}); check {variable}_CERTIFICATE and {variable}_KEY"
    return None


def error_message(error: BaseException) -> str:
    """The text of an error, or its type where it has none."""
    return str(error) or type(error).__name__


def _find_tls_error(error: BaseException | None) -> ssl.SSLError | None:
    """The TLS failure behind an error: both libraries wrap it, as its cause, its context or its argument."""
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return error
        wrapped = next((argument for argument in error.args if isinstance(argument, BaseException)), None)
        error = error.__cause__ or error.__context__ or wrapped
    return None
