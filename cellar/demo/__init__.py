"""The small story model that ships with the package."""

import pathlib


def path() -> pathlib.Path:
    """The folder of the demo model, in the Hugging Face layout."""
    return pathlib.Path(__file__).resolve().parent / "story-11m"
