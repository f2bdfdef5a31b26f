"""The command line over a tiny checkpoint: what it prints, its options, and one sentence for each bad input."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from cellar.cli.main import build
from cellar.cli.serve import LIMITS
from cellar.cli.verb import ENGINE, SAMPLING, sampling_params
from cellar.core.config import EngineConfig
from cellar.core.hardware import Device, Measure, Profile
from cellar.core.sampling import SamplingParams
from cellar.server.config import LimitConfig
from cellar.version import __version__
from tests.limits import SECONDS, run_python
from tests.tiny_checkpoint import write_checkpoint

SMALL = ["--kv-cache-memory-bytes", "2000000", "--num-threads", "1"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("tiny")))


def cellar(*arguments: str, input: str | None = None) -> Result:
    return CliRunner().invoke(build(), list(arguments), input=input)


def generate(tiny: str, *arguments: str, input: str | None = None) -> Result:
    return cellar("generate", *arguments, "--model", tiny, *SMALL, "--max-tokens", "12", input=input)


# -- generate -------------------------------------------------------------------------------------


def test_one_prompt_is_written_live_with_figures_at_the_end(tiny: str) -> None:
    result = generate(tiny, "Once upon", "--temperature", "0", "--ignore-eos")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("Once upon")
    figures = result.output.strip().splitlines()[-1]
    assert figures.startswith("12 tokens in ")
    assert "tok/s" in figures
    assert "first token after" in figures


def test_no_prompt_tells_a_story(tiny: str) -> None:
    result = generate(tiny)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("Once upon a time")


def test_the_same_seed_tells_the_same_story(tiny: str) -> None:
    def story(seed: str) -> str:
        return generate(tiny, "--seed", seed, "--ignore-eos").output.rpartition(" tokens in ")[0]

    assert story("1") == story("1") != story("2")


def test_many_prompts_from_everywhere(tiny: str, tmp_path: Path) -> None:
    file, results = tmp_path / "prompts.txt", tmp_path / "results.jsonl"
    file.write_text("from a file\n\nand another\n")
    found = generate(tiny, "an argument", "-", "--input", str(file), "--output", str(results), input="one\ntwo\n")
    assert found.exit_code == 0, found.output
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [line["prompt"] for line in lines] == ["an argument", "one", "two", "from a file", "and another"]
    assert all(line["outputs"][0]["token_ids"] for line in lines)
    shown = generate(tiny, "a prompt", "another one")
    assert "a prompt" in shown.output
    assert "another one" in shown.output


def test_json_lines_hold_any_form_of_prompt(tiny: str, tmp_path: Path) -> None:
    file, results = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    file.write_text('"text"\n{"prompt": "more"}\n{"prompt_token_ids": [5, 6]}\n')
    found = generate(tiny, "-i", str(file), "-o", str(results), "--logprobs", "2", "--n", "2", "--stop", "zzzz")
    assert found.exit_code == 0, found.output
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert lines[2]["prompt_token_ids"] == [5, 6]
    assert all(len(line["outputs"]) == 2 for line in lines)
    assert len(next(iter(lines[0]["outputs"][0]["logprobs"]))) >= 2


def test_a_place_that_cannot_be_written_is_found_before_the_work(tmp_path: Path) -> None:
    result = cellar("generate", "x", "--model", str(tmp_path / "no model"), "-o", str(tmp_path / "none" / "out.jsonl"))
    assert result.exit_code == 2
    assert "results cannot be written" in result.output


def test_token_ids_without_a_tokenizer(tiny: str, tmp_path: Path) -> None:
    file = tmp_path / "ids.jsonl"
    file.write_text("[5, 6, 7]\n")
    result = generate(tiny, "-i", str(file), "--skip-tokenizer-init", "--ignore-eos")
    assert result.exit_code == 0, result.output
    assert len(result.output.splitlines()[0].split()) == 12


ONE = Measure(1.0, "bytes", "assumed")


# -- chat, inspect, bench -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = write_checkpoint(tmp_path_factory.mktemp("talker"))
    (path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    )
    return str(path)


def test_chat_has_no_options_for_what_it_does_not_show(talker: str) -> None:
    for option in ("--n", "--logprobs"):
        assert cellar("chat", "--model", talker, option, "2", input="").exit_code == 2


def test_chat_goes_on_until_exit(talker: str) -> None:
    lines = "Hello\n\n/reset\nAgain\n/exit\nnever read\n"
    result = cellar("chat", "--model", talker, *SMALL, "--max-tokens", "5", "--system", "Be short.", input=lines)
    assert result.exit_code == 0, result.output
    assert "(forgotten)" in result.output
    assert talker in result.output.splitlines()[0]
    ended = cellar("chat", "--model", talker, *SMALL, "--max-tokens", "5", input="Hi\n")
    assert ended.exit_code == 0


def test_chat_tells_its_commands(talker: str) -> None:
    lines = "/help\n/nonsense\n/exit\n"
    result = cellar("chat", "--model", talker, *SMALL, "--max-tokens", "5", input=lines)
    assert all(command in result.output for command in ("/help", "/reset", "/exit", "Ctrl-C"))
    assert "There is no /nonsense" in result.output


def test_chat_says_when_the_context_is_full(talker: str) -> None:
    result = cellar("chat", "--model", talker, *SMALL, "--max-model-len", "64", input="word " * 100 + "\nHi\n")
    assert result.exit_code == 0
    assert "context holds 64" in result.output
    assert "/reset" in result.output


def test_inspect(tiny: str) -> None:
    table = cellar("inspect", tiny)
    assert table.exit_code == 0, table.output
    for word in ("llama, 2 layers", "parameters", "KV cache per token", "yes: weights and"):
        assert word in table.output
    found = json.loads(cellar("inspect", tiny, "--json").output)
    # 2 layers x (K and V) x 2 heads x 8 x 4 bytes
    assert found["kv_nbytes_per_token"] == 256
    layer = 32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 32 * 48 + 2 * 32
    assert found["num_parameters"] == 2 * 420 * 32 + 2 * layer + 32
    assert "Where the bytes go" in table.output
    shares = {share["name"]: share for share in found["shares"]}
    assert (shares["qkv"]["count"], shares["qkv"]["nbytes"]) == (2, 2 * 64 * 32 * 4)
    assert found["fits"]


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3.2-1b", "opt-6.7b", "qwen3-8b", "mistral-7b", "chatglm2-6b"])
def test_inspect_says_where_every_byte_and_flop_goes(name: str) -> None:
    """Of tied heads and untied ones, with biases and without."""
    found = json.loads(cellar("inspect", name, "--json").output)
    assert sum(share["nbytes"] for share in found["shares"]) == found["weight_nbytes"]
    assert sum(share["flops_per_token"] for share in found["shares"]) == found["flops_per_token"]


def test_inspect_knows_the_shipped_configs() -> None:
    found = json.loads(cellar("inspect", "llama-3-8b", "--json", "--dtype", "bfloat16").output)
    assert found["num_parameters"] == 8_030_261_248
    assert found["kv_nbytes_per_token"] == 2 * 32 * 8 * 128 * 2
    # With one byte, or two times two bfloat16, of scales for each head and token.
    for name, row in (("fp8", 128 + 1), ("int4", 64 + 8)):
        found = json.loads(cellar("inspect", "llama-3-8b", "--json", "--kv-cache-dtype", name).output)
        assert (found["kv_dtype"], found["kv_nbytes_per_token"]) == (name, 2 * 32 * 8 * row)
    assert "is not implemented; use auto" in cellar("inspect", "llama-3-8b", "--kv-cache-dtype", "nvfp4").output


def test_bench_offline_ends_with_json(tiny: str, tmp_path: Path) -> None:
    cpu = Device(
        "cpu", "cpu", ONE, Measure(2e10, "bytes/s", "measured"), {"float32": Measure(1e11, "FLOP/s", "measured")}
    )
    Profile("here", (cpu,)).save(tmp_path / "profile.json")
    arguments = [
        "--num-prompts",
        "6",
        "--input-len",
        "5-40",
        "--output-len",
        "8",
        "--profile",
        str(tmp_path / "profile.json"),
    ]
    result = cellar("bench", "offline", "--model", tiny, *SMALL, *arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.output.splitlines()[-1])
    assert report["output_tokens"] == 48
    assert report["output_rate"] > 0
    assert report["limits"] == {"device": "cpu", "bandwidth": 2e10, "flops": 1e11, "source": "profile of here"}
    phases = {phase["phase"]: phase for phase in report["phases"]}
    assert sum(phase["num_tokens"] for phase in phases.values()) >= report["prompt_tokens"] + 42
    assert all(phase["seconds"] > 0 and phase["flops"] > 0 and phase["nbytes"] > 0 for phase in phases.values())


# -- the whole ------------------------------------------------------------------------------------


def test_version_and_help() -> None:
    assert cellar("--version").output.strip() == f"cellar {__version__}"
    shown = cellar("--help").output
    assert all(name in shown for name in ("generate", "chat", "inspect", "bench"))


def every_command(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from every_command(below, (*path, name))


def test_help_shows_whole_names_on_eighty_columns() -> None:
    for path, command in every_command(typer.main.get_command(build())):
        result = CliRunner(env={"COLUMNS": "80"}).invoke(build(), [*path, "--help"])
        assert result.exit_code == 0
        assert max(map(len, result.output.splitlines())) <= 80
        assert "\u2026" not in result.output
        assert "..." not in result.output.partition("Options:")[2], path
        for parameter in command.params:
            for option in parameter.opts:
                assert option in result.output, (path, option)


def test_starting_is_light() -> None:
    code = (
        "import sys\nfrom cellar.cli.main import build\nbuild()\n"
        "print([m for m in ('torch', 'tokenizers', 'rich', 'jinja2', 'ray') if m in sys.modules])"
    )
    assert run_python(code).strip() == "[]"


def test_options_are_the_fields() -> None:
    engine = set(ENGINE.names())
    fields = {f.name for part in dataclasses.fields(EngineConfig) for f in dataclasses.fields(part.default_factory)}  # type: ignore[arg-type]
    assert engine == fields - ENGINE.skip
    assert ENGINE.skip == {"machine_profile", "decode_reserve", "run_ahead", "max_mixed_seconds", "mask_timeout"}
    fixed = {"max_head_bytes", "upload_timeout", "max_grammar_bytes", "prepare_timeout"}
    fixed |= {"max_listed_tokens", "max_request_logprobs"}
    assert set(LIMITS.names()) == {f.name for f in dataclasses.fields(LimitConfig)} - fixed
    every = {f.name for f in dataclasses.fields(SamplingParams) if f.init}
    assert set(SAMPLING.names()) == every - SAMPLING.skip
    assert set(SAMPLING.names()) == set(SAMPLING.help), "every sampling option has a help text"


def options(*path: str) -> set[str]:
    """The options of a command, by their fields."""
    return next(
        {str(p.name) for p in c.params} for at, c in every_command(typer.main.get_command(build())) if at == path
    )


def test_no_verb_has_options_that_change_nothing_for_it() -> None:
    shared = {"scheduling_policy", "kv_eviction_policy", "kv_remote", "kv_remote_size", "kv_remote_ttl"}
    shared |= {"kv_remote_key_file"}
    for verb in ("generate", "chat"):
        assert not options(verb) & shared, "nobody shares it with others"
    assert shared <= options("serve")
    assert shared <= options("batch")
    experiments = {"machine_profile", "decode_reserve", "run_ahead"}
    for verb in ("generate", "chat", "serve", "batch"):
        assert not options(verb) & experiments
    assert len(options("generate")) < 50
    assert len(options("serve")) < 76


def test_sampling_options_become_parameters() -> None:
    values: dict[str, Any] = {p.name: p.default for p in SAMPLING.parameters()}
    params = sampling_params(values | {"stop": ["a", "b"]})
    assert params.stop_strings == ("a", "b")
    assert params.max_tokens == 256


# -- bad input ------------------------------------------------------------------------------------


def damaged(tmp_path: Path, what: str) -> str:
    path = write_checkpoint(tmp_path / what)
    if what == "truncated":
        file = path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-500])
    elif what == "headless":
        (path / "model.safetensors").unlink()
    elif what == "unknown":
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"model_type": "gru", "architectures": ["GRU"]}))
    elif what == "untokenized":
        (path / "tokenizer.json").unlink()
    elif what == "broken":
        (path / "config.json").write_text("{")
    return str(path)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("truncated", "truncated"),
        ("headless", "no weights"),
        ("unknown", "model_type 'gru'"),
        ("untokenized", "tokenizer.json"),
        ("broken", "config.json"),
    ],
)
def test_a_damaged_checkpoint(tmp_path: Path, what: str, message: str) -> None:
    expect_one_sentence(cellar("generate", "x", "--model", damaged(tmp_path, what), *SMALL), message)


BAD = [
    (["generate", "x", "--model", "/nowhere/at/all"], "/nowhere/at/all"),
    (["generate", "x", "--temperature", "-1"], "temperature is -1"),
    (["generate", "x", "--top-p", "0"], "top_p"),
    (["generate", "x", "--max-tokens", "0"], "max_tokens"),
    (["generate", "x", "--min-tokens", "300"], "min_tokens"),
    (["generate", "x", "--device", "cuda:99"], "cuda:99"),
    (["generate", "x", "--device", "tpu"], "device 'tpu'"),
    (["generate", "x", "--dtype", "int3"], "int3"),
    (["generate", "x", "--block-size", "20"], "block_size"),
    (["generate", "x", "--kv-cache-memory-bytes", "1000"], "KV"),
    (["generate", "x", "--max-model-len", "100000"], "max_model_len"),
    (["generate", "word " * 300], "context holds 256"),
    (["generate", "-i", "/nowhere/file"], "/nowhere/file"),
    (["inspect", "/nowhere/at/all"], "/nowhere/at/all"),
    (["bench", "offline", "--input-len", "9-3"], "9-3"),
    (["bench", "offline", "--output-len", "many"], "many"),
    (["bench", "offline", "--input-len", "250", "--output-len", "10"], "context"),
    (["bench", "offline", "--compare", "vllm"], "vllm"),
    (["bench", "offline", "--profile", "/nowhere/profile.json"], "/nowhere/profile.json"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(a)[:40] for a, _ in BAD])
def test_bad_input_is_one_clear_sentence(tiny: str, arguments: list[str], message: str) -> None:
    if arguments[0] != "inspect" and "--model" not in arguments:
        arguments = [*arguments, "--model", tiny]
    if "--kv-cache-memory-bytes" not in arguments and arguments[0] != "inspect":
        arguments = [*arguments, *SMALL]
    expect_one_sentence(cellar(*arguments), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["generate", "--temprature", "1"], "--temperature"), (["generate", "--max-num-seq", "1"], "--max-num-seqs")],
)
def test_an_unknown_option_names_the_nearest(arguments: list[str], message: str) -> None:
    result = cellar(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_bad_json_lines(tiny: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"fine"\n{oops\n')
    expect_one_sentence(generate(tiny, "-i", str(file)), "line 2")
    file.write_text("\n")
    expect_one_sentence(generate(tiny, "-i", str(file)), "no prompts")
    file.write_text('{"prompt_token_ids": [1, 5000]}\n"x"\n')
    expect_one_sentence(generate(tiny, "-i", str(file)), "prompt 0 of 2")


def expect_one_sentence(result: Result, message: str) -> None:
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("cellar: ")
    assert line.endswith(".")
    assert "Traceback" not in result.output


def test_the_installed_module_exits_with_the_code() -> None:
    command = [sys.executable, "-m", "cellar", "generate", "x", "--temperature", "-1"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert found.returncode == 2
    assert found.stderr == "cellar: temperature is -1.0, but must be from 0 to 100.\n"


@pytest.mark.long
def test_ctrl_c_ends_a_run_without_a_traceback(tmp_path: Path) -> None:
    long = str(write_checkpoint(tmp_path, max_position_embeddings=16_000))
    command = [sys.executable, "-m", "cellar", "generate", "Once", "--model", long, "--num-threads", "1"]
    endless = ["--ignore-eos", "--max-tokens", "15000", "--kv-cache-memory-bytes", "8000000"]
    process = subprocess.Popen([*command, *endless], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.read(4) == "Once"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=SECONDS)
    assert (process.returncode, errors) == (130, "")


@pytest.mark.long
def test_a_reader_that_leaves_is_no_error(tiny: str) -> None:
    command = f"{sys.executable} -m cellar generate Once --model {tiny} {' '.join(SMALL)} --ignore-eos | head -c 4"
    found = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=SECONDS)
    assert (found.stdout, found.stderr) == ("Once", "")
