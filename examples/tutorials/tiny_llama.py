"""A small language model for the tutorials: a Llama of two blocks with a tokenizer, trained for
seconds on sentences of a small grammar.
"""

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NAMES = ["Anna", "Bert", "Clara", "David", "Emma", "Felix"]
VERBS = ["finds", "sees", "paints", "carries", "hides", "counts"]
THINGS = [
    "a red ball",
    "two old books",
    "the green door",
    "three small stones",
    "a warm coat",
]
PLACES = ["in the garden", "behind the house", "on the hill", "near the river"]


def text(count: int, seed: int) -> str:
    """Return generated sentences, one a line."""
    choose = random.Random(seed).choice
    lines = []
    for _ in range(count):
        first, second = choose(NAMES), choose(NAMES)
        thing, place = choose(THINGS), choose(PLACES)
        line = f"{first} {choose(VERBS)} {thing} {place}. {second} asks {first} about {thing}."
        lines.append(line)
    return "\n".join(lines) + "\n"


def make(folder: Path, steps: int = 150) -> None:
    """Train the model, and write a Hugging Face folder, train.txt and test.txt."""
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    (folder.parent / "train.txt").write_text(text(600, 0), encoding="utf-8")
    (folder.parent / "test.txt").write_text(text(60, 1), encoding="utf-8")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        initial_alphabet=alphabet,
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(text(600, 0).splitlines(), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    )
    wrapped.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=384,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    ids = torch.tensor(wrapped(text(600, 0))["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        starts = torch.randint(0, len(ids) - 65, (16,))
        batch = torch.stack([ids[start : start + 64] for start in starts])
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.to(torch.bfloat16).save_pretrained(folder)
