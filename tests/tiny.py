"""A small model folder as a hub would give it: random weights, a real tokenizer, a chat template."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

from tests.toy import MemorySource, toy_config

TEXT = """Outrider proposes, the target verifies. A draft that is right costs one pass; a draft that is wrong costs
nothing but the pass that would have run anyway. Numbers: 1 2 3 42 1871. Bonjour, grüße, 你好, здравствуйте."""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_model(
    folder: Path, seed: int = 0, vocab: int = 320, context: int = 256, hidden: int = 32, layers: int = 2
) -> Path:
    """Writes config.json, model.safetensors, tokenizer.json and tokenizer_config.json; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = toy_config(vocab=vocab, max_position=context, hidden=hidden, layers=layers)
    source = MemorySource(config, seed)
    save_file({name: source.get(name).float().contiguous() for name in source.names()}, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "vocab_size": vocab,
                "hidden_size": config.hidden_size,
                "intermediate_size": config.intermediate_size,
                "num_hidden_layers": config.n_layers,
                "num_attention_heads": config.n_heads,
                "num_key_value_heads": config.n_kv_heads,
                "max_position_embeddings": context,
                "rms_norm_eps": config.norm_eps,
                "hidden_act": "silu",
                "tie_word_embeddings": False,
                "eos_token_id": 2,
            }
        )
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return folder
