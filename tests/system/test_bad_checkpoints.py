"""Checkpoints that cannot be loaded: an error of one sentence has reason and remedy, and none of their code runs."""

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gracestream.pipeline.settings import Settings
from tests.support.forked_commands import Command, sentence
from tests.support.repository import ROOT
from tests.support.running import save_checkpoint

WEIGHTS, TOKENIZER = "model.safetensors", "tokenizer.json"


def configured(folder: Path, file: str = "config.json", **entries: Any) -> None:
    """Add entries to a JSON file of the checkpoint."""
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def quantised(method: str) -> Callable[[Path], None]:
    return lambda folder: configured(folder, quantization_config={"quant_method": method, "bits": 4})


def adapter(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / WEIGHTS).rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "org/base"}')


def adapter_beside_a_config(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')


def gguf(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    (folder / "model.Q4_K_M.gguf").write_bytes(b"GGUF")


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def truncated(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


def left_to_git_lfs(folder: Path) -> None:
    (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1234\n")


def without_a_part(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))


def without_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def without(*files: str) -> Callable[[Path], None]:
    def removed(folder: Path) -> None:
        for file in files:
            (folder / file).unlink()

    return removed


def with_another_tokenizer(folder: Path) -> None:
    (folder / TOKENIZER).write_text('{"version": "1.0"')


def of_an_unknown_architecture(folder: Path) -> None:
    configured(folder, model_type="quux", architectures=["QuuxForCausalLM"])


def with_config(content: bytes) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / "config.json").write_bytes(content)

    return spoil


def with_a_kernel(folder: Path) -> None:
    configured(folder, attn_implementation="someone/kernel")


NO_TOKENIZER = ("it has no tokenizer", "copy the tokenizer's files")
AGAIN = "copy or download it again"

FAULTS: dict[str, tuple[str, Callable[[Path], None], tuple[str, ...]]] = {
    "gptq": ("llama", quantised("gptq"), ("its weights are quantised (gptq)", "choose the original checkpoint")),
    "awq": ("llama", quantised("awq"), ("its weights are quantised (awq)", "choose the original checkpoint")),
    "bitsandbytes": ("bert", quantised("bitsandbytes"), ("quantised (bitsandbytes)", "choose the original checkpoint")),
    "adapter": ("llama", adapter, ("it is an adapter of 'org/base' (LoRA", "`merge_and_unload`")),
    "adapter and config": ("llama", adapter_beside_a_config, ("it is an adapter (LoRA", "`merge_and_unload`")),
    "gguf": ("llama", gguf, ("it holds GGUF (model.Q4_K_M.gguf)", "convert it")),
    "pickled": ("llama", pickled, ("its weights are pickled (pytorch_model.bin)", "save them as safetensors")),
    "truncated": ("t5", truncated, ("model.safetensors is incomplete or damaged", AGAIN)),
    "git-lfs": ("llama", left_to_git_lfs, ("model.safetensors, which Git LFS has not fetched yet", AGAIN)),
    "no weights": ("llama", without(WEIGHTS), ("it has no weights (model.safetensors)", "copy or download them")),
    "no part": ("llama", without_a_part, ("a part of its weights is missing", AGAIN)),
    "no tensor": ("llama", without_a_tensor, ("its weights lack model.layers.1.mlp.down_proj.weight", AGAIN)),
    "no config": ("llama", without("config.json"), ("it has no config.json", "choose the folder of")),
    "broken config": ("llama", with_config(b'{"model_type": '), ("its config.json is not JSON", AGAIN)),
    "config of no object": ("bert", with_config(b"[]"), ("its config.json holds no JSON object", AGAIN)),
    "config not in UTF-8": ("t5", with_config(b"\xff\xfe"), ("its config.json is not JSON", AGAIN)),
    "no tokenizer": ("llama", without(TOKENIZER, "tokenizer_config.json"), NO_TOKENIZER),
    "no tokenizer of bert": ("bert", without(TOKENIZER, "tokenizer_config.json"), NO_TOKENIZER),
    "no tokenizer of t5": ("t5", without(TOKENIZER, "tokenizer_config.json"), NO_TOKENIZER),
    "no vocabulary": ("llama", without(TOKENIZER), NO_TOKENIZER),
    "damaged tokenizer": ("llama", with_another_tokenizer, ("its tokenizer cannot be read", "files again")),
    "architecture": ("llama", of_an_unknown_architecture, ("`quux`", "does not recognize this architecture")),
    "kernel": ("llama", with_a_kernel, ("the code of 'someone/kernel'", "delete that entry")),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_the_fault_and_its_remedy_are_one_sentence(run: Callable[..., Command], tmp_path: Path, fault: str) -> None:
    kind, spoil, parts = FAULTS[fault]
    spoil(save_checkpoint(kind, tmp_path).folder)
    message = sentence(run("layers", "--model", str(tmp_path)))
    assert message.startswith(f"the model '{tmp_path}' cannot be loaded: ")
    assert all(part in message for part in parts), message


@pytest.mark.slow
@pytest.mark.parametrize("command", ["infer", "edit"])
@pytest.mark.parametrize("fault", ["gptq", "adapter", "gguf", "pickled", "truncated", "no tokenizer"])
def test_workers_report_the_same(
    run: Callable[..., Command], deployment: Settings, tmp_path: Path, command: str, fault: str
) -> None:
    kind, spoil, parts = FAULTS[fault]
    spoil(save_checkpoint(kind, tmp_path).folder)
    message = sentence(run(command, settings=deployment, model=tmp_path))
    assert all(part in message for part in parts), message


def test_a_file_in_place_of_a_folder(run: Callable[..., Command], tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    message = sentence(run("layers", "--model", str(file)))
    cannot = f"the model '{file}' cannot be loaded: it is a file, not a folder"
    assert message == f"{cannot}; choose another --model"
    assert sentence(run("layers", model=file)) == f"{cannot}; choose another GRACESTREAM_MODEL"


def test_a_gguf_file_gets_the_sentence_of_a_folder_with_one(run: Callable[..., Command], tmp_path: Path) -> None:
    gguf(tmp_path)
    (file,) = tmp_path.glob("*.gguf")
    whole = sentence(run("layers", "--model", str(file)))
    assert whole.startswith(f"the model '{file}' cannot be loaded: it is GGUF, which is quantised; choose the original")


def test_the_error_for_an_unknown_name_lists_known_names(run: Callable[..., Command]) -> None:
    message = sentence(run("layers", "--model", "smolm2"))
    assert message.startswith("the model 'smolm2' cannot be loaded: ")
    assert message.endswith("; the models known by name are smollm2, intent, scotus, t5")


def with_own_classes(folder: Path) -> None:
    configured(folder, model_type="own", auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})


def with_own_tokenizer(folder: Path) -> None:
    own = {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}, "tokenizer_class": "OwnTokenizer"}
    configured(folder, "tokenizer_config.json", **own)


@pytest.mark.parametrize(
    ("option", "kind", "part"),
    [
        ("model", "bert", with_own_classes),
        ("model", "llama", with_own_tokenizer),
        ("encoder", "bert", with_own_classes),
        ("encoder", "llama", with_own_tokenizer),
    ],
)
def test_code_of_a_checkpoint_never_runs_for_any_answer(
    run: Callable[..., Command], tmp_path: Path, option: str, kind: str, part: Callable[[Path], None]
) -> None:
    good = save_checkpoint("bert", tmp_path / "good")
    bad, ran = tmp_path / "bad", tmp_path / "ran"
    save_checkpoint(kind, bad)
    part(bad)
    (bad / "own.py").write_text(f"open({str(ran)!r}, 'w')\n")
    lines = tmp_path / "lines.jsonl"
    lines.write_text('"The train"\n')
    chosen = {"model": bad} if option == "model" else {"model": good.folder, "encoder": bad, "query_source": "encoder"}
    command = run("calibrate", str(lines), layer=good.layer, given="y\n" * 9, cache_dir=tmp_path, **chosen)
    assert sentence(command).startswith(
        f"the {option} '{bad}' cannot be loaded: it needs code of its own (auto_map), and gracestream runs no code of a"
        " checkpoint; choose a checkpoint of an architecture that transformers has"
    )
    assert "run the custom code" not in command.stdout()
    assert not ran.exists()


def test_every_call_that_loads_a_checkpoint_forbids_its_code() -> None:
    calls = [
        (file, node)
        for folder in ("pipeline", "deploy", "workers")
        for file in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "from_pretrained"
    ]
    assert len(calls) >= 8
    for file, call in calls:
        given = {one.arg: ast.unparse(one.value) for one in call.keywords}
        assert given.get("trust_remote_code") == "False", f"{file}:{call.lineno}"
