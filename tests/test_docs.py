"""What the docs name exists: every link, path, module, verb and option of README, CONTRIBUTING, SECURITY and docs/."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")])
SOURCES = [path for folder in ("cellar", "benchmarks", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]

# Where a path in backticks may begin; decisions and logs write `kv/store.py` for what lies in the package.
ROOTS = ("", "cellar", "docs")
# Files that a user makes or that lie elsewhere, by their endings or beginnings.
NOT_OURS = re.compile(r"path/to|^/|^https?:|\.\.\.|[<>*{}]|^DIR|^SST/")


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def spans(text: str) -> list[str]:
    """Inline code, without what stands in fences."""
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def command_lines(text: str) -> Iterator[str]:
    """Lines of fenced and indented code, and inline code; continued lines are joined, comments cut off."""
    joined = re.sub(r"\\\n\s*", " ", text)
    fences = re.findall(r"^```\w*\n(.*?)^```", joined, re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^ {4,}(\S.*)$", joined, re.MULTILINE)
    inline = re.findall(r"(?<!`)`([^`]+)`(?!`)", re.sub(r"^```.*?^```", "", joined, flags=re.MULTILINE | re.DOTALL))
    for line in [*"\n".join(fences).splitlines(), *indented, *(" ".join(code.split()) for code in inline)]:
        yield re.split(r"\s+#|\s\|\s|\s>\s", line.strip())[0]


def missing_links(page: Path, text: str) -> list[str]:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    return [to for to in targets if not to.startswith(("http", "mailto")) and not (page.parent / to).exists()]


def missing_paths(text: str) -> list[str]:
    found = []
    for code in spans(text):
        for word in code.split():
            path = word.rstrip(",.:;")
            if (
                not re.fullmatch(r"[\w./-]+(\.(py|md|cu|cuh|svg|h|yaml)|/)", path)
                or "/" not in path
                or NOT_OURS.search(path)
            ):
                continue
            if not any((ROOT / root / path).exists() for root in ROOTS):
                found.append(path)
    return found


def missing_modules(text: str) -> list[str]:
    found = []
    for line in command_lines(text):
        for module in re.findall(r"python -m ([\w.]+)", line):
            path = ROOT / module.replace(".", "/")
            if module.split(".")[0] in {"cellar", "benchmarks", "tests"} and not (
                path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
            ):
                found.append(module)
    return found


@functools.cache
def cellar_command() -> Any:
    """All verbs and options there are."""
    import typer

    from cellar.cli.main import build

    return typer.main.get_command(build())


def wrong_options(text: str) -> list[str]:
    """Verbs of `cellar` that there are not, and options that their verb does not have."""
    found = []
    for line in command_lines(text):
        words = line.split()
        if len(words) < 2 or words[0].removeprefix(".venv/bin/") != "cellar" or not re.fullmatch("[a-z]+", words[1]):
            continue
        command = cellar_command()
        rest = words[1:]
        while rest and hasattr(command, "commands"):
            there = command.commands
            if rest[0] not in there:
                found.append(" ".join(words[:3]))
                break
            command, rest = there[rest[0]], rest[1:]
        options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        asked = {word.split("=")[0] for word in rest if re.match(r"--[a-z]", word)}
        found += [f"{' '.join(words[:3])}: {option}" for option in sorted(asked - options - {"--help"})]
    return found


def missing_module_options(text: str) -> list[str]:
    """Options of `python -m benchmarks.NAME` that no file of it knows, neither as written nor as a field."""
    found = []
    for line in command_lines(text):
        match = re.match(r"python -m (benchmarks[\w.]*)(.*)", line)
        if match is None:
            continue
        path = ROOT / match[1].replace(".", "/")
        files = sorted(path.glob("*.py")) if path.is_dir() else [*path.parent.glob(f"{path.name}*.py")]
        source = "".join(file.read_text(encoding="utf-8") for file in files)
        for option in re.findall(r"(?<!\S)\[?(--[a-z][a-z-]+)", match[2]):
            if option not in source and option[2:].replace("-", "_") not in source:
                found.append(f"{match[1]} {option}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not missing_links(page, text)
    assert not missing_paths(text)
    assert not missing_modules(text)
    assert not wrong_options(text)
    assert not missing_module_options(text)


def test_what_does_not_exist_is_found() -> None:
    page = ROOT / "README.md"
    assert missing_links(page, "[a](docs/none.md) [b](docs/papers.md#x)") == ["docs/none.md"]
    assert missing_paths("`kv/none.py`, `kv/store.py`, `docs/none/`") == ["kv/none.py", "docs/none/"]
    assert missing_modules("    python -m benchmarks.none --x\n") == ["benchmarks.none"]
    assert wrong_options("```sh\ncellar bench cells --model lstm\n```\n") == [
        "cellar bench cells",
        "cellar bench cells: --model",
    ]
    assert wrong_options("    cellar generate hello --none 3 --max-tokens 4\n") == ["cellar generate hello: --none"]
    assert missing_module_options("`python -m benchmarks.decode --none`") == ["benchmarks.decode --none"]


def test_papers_are_cited_by_name() -> None:
    """Not by the number of a file, and not as "the thesis", in no name of a test either."""
    number = re.compile(
        r"(?<![A-Za-z])[Tt]hesis(?![A-Za-z])|(?<![\w.,/+-])00[1-4](?=[ ,:;')]|\.\s)|(?<=[A-Za-z]_)00[1-4](?!\d)"
    )
    for citation in ("as in 004, figure 2", "def test_curves_cross_as_in_004() -> None:", "the thesis", "thesis_001"):
        assert number.search(citation)
    for other in ("1_000_001", "0.002", "model-00001-of-00002", "hypothesis", "decision 0004"):
        assert not number.search(other)
    for path in [*PAGES, *SOURCES]:
        if path == Path(__file__):
            continue
        for line in path.read_text(encoding="utf-8").splitlines():
            assert not number.search(line), f"{name(path)}: {line.strip()}"


def test_a_number_is_one_decision() -> None:
    numbers = [path.name[:4] for path in (ROOT / "docs" / "decisions").glob("*.md")]
    assert len(numbers) == len(set(numbers))


def test_the_recipes_name_files() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    recipes = re.split(r"^### ", text, flags=re.MULTILINE)[1:]
    assert len(recipes) == 5
    for recipe in recipes:
        assert len({code for code in spans(recipe) if re.match(r"(cellar|tests)/.*\.py$", code)}) >= 5, recipe
    source = "".join(path.read_text(encoding="utf-8") for path in SOURCES)
    for code in spans(text):
        if re.fullmatch(r"([A-Z][A-Za-z]+){2,}", code):
            assert f"class {code}" in source, code


def test_every_figure_of_the_readme_has_a_source() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"^## How fast\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    header, _, *rows = [line for line in section.splitlines() if line.startswith("|")]
    assert header.strip("| ").endswith("source")
    for row in rows:
        figures, source = row.strip("| ").rsplit("|", 1)
        (page,) = re.findall(r"\]\((docs/performance/[\w.-]+)\)", source)
        published = (ROOT / page).read_text(encoding="utf-8")
        for figure in re.findall(r"(?<![\w.-])\d[\d,]*\.?\d*(?![\w.])", figures.split("|", 1)[1]):
            assert figure.rstrip(",.") in published, f"{figure} of {row} is not in {page}"


def cited_commits(text: str) -> set[str]:
    """Hashes of seven and more digits; one without letters, or without figures, only behind the word commit."""
    mixed = r"\b(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{7,40}\b"
    return {*re.findall(mixed, text), *re.findall(r"\bcommit\s+`?([0-9a-f]{7,40})\b", text)}


def history() -> list[str] | None:
    """Every commit that HEAD has behind it; None where they are not here: no git, no repository, a shallow clone."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    try:
        if not (ROOT / ".git").exists() or git("rev-parse", "--is-shallow-repository").strip() != "false":
            return None
        return git("rev-list", "HEAD").split()
    except (OSError, subprocess.SubprocessError):
        return None


def test_figures_are_of_commits_that_the_history_has() -> None:
    commits = history()
    if commits is None:
        return
    for page in (ROOT / "README.md", *sorted((ROOT / "docs" / "performance").glob("*.md"))):
        for commit in cited_commits(page.read_text(encoding="utf-8")):
            assert any(known.startswith(commit) for known in commits), f"{name(page)} cites {commit}"


def test_commits_are_found_where_they_are_cited() -> None:
    text = "9aae312 (2026-11-24), commit 1940572, commit\ndeadbee; 8589934592 bytes, 1,940,572 of them, effaced, 0x7fff"
    assert cited_commits(text) == {"9aae312", "1940572", "deadbee"}
