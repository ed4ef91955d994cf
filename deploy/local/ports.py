"""Assigning the ports of a stack: consecutive ports from a given one, or the ports of the folder's last run."""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from gracestream.deploy.local.processes import HOST, StackError, find_free_port, is_port_free, reserve_ports

PORTS_FILE = "ports.json"
"""The file in a stack's folder with the port of each server in the last run."""


def assign_ports(
    folder: Path, server_names: Sequence[str], first_port: int | None, report: Callable[[str], None]
) -> dict[str, int]:
    """Assign each server a port that is free now, and write the ports to the folder for the next run.

    With `first_port` the ports are consecutive, in the order of `server_names`. Without it a server gets its port of
    the last run if it is free, or else any free port.

    Raises:
        StackError: a port from `first_port` on is in use.
    """
    last_ports = _read_last_ports(folder)
    ports = (
        last_ports if first_port is None else {name: first_port + number for number, name in enumerate(server_names)}
    )
    # Reserved first, so that `find_free_port` gives no server the port of another one.
    reserve_ports(ports.values())
    ports = {name: ports[name] if name in ports else find_free_port() for name in server_names}
    for name, port in ports.items():
        if is_port_free(port):
            continue
        if first_port is not None:
            raise StackError(
                f"port {port} of {HOST}, wanted for {name}, is in use; stop its user or choose another --port"
            )
        ports[name] = find_free_port()
        report(f"port {port}, where {name} was before, is in use; it is on {ports[name]} now")
    temporary = folder / f".{PORTS_FILE}.new"
    temporary.write_bytes(msgspec.json.encode({**last_ports, **ports}))
    temporary.replace(folder / PORTS_FILE)
    return ports


def _read_last_ports(folder: Path) -> dict[str, int]:
    """The ports of the last run; empty if the folder has no readable file of them."""
    try:
        return msgspec.json.decode((folder / PORTS_FILE).read_bytes(), type=dict[str, int])
    except (OSError, msgspec.MsgspecError):
        return {}
