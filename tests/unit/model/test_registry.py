"""Models known by name: which layer of a model is edited."""

import subprocess
import sys

import pytest

from gracestream.pipeline.model import LayerError, default_layer, resolve_layer


def test_a_known_model_has_a_layer_and_a_chosen_one_wins() -> None:
    assert resolve_layer("smollm2", None) == default_layer("smollm2") == "model.layers.23.self_attn.o_proj"
    assert resolve_layer("smollm2", "model.layers.1.mlp.up_proj") == "model.layers.1.mlp.up_proj"
    assert resolve_layer("org/model", "model.layers.1.mlp.up_proj") == "model.layers.1.mlp.up_proj"


def test_a_known_model_has_the_same_layer_under_its_hub_id() -> None:
    assert resolve_layer("HuggingFaceTB/SmolLM2-135M-Instruct", "") == default_layer("smollm2")


def test_another_model_needs_a_layer_and_the_error_says_how_to_find_one() -> None:
    assert default_layer("org/model") is None
    with pytest.raises(LayerError, match="set GRACESTREAM_LAYER to one that `gracestream layers --model org/model`"):
        resolve_layer("org/model", None)


@pytest.mark.slow
def test_the_registry_loads_no_module_of_a_build() -> None:
    script = (
        "import sys, gracestream.workers.editor, gracestream.workers.inference;"
        "sys.exit(any(name.startswith('gracestream.deploy') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
