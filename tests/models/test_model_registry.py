"""Reading config.json, shipped configs, and names of models."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from cellar.core.errors import CheckpointError
from cellar.models import hub
from cellar.models.registry import open_model, read_config, shipped_config, shipped_names
from tests.limits import run_python


def test_end_symbols_of_the_generation_config_are_added(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 7}))
    assert read_config(tmp_path)["eos_token_id"] == 7
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    assert read_config(tmp_path)["eos_token_id"] == [7, 9]
    assert open_model(read_config(tmp_path), "float32").spec.eos_token_ids == (7, 9)
    (tmp_path / "generation_config.json").write_text("{}")
    assert read_config(tmp_path / "config.json")["eos_token_id"] == [7]


@pytest.mark.parametrize(
    ("text", "message"), [(None, "cannot be read"), ("{", "is not JSON"), ("[1]", "a JSON object")]
)
def test_a_config_that_is_none(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_config(tmp_path)


def test_shipped_configs_open_in_any_case() -> None:
    assert len(shipped_names()) >= 10
    assert shipped_config("Llama-3-8B") == shipped_config("llama-3-8b")
    assert shipped_config("llama-9") is None
    assert shipped_config("../registry") is None


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    assert hub.resolve(str(tmp_path)) == tmp_path
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        hub.resolve(tmp_path / "file")


@pytest.mark.parametrize("name", ["./models/none", "/no/such/model", "a/b/c", "a b", "", "~/none"])
def test_a_path_that_is_not_there_is_no_hub_name(name: str) -> None:
    with pytest.raises(CheckpointError, match="neither a directory nor a hub name"):
        hub.resolve(name)


def test_a_hub_name_without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="the hub cannot be reached; give one"):
        hub.resolve("no-such-organization/no-such-model")


def test_a_hub_name_that_is_unknown_there(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError

    def unknown(name: str, **options: object) -> str:
        response = SimpleNamespace(headers={}, request=None, status_code=404)
        raise RepositoryNotFoundError("401", response=response)  # type: ignore[arg-type]

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unknown)
    with pytest.raises(CheckpointError, match="neither a directory nor a repository of the hub"):
        hub.resolve("no-such-organization/no-such-model")


def test_a_download_asks_for_what_a_run_needs_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    kept: list[str] = []
    files = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "tokenizer.json",
        "merges.txt",
        "chat_template.jinja",
        "original/params.json",
        "consolidated.safetensors",
        "README.md",
    ]

    def download(name: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        kept.extend(filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    (tmp_path / files[1]).touch()
    assert hub.resolve("organization/name") == tmp_path
    assert kept == [*files[:3], *files[4:7]]
    (tmp_path / files[1]).unlink()
    del files[1:3], kept[:]
    assert hub.resolve("organization/name") == tmp_path
    assert kept == [files[0], *files[2:5], *files[:5]]  # nothing else is downloaded twice


def test_importing_the_registry_loads_no_client_of_the_hub() -> None:
    code = "import sys, cellar.models.registry, cellar.models.hub; print('huggingface_hub' in sys.modules)"
    assert run_python(code).strip() == "False"
