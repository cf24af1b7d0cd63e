"""What `isogemm.nn.swap` does to a causal LM's training step and to the host's time of a decoded token.

    python benchmarks/swap_causal_lm.py --model llama-1b --out llama-1b.json     # on a GPU, with transformers

Random weights, bfloat16, torch's scaled_dot_product_attention; both models on one GPU, measured by turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

import isogemm
from isogemm.bench.runner import environment
from isogemm.core import files

SHAPE = {"attn_implementation": "sdpa", "tie_word_embeddings": True}
MODELS: dict[str, Callable[[], Any]] = {
    "llama-1b": lambda: transformers.LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, **SHAPE,
    ),
    "qwen2-1.5b": lambda: transformers.Qwen2Config(
        hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
        vocab_size=151936, **SHAPE,
    ),
}  # fmt: skip
SEQUENCES, TOKENS, PROMPT, DECODED, UNCOUNTED = 4, 1024, 64, 40, 8


def made(name: str) -> torch.nn.Module:
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(MODELS[name]())
    finally:
        torch.set_default_dtype(torch.float32)
    return model


def milliseconds(work: Callable[[], object]) -> dict[str, float]:
    """Time until the work is launched, and until it is done."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    work()
    launched = time.perf_counter()
    torch.cuda.synchronize()
    return {"host": 1e3 * (launched - begun), "wall": 1e3 * (time.perf_counter() - begun)}


def train(model: Any, ids: torch.Tensor) -> dict[str, float]:
    """Time a step without the optimizer."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    return milliseconds(step)


@torch.inference_mode()
def decode(model: Any, ids: torch.Tensor) -> dict[str, float]:
    """Time the tokens of one sequence; return the medians."""
    cache = model(input_ids=ids[:1, :PROMPT], use_cache=True).past_key_values
    token = partial(model, input_ids=ids[:1, :1], past_key_values=cache, use_cache=True)
    times = [milliseconds(token) for _ in range(DECODED)]
    return {kind: statistics.median(each[kind] for each in times[UNCOUNTED:]) for kind in ("host", "wall")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="llama-1b")
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--commit", default="", help="the commit to record, where git cannot tell")
    parser.add_argument("--out", type=Path, help="append a line of JSON here")
    options = parser.parse_args()
    stock, swapped = made(options.model), made(options.model)
    swapped.load_state_dict(stock.state_dict())
    isogemm.nn.swap(swapped)
    models = {"stock": stock, "swapped": swapped}
    ids = torch.randint(0, stock.config.vocab_size, (SEQUENCES, TOKENS), device="cuda")
    kinds: dict[str, Callable[[Any, torch.Tensor], dict[str, float]]] = {"train": train, "decode": decode}
    times: dict[str, list[dict[str, float]]] = {f"{kind} {name}": [] for kind in kinds for name in models}
    for kind, measure in kinds.items():
        for turn in range(options.turns + 2):
            for name, model in models.items():
                found = measure(model, ids)
                if turn >= 2:
                    times[f"{kind} {name}"].append(found)
    for kind in kinds:
        for part in ("host", "wall"):
            of = {name: statistics.median(each[part] for each in times[f"{kind} {name}"]) for name in models}
            ratio = of["stock"] / of["swapped"]
            print(
                f"{options.model} {kind} {part}: {of['stock']:.2f} ms, swapped {of['swapped']:.2f}, {ratio:.3f}x",
                flush=True,
            )
    if options.out:
        row = {
            "model": options.model,
            "environment": environment(torch.device("cuda", 0), options.commit or None),
            "ms": times,
        }
        files.write(options.out, f"{json.dumps(row)}\n".encode())


if __name__ == "__main__":
    main()
