"""Mutated checkpoints: whatever is in a model's JSON files, loading it works or ends with one sentence, in time.

`python -m tests.hostile.checkpoints SEED COUNT` tries some in this process and prints a line for each; a process that
dies, hangs or prints a traceback has failed.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.hostile.mutations import dumped, spoilt, spoilt_bytes
from tests.limits import ROOT

FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.json")
STEPS: tuple[Any, ...] = (
    {"type": "Replace", "pattern": {"String": ""}, "content": "x"},
    {"type": "Replace", "pattern": {"Regex": "a*"}, "content": "x"},
    {"type": "Replace", "pattern": {"Regex": "."}, "content": "x" * 10},
    {"type": "Prepend", "prepend": "x" * 100_000},
    {"type": "Precompiled", "precompiled_charsmap": "CAAAAAEAAAACAAAAYWI="},
    {"type": "FixedLength", "length": 0},
    {"type": "Strip", "content": "a", "start": 2**63, "stop": 2**63},
    {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False},
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False},
)
"""Parts of a tokenizer that are known to be trouble."""

MEMORY = 12 * 2**30
SECONDS_EACH = 30


def spoil(rng: random.Random, folder: Path) -> str:
    """Change one of the files; -> which."""
    name = rng.choice(FILES)
    file = folder / name
    if not file.exists():
        file.write_text(json.dumps({"eos_token_id": 2, "temperature": 0.5, "chat_template": "{{ messages }}"}))
    value = json.loads(file.read_text())
    if name == "tokenizer.json" and rng.random() < 0.5:
        part = rng.choice(("normalizer", "pre_tokenizer", "decoder"))
        inner = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}[part]
        step = rng.choice(STEPS)
        value[part] = {"type": "Sequence", inner: [step] * rng.choice((1, 2, 12))} if rng.random() < 0.5 else step
    else:
        value = spoilt(rng, value, STEPS)
    data = dumped(value)
    file.write_bytes(spoilt_bytes(rng, data) if rng.random() < 0.1 else data)
    return name


def attempt(folder: Path) -> str:
    """Load and use a model; -> how it went. Anything but a CellarError goes through."""
    from cellar import LLM, SamplingParams
    from cellar.core.errors import CellarError

    try:
        llm = LLM(str(folder), max_num_seqs=4, kv_cache_memory_bytes=2**22)
        try:
            llm.generate(["Once upon aaaa a time, é", "b"], SamplingParams(temperature=0, max_tokens=3))
        finally:
            llm.close()
    except CellarError as error:
        said = f"{type(error).__name__}: {str(error)[:200]}"
    else:
        return "works"
    assert "\n" not in said
    return said


def main() -> None:
    seed, count = int(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    from tests.tiny_checkpoint import write_checkpoint

    with tempfile.TemporaryDirectory() as parent:
        sound = write_checkpoint(Path(parent) / "sound")
        for k in range(seed, seed + count):
            folder = Path(parent) / "spoilt"
            shutil.copytree(sound, folder)
            name = spoil(random.Random(k), folder)
            print(k, name, end=" ", flush=True)
            # Their default action ends a process, also in native code. On a busy machine the clock says little.
            signal.setitimer(signal.ITIMER_PROF, SECONDS_EACH)
            signal.alarm(10 * SECONDS_EACH)
            print(ascii(attempt(folder)), flush=True)
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.alarm(0)
            shutil.rmtree(folder)


def try_many(seed: int, count: int) -> tuple[int, list[str]]:
    """Attempts in other processes, which go on where one has failed; -> how many went well, and what did not."""
    done, failures = 0, list[str]()
    while done + len(failures) < count:
        first = seed + done + len(failures)
        command = [sys.executable, "-m", "tests.hostile.checkpoints", str(first), str(seed + count - first)]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        code, lines, said = ended.returncode, ended.stdout.splitlines(), ended.stderr
        if code == 0:
            done += len(lines)
            break
        complete = [line for line in lines if line.endswith(("'", '"'))]
        done += len(complete)
        unfinished = lines[-1] if len(lines) > len(complete) else "before the first"
        failures.append(f"{unfinished} -> {code}: {said[-300:]}")
    return done, failures


if __name__ == "__main__":
    main()
