"""The identity of a stream: a digest of everything that determines its corrections and their results."""

import ast
import hashlib
from collections.abc import Iterable

import msgspec

from gracestream.pipeline.editing.config import EditConfig
from gracestream.pipeline.model.editable import EditableModel
from tests.bench.stream.corrections import Data
from tests.support.repository import ROOT

PACKAGES = ("wording", "search", "codebook", "model", "editing")

DECIDING = (
    *sorted(
        str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / "pipeline" / package).rglob("*.py")
    ),
    "tests/bench/stream/edits.py",
)
"""The code that determines the result of a correction."""

MEASURING = (
    "tests/bench/stream/corrections.py", "tests/bench/stream/measure.py", "tests/bench/stream/undone.py",
    "pipeline/editing/undo.py", "pipeline/editing/counterfactual.py", "pipeline/editing/divergence.py",
)  # fmt: skip
"""The code that determines the rows of a checkpoint."""


def stream_key(model: EditableModel, plan: EditConfig, data: Data) -> str:
    """The name of a stream's folder."""
    sent = [(one.text, one.target) for one in data.corrections]
    words = [
        path.read_text(encoding="utf-8") for path in sorted((ROOT / "pipeline" / "wording" / "words").glob("*.txt"))
    ]
    what = (model.fingerprint, model.layer, model.dtype, model.device.type, plan, sent, data.traffic, words)
    return _digest(msgspec.json.encode((what, code_digest(DECIDING))))


def code_digest(paths: Iterable[str]) -> str:
    """A digest of the code of Python files, without comments and docstrings."""
    return _digest("\0".join(map(_code, paths)).encode())


def _code(path: str) -> str:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return ast.dump(_WithoutTexts().visit(tree))


class _WithoutTexts(ast.NodeTransformer):
    """Removes statements that are only a string."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        alone = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if alone else node


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
