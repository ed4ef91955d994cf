"""TLS for clients of Kafka and Redis: contexts from the settings, and recognition of final failures."""

import re
import ssl

from gracestream.pipeline.settings import SettingsError


def create_tls_context(ca_file: str | None, variable: str) -> ssl.SSLContext:
    """A context that trusts the authorities in `ca_file`, or those of the system if it is None.

    Raises:
        SettingsError: the file, set by the setting `variable`, holds no certificate.
    """
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise SettingsError(f"{variable}: {ca_file!r} has no certificate in PEM: {error}") from error


def load_client_cert(
    context: ssl.SSLContext, certificate: str, key: str | None, variable: str, password: str | None
) -> None:
    """Load a client certificate and its key into a context.

    Raises:
        SettingsError: the files are not a certificate and its key, or the key needs a password and there is none.
    """

    # Without this callback, OpenSSL would ask for the password on the terminal, and a worker would wait forever.
    def get_password() -> str:
        if not password:
            raise SettingsError(f"{variable}_KEY: the key in {key or certificate!r} has a password, and none is set")
        return password

    try:
        context.load_cert_chain(certificate, key, get_password)
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"{variable}_CERTIFICATE: {certificate!r} and its key in {key or certificate!r} are not a pair in PEM that"
            f" can be read: {error}"
        ) from error


def permanent_tls_failure(error: BaseException, service: str, variable: str, protocol_setting: str) -> str | None:
    """The reason and the remedy if an error is a final TLS failure; None for any other error.

    Args:
        error: Error of a client library.
        service: Name and address of the service.
        variable: Setting of its address, and prefix of its TLS settings.
        protocol_setting: Setting that turns TLS on.
    """
    tls = _find_tls_error(error)
    if isinstance(tls, ssl.SSLCertVerificationError):
        return f"{service} is not trusted: {tls.verify_message}; check {variable}_CA, and the host's name in {variable}"
    reason = "" if tls is None else str(tls.reason)
    if reason == "WRONG_VERSION_NUMBER":
        return f"{service} does not speak TLS on that port; check {protocol_setting}"
    if re.search(r"ALERT.*(CERTIFICATE|UNKNOWN_CA|HANDSHAKE_FAILURE|ACCESS_DENIED)", reason):
        return f"{service} rejects the client's certificate ({reason}); check {variable}_CERTIFICATE and {variable}_KEY"
    return None


def error_message(error: BaseException) -> str:
    """The text of an error, or the name of its type if the text is empty."""
    return str(error) or type(error).__name__


def _find_tls_error(error: BaseException | None) -> ssl.SSLError | None:
    """The TLS failure that an error wraps. The client libraries keep it as cause, as context or as an argument."""
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return error
        wrapped = next((argument for argument in error.args if isinstance(argument, BaseException)), None)
        error = error.__cause__ or error.__context__ or wrapped
    return None
