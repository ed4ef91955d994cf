"""Which ports a stack listens on: those from a given one on, else those of its folder's last run."""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from gracestream.deploy.local.processes import HOST, StackError, find_free_port, is_port_free, reserve_ports

PORTS_FILE = "ports.json"
"""In the folder of a stack: the port of each of its servers in the last run."""


def assign_ports(
    folder: Path, server_names: Sequence[str], first_port: int | None, report: Callable[[str], None]
) -> dict[str, int]:
    """The port of each server, which is free now; the folder keeps them for the next run.

    With `first_port` they follow each other from it on, in the order of `server_names`. Else a server that had a port
    in the last run has it again where it is free; any other gets a free one.

    Raises:
        StackError: one from `first_port` on is in use.
    """
    kept = _read_last_ports(folder)
    ports = kept if first_port is None else {name: first_port + number for number, name in enumerate(server_names)}
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
    new = folder / f".{PORTS_FILE}.new"
    new.write_bytes(msgspec.json.encode({**kept, **ports}))
    new.replace(folder / PORTS_FILE)
    return ports


def _read_last_ports(folder: Path) -> dict[str, int]:
    """The ports of the last run; none where the folder keeps none that can be read."""
    try:
        return msgspec.json.decode((folder / PORTS_FILE).read_bytes(), type=dict[str, int])
    except (OSError, msgspec.MsgspecError):
        return {}
