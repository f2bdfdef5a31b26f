"""From the name of a model to a directory: one that exists, or a snapshot of a repository of the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from cellar.core.errors import CheckpointError

# What a run needs; folders (such as `original`) and `consolidated` hold the same weights a second time.
WANTED = ("*.safetensors", "*.json", "*.jinja", "merges.txt")
# Only of repositories without safetensors: most others have these, too, with the same weights.
PICKLED = ("pytorch_model*.bin",)
UNWANTED = ("consolidated*", "*/*")

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve(model: str | Path) -> Path:
    """The directory of a model: `model` itself if it is one, else the hub's repository of that name, downloaded.

    What is in the hub's cache already is used without a network. Raises CheckpointError if `model` is neither
    a directory nor a hub name, or cannot be downloaded.
    """
    path = Path(model).expanduser()
    if str(model) and path.is_dir():
        return path
    if path.is_file():
        raise CheckpointError(f"model {model} is a file; give the directory that it lies in.")
    if not isinstance(model, str) or not _HUB_NAME.fullmatch(model):
        raise CheckpointError(
            f"model {str(model)!r} is neither a directory nor a hub name like organization/name; check the path."
        )
    return _snapshot(model)


def _downloaded(name: str, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=list(patterns), ignore_patterns=list(UNWANTED)))


def _snapshot(name: str) -> Path:
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        directory = _downloaded(name, WANTED)
        if not any(directory.glob("*.safetensors")):
            directory = _downloaded(name, (*WANTED, *PICKLED))
        return directory
    except GatedRepoError as error:
        raise CheckpointError(
            f"model {name} asks for consent on the hub; give it there, then log in with `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"model {name} is neither a directory nor a repository of the hub; check the name."
        ) from error
    except (LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"model {name} is not a directory here, and the hub cannot be reached; give one, or connect to a network."
        ) from error
    except Exception as error:
        # The client's other errors have no common base class; none of them is a defect of ours.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"model {name} could not be downloaded from the hub ({reason}); give a directory."
        ) from error
