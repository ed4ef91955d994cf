"""Which ports a stack listens on: those from a given one on, else those of its folder's last run."""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from gracestream.deploy.local.processes import HOST, StackError, claim, free_port, is_free

FILE = "ports.json"
"""In the folder of a stack: the port of each of its servers in the last run."""


def stack_ports(folder: Path, names: Sequence[str], first: int | None, report: Callable[[str], None]) -> dict[str, int]:
    """The port of each server, which is free now; the folder keeps them for the next run.

    With `first` they follow each other from it on, in the order of `names`. Else a server that had a port in the last
    run has it again where it is free; any other gets a free one.

    Raises:
        StackError: one from `first` on is in use.
    """
    kept = _kept(folder)
    ports = kept if first is None else {name: first + number for number, name in enumerate(names)}
    claim(ports.values())
    ports = {name: ports[name] if name in ports else free_port() for name in names}
    for name, port in ports.items():
        if is_free(port):
            continue
        if first is not None:
            raise StackError(
                f"port {port} of {HOST}, wanted for {name}, is in use; stop its user or choose another --port"
            )
        ports[name] = free_port()
        report(f"port {port}, where {name} was before, is in use; it is on {ports[name]} now")
    new = folder / f".{FILE}.new"
    new.write_bytes(msgspec.json.encode({**kept, **ports}))
    new.replace(folder / FILE)
    return ports


def _kept(folder: Path) -> dict[str, int]:
    """The ports of the last run; none where the folder keeps none that can be read."""
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=dict[str, int])
    except (OSError, msgspec.MsgspecError):
        return {}
