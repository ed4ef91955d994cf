"""Stands in for NVIDIA's libraries in an image without a GPU: 3 GB that torch is linked to and never calls there.

1. It finds the libraries that torch's own need and that are not installed, and the functions that they would define.
2. It compiles one library of a few hundred kB with these functions, and puts it in the place of each.
3. Each function returns an error: a function of the CUDA runtime that there is no device, any other one a failure.

The wheels of torch on PyPI are linked to CUDA, and the dynamic linker loads no library without those it needs. Needs
gcc and ldd. Run it with the Python that has torch: `python stub_cuda.py`.
"""

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

STUB_LIBRARY = "libcuda_stubs.so"

CUDA_ERROR_NO_DEVICE = 100
"""cudaErrorNoDevice: torch then counts no devices, without a warning."""

ERROR_STATUS = 1

ERROR_TEXT = "gracestream: this image has no CUDA"

TORCH_LIBRARIES = ("libtorch_global_deps.so", "libtorch_python.so")
"""What `import torch` loads; the rest of torch's libraries are linked to these, or are loaded with a GPU alone."""

CUDA_LIBRARY_PATTERN = re.compile(r"lib(cu|nv|nccl)")
"""What NVIDIA's libraries are named."""

STRING_FUNCTION_PATTERN = re.compile(r"(String|Name|LastError)$")
"""What functions are named that return a text."""

PYTHON_SYMBOL_PATTERN = re.compile(r"_?Py")
"""Functions that the interpreter defines, not a library."""


def main() -> None:
    """Write the stubs beside torch's libraries."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        sys.exit("torch is not installed")
    folder = Path(torch.origin).parent / "lib"
    libraries = [folder / name for name in TORCH_LIBRARIES]
    missing = sorted({name for (name,) in _match_ldd_output(libraries, r"^\s*(\S+) => not found")})
    if not missing:
        return
    if others := [name for name in missing if not CUDA_LIBRARY_PATTERN.match(name)]:
        sys.exit(f"torch needs {', '.join(others)}, which is not of CUDA and must be installed")
    _compile_library(folder / STUB_LIBRARY, {})
    for name in missing:
        (folder / name).symlink_to(STUB_LIBRARY)
    functions: dict[str, list[str]] = defaultdict(list)
    for name, version in sorted(_match_ldd_output(libraries, r"^(?:undefined )?symbol:? (\w+)(?:, version (\S+))?")):
        if not PYTHON_SYMBOL_PATTERN.match(name):
            functions[version].append(name)
    _compile_library(folder / STUB_LIBRARY, functions)
    print(f"{len(missing)} libraries of CUDA are stubs: {', '.join(missing)}")


def _match_ldd_output(libraries: Iterable[Path], pattern: str) -> set[tuple[str, ...]]:
    """What ldd says of libraries and of those that they need, after it has tried to link them all."""
    found: set[tuple[str, ...]] = set()
    for library in libraries:
        done = subprocess.run(["ldd", "-r", library], capture_output=True, text=True, check=False)
        matches = re.finditer(pattern, done.stdout + done.stderr, re.MULTILINE)
        found.update(match.groups(default="") for match in matches)
    return found


def _compile_library(target: Path, functions: Mapping[str, Sequence[str]]) -> None:
    """One library with these functions, by the version under which they are linked; empty: without one."""
    script = target.with_suffix(".map")
    versions = {version: names for version, names in functions.items() if version}
    script.write_text("".join(f"{version} {{ {'; '.join(names)}; }};\n" for version, names in versions.items()))
    command = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", "-x", "c", "-", "-o", str(target)]
    if versions:
        command.append(f"-Wl,--version-script={script}")
    source = "\n".join(_stub_definition(name) for names in functions.values() for name in names)
    subprocess.run(command, input=source, text=True, check=True)
    script.unlink()


def _stub_definition(function: str) -> str:
    if STRING_FUNCTION_PATTERN.search(function) and function != "cudaGetLastError":
        return f'const char *{function}(void) {{ return "{ERROR_TEXT}"; }}'
    return f"long {function}(void) {{ return {CUDA_ERROR_NO_DEVICE if 'cuda' in function else ERROR_STATUS}; }}"


if __name__ == "__main__":
    main()
