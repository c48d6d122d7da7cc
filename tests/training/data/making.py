"""Tokenizers, templates and runs for the tests of the data."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel

from swarmnet.training.data import TextData, open_data
from swarmnet.training.data.packing import Samples
from tests.training.specs import MODEL, TEXT, small_spec

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITH_MARKS = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
)
REWRITES = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""What Qwen3's does: only the last answer has a thought."""
DEFAULT_SYSTEM = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""What SmolLM2's and Qwen2.5's do: a dialogue without a system's text gets one."""
PHI = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}"
    "{% else %}{{ '<|endoftext|>' }}{% endif %}"
)
LLAMA_3 = (
    "{% for m in messages %}{% set text = '<|start|>' + m['role'] + '<|stop|>\n\n' "
    "+ m['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set text = '<|begin|>' "
    "+ text %}{% endif %}{{ text }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|stop|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ '<bos>' }}{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' "
    "else m['role'] %}{{ '<start_of_turn>' + role + '\n' + m['content'] | trim }}"
    "{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{{ '<s>' }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] "
    "+ ' [/INST]' }}{% else %}{{ ' ' + m['content'] + '</s>' }}{% endif %}{% endfor %}"
)
GLM = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
"""No token ends a turn; one begins the next."""
PLAIN = (
    "{% for m in messages %}{{ '### ' + m['role'] + ':\n' + m['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}"
)
END_AT_LAST = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% else %}{{ '</s>' }}{% endif %}"
)


@lru_cache
def tokenizer_text(special: tuple[str, ...] = tuple(SPECIAL)) -> str:
    """The tokenizer.json of a byte-level tokenizer with the tokens of ChatML, or others."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    text: str = tokenizer.to_str()
    return text


def tokenizer_folder(
    folder: Path, template: str = "", special: tuple[str, ...] = tuple(SPECIAL)
) -> str:
    """That tokenizer, with a chat template beside it; returns the path of tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.json"
    path.write_text(tokenizer_text(special))
    config: dict[str, Any] = {"eos_token": "<|im_end|>", "tokenizer_class": "TokenizersBackend"}
    if template:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(path)


def opened(path: str | list[str], length: int = 16, **data: Any) -> TextData:
    """The data of a small run."""
    model = MODEL | {"max_position_embeddings": length, "vocab_size": 400}
    found = open_data(small_spec("", model=model, data={"paths": path, **data}))
    assert isinstance(found, TextData)
    return found


def write_records(path: Path, records: list[Any]) -> str:
    """A .jsonl file."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def row_of(samples: Samples) -> bytes:
    """All tokens of an epoch, in the order of the samples: of tokens that are bytes."""
    row: list[int] = []
    for i in range(samples.num_samples):
        sample = samples.sample(i)
        left = samples.num_tokens - len(row) - 1
        row += sample.inputs[:left].tolist()
        if left <= len(sample.targets):
            row.append(max(int(sample.targets[left - 1]), 0))
    assert len(row) == samples.num_tokens
    return bytes(row)


def documents_of(data: TextData, *, held_out: bool = False) -> list[bytes]:
    """What an epoch has, by document: of data whose tokens are bytes, byte 0 between documents."""
    source = data.sources[0]
    return row_of(source.held_out if held_out else source.samples).split(b"\0")[:-1]
