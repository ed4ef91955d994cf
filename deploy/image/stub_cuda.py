"""Stub libraries for CUDA in an image without a GPU, where NVIDIA's libraries (3 GB) would never be called.

The wheels of torch on PyPI are linked to CUDA, and the dynamic linker rejects a library whose dependencies are missing.
This script replaces the missing ones:

1. Find the libraries that torch needs and that are not installed, with an empty stub in the place of each.
2. With these stubs the linker reports the undefined functions. Compile a library of a few hundred kB that defines them.
3. Each function returns an error: functions of the CUDA runtime report "no device", all others a failure.

The script needs gcc and ldd. Run it with the Python that has torch: `python stub_cuda.py`.
"""

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

STUB_LIBRARY = "libcuda_stubs.so"
"""File name of the stub library; the missing libraries become links to it."""

CUDA_ERROR_NO_DEVICE = 100
"""cudaErrorNoDevice: torch then counts no devices, without a warning."""

ERROR_STATUS = 1
"""Status of every function outside the CUDA runtime: not zero, so a failure in all of NVIDIA's libraries."""

ERROR_TEXT = "gracestream: this image has no CUDA"
"""Result of every function that returns a text."""

TORCH_LIBRARIES = ("libtorch_global_deps.so", "libtorch_python.so")
"""The libraries that `import torch` loads. They pull in torch's other libraries, except for those of GPUs."""

CUDA_LIBRARY_PATTERN = re.compile(r"lib(cu|nv|nccl)")
"""Names of NVIDIA's libraries."""

STRING_FUNCTION_PATTERN = re.compile(r"(String|Name|LastError)$")
"""Names of functions that return a text; `cudaGetLastError` is an exception."""

PYTHON_SYMBOL_PATTERN = re.compile(r"_?Py")
"""Names of functions that the interpreter defines; ldd reports them as undefined, too."""


def main() -> None:
    """Write the stub library and its links next to torch's libraries."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        sys.exit("torch is not installed")
    folder = Path(torch.origin).parent / "lib"
    libraries = [folder / name for name in TORCH_LIBRARIES]
    missing_libraries = sorted({name for (name,) in _match_ldd_output(libraries, r"^\s*(\S+) => not found")})
    if not missing_libraries:
        return
    if others := [name for name in missing_libraries if not CUDA_LIBRARY_PATTERN.match(name)]:
        sys.exit(f"torch needs {', '.join(others)}, which is not part of CUDA and must be installed")
    # ldd lists undefined functions only if all libraries are found: first an empty stub, then the real one.
    _compile_library(folder / STUB_LIBRARY, {})
    for name in missing_libraries:
        (folder / name).symlink_to(STUB_LIBRARY)
    functions: dict[str, list[str]] = defaultdict(list)
    for name, version in sorted(_match_ldd_output(libraries, r"^(?:undefined )?symbol:? (\w+)(?:, version (\S+))?")):
        if not PYTHON_SYMBOL_PATTERN.match(name):
            functions[version].append(name)
    _compile_library(folder / STUB_LIBRARY, functions)
    print(f"{len(missing_libraries)} libraries of CUDA are stubs: {', '.join(missing_libraries)}")


def _match_ldd_output(libraries: Iterable[Path], pattern: str) -> set[tuple[str, ...]]:
    """The groups of all matches in the output of `ldd -r` for these libraries and their dependencies."""
    matched: set[tuple[str, ...]] = set()
    for library in libraries:
        completed = subprocess.run(["ldd", "-r", library], capture_output=True, text=True, check=False)
        matches = re.finditer(pattern, completed.stdout + completed.stderr, re.MULTILINE)
        matched.update(match.groups(default="") for match in matches)
    return matched


def _compile_library(target: Path, functions: Mapping[str, Sequence[str]]) -> None:
    """Compile a library with these functions, by symbol version; the empty version stands for unversioned functions."""
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
    """The C definition of a function that returns an error text or an error status."""
    if STRING_FUNCTION_PATTERN.search(function) and function != "cudaGetLastError":
        return f'const char *{function}(void) {{ return "{ERROR_TEXT}"; }}'
    return f"long {function}(void) {{ return {CUDA_ERROR_NO_DEVICE if 'cuda' in function else ERROR_STATUS}; }}"


if __name__ == "__main__":
    main()
