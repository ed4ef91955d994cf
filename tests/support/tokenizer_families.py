"""A small tokenizer of each family."""

import string
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from gracestream.pipeline.model.control_tokens import control_tokens
from gracestream.pipeline.model.probe_texts import PROBE_TEXTS
from gracestream.pipeline.model.registry import minilm_folder
from tests.support.tiny_models import editable

CHARACTERS = sorted(set(string.ascii_letters + string.digits + "<>/|[]_.,?'"))


BLANK = "\N{LOWER ONE EIGHTH BLOCK}"


ROLE = "<\N{FULLWIDTH VERTICAL LINE}User\N{FULLWIDTH VERTICAL LINE}>"


def byte_level_bpe() -> Any:
    """As GPT-2 and most language models. Two added tokens are not marked special; one of them is white space."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(PROBE_TEXTS, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>", unk_token="<|endoftext|>"
    )
    made.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", ROLE, "    ", "gracestream")])
    return made


def whole_word_bpe() -> Any:
    """As Llama 2 and 3: each word of the vocabulary is one token, whatever its parts."""
    words = ["<unk>", "<s>", "</s>", *CHARACTERS, BLANK]
    vocabulary = {text: place for place, text in enumerate(words)}
    merges = [("<", "/"), ("</", "s"), ("</s", ">")]
    for pair in merges[:-1]:
        vocabulary["".join(pair)] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, ignore_merges=True))
    backend.normalizer = normalizers.Replace(" ", BLANK)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def wordpiece() -> Any:
    """As BERT."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = {text: place for place, text in enumerate([*special, *CHARACTERS, *(f"##{one}" for one in CHARACTERS)])}
    backend = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip


def unigram() -> Any:
    """As T5 and XLM-R: the vocabulary, and so the search for the best split, includes the control tokens."""
    scores = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), (BLANK, -2.0)]
    scores += [(one, -6.0 - place / 100) for place, one in enumerate(CHARACTERS) if one != "?"]
    backend = Tokenizer(models.Unigram([*scores, (f"{BLANK}the", -4.0)], unk_id=2))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    extra = [f"<extra_id_{number}>" for number in range(3)]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", extra_special_tokens=extra
    )


def wordlevel() -> Any:
    """A word is a token; control tokens are words of the vocabulary."""
    return editable("bert").task.tokenizer


def minilm() -> Any:
    return AutoTokenizer.from_pretrained(minilm_folder(), trust_remote_code=False)


FAMILIES: dict[str, Callable[[], Any]] = {
    "byte-level BPE": byte_level_bpe,
    "whole-word BPE": whole_word_bpe,
    "WordPiece": wordpiece,
    "Unigram": unigram,
    "word level": wordlevel,
    "bytes, in Python": ByT5Tokenizer,
    "MiniLM": minilm,
}


def spellings(tokenizer: Any) -> list[str]:
    return [str(token) for token in control_tokens(tokenizer).values()]


PARTS = st.sampled_from(
    ["<", ">", "/", "s", "|", "im_end", "[", "]", "SEP", "extra_id_0", "pad", "    ", "gracestream"]
)
