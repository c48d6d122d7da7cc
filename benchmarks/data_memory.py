"""Peak memory and time of reading data, by the size of the files.

Makes .jsonl files of words of the given sizes, and opens each in a process of its own: once to
tokenize it, once from the cache. What counts is memory that the process needs (`RssAnon`); pages of
files that are mapped are the system's, and are given back when something else wants them. The peak
of both together (`VmHWM`) is in the table too.

    python benchmarks/data_memory.py --megabytes 200 2000
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

WORDS = 5000
FIRST_SAMPLES = 100
LOOK_EVERY_S = 0.02


def write_file(path: Path, megabytes: int) -> None:
    """Documents of 20 to 600 words of a made-up language."""
    rng = random.Random(0)  # the same words whatever the size: as many tokens a byte
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(WORDS)]
    left = megabytes * 1_000_000
    with path.open("w") as file:
        while left > 0:
            text = " ".join(rng.choices(words, k=rng.randint(20, 600)))
            left -= file.write(json.dumps({"text": f"{rng.random()} {text}."}) + "\n")


def write_tokenizer(path: Path, sample: Path) -> None:
    """A byte-level BPE of 8,192 tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=8192,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    with sample.open() as file:
        tokenizer.train_from_iterator((file.readline() for _ in range(2000)), trainer)
    tokenizer.save(str(path))


def kilobytes(name: str) -> int:
    """Of this process, from /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def measure(data: str, tokenizer: str) -> None:
    """In a process of its own: prints what opening took, as JSON."""
    from swarmnet.spec import RunSpec
    from swarmnet.training.data import TextData, open_data

    values = {
        "model": {
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "intermediate_size": 8,
            "vocab_size": 8192,
            "max_position_embeddings": 1024,
        },
        "data": {"paths": [data], "tokenizer": tokenizer},
        "optimizer": {"learning_rate": 1e-3, "rounds": 1},
        "pipeline": {"num_stages": 1, "global_batch": 8, "microbatch": 8},
    }
    spec = RunSpec.model_validate(values)
    peak, is_over = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_over.wait(LOOK_EVERY_S):
            peak = max(peak, kilobytes("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    opened = open_data(spec)
    seconds = time.perf_counter() - started
    assert isinstance(opened, TextData)
    for first in range(0, 8 * FIRST_SAMPLES, 8):
        opened.microbatch([i % (opened.num_samples or 1) for i in range(first, first + 8)])
    is_over.set()
    watcher.join()
    tokens = opened.num_train_tokens + opened.num_held_out_tokens
    documents = opened.sources[0].about.num_documents
    result = (seconds, peak / 1e3, kilobytes("VmHWM") / 1e3, tokens, documents)
    print(json.dumps(result))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[200, 2000])
    parser.add_argument("--bytes", action="store_true", help="Without a tokenizer: quick.")
    parser.add_argument("--measure", nargs=2, metavar=("DATA", "TOKENIZER"))
    options = parser.parse_args()
    if options.measure:
        measure(*options.measure)
        return
    print(
        "| MB | start | seconds | MB/s | peak of own memory, MB | with mapped files, MB | tokens |"
    )
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "SWARMNET_CACHE": folder}
        tokenizer = Path(folder, "tokenizer.json")
        for megabytes in options.megabytes:
            data = Path(folder, "data.jsonl")
            write_file(data, megabytes)
            if not options.bytes and not tokenizer.exists():
                write_tokenizer(tokenizer, data)
            name = "bytes" if options.bytes else str(tokenizer)
            for start in ("first", "later"):
                command = [sys.executable, __file__, "--measure", str(data), name]
                done = subprocess.run(command, env=environment, capture_output=True, check=True)
                seconds, own, whole, tokens, _ = json.loads(done.stdout.splitlines()[-1])
                speed = megabytes / seconds
                print(
                    f"| {megabytes:,} | {start} | {seconds:.2f} | {speed:.1f} | {own:.0f} | "
                    f"{whole:.0f} | {tokens:,} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
