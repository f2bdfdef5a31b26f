"""The page at `/`: files read once at start, and headers that keep the page to itself.

Addresses in the page are relative, so it also works behind a proxy that puts a prefix before them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import Response

from cellar.server.errors import ApiError

DIRECTORY = Path(__file__).parent / "page"
PREFIX = "/page/"

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml; charset=utf-8",
    ".woff2": "font/woff2",
}

HEADERS = {
    # Nothing from elsewhere, no code in attributes, and no way to make elements from a model's text.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    # Kept, but asked about each time: after an update nobody has half of the old page.
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file as it is sent."""

    body: bytes
    media_type: str
    etag: str

    @classmethod
    def read(cls, path: Path) -> PageFile:
        """Read a file; its ending says its type."""
        body = path.read_bytes()
        return cls(body, _TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')

    def answer(self, if_none_match: str) -> Response:
        """The file, or 304 for a client that has it (RFC 9110, section 13.1.2)."""
        headers = {**HEADERS, "etag": self.etag}
        held = {tag.strip().removeprefix("W/") for tag in if_none_match.split(",")}
        if self.etag in held or "*" in held:
            return Response(status_code=304, headers=headers)
        return Response(self.body, headers=headers, media_type=self.media_type)


def page_files(directory: Path = DIRECTORY) -> Mapping[str, PageFile]:
    """The page's files by their path in it; its libraries have a folder, whose licences are not served."""
    found = sorted(path for path in directory.rglob("*") if path.suffix in _TYPES)
    return {path.relative_to(directory).as_posix(): PageFile.read(path) for path in found}


def install(app: FastAPI) -> None:
    """Serve the page at `/`, and what it is made of below `/page/`."""
    files = page_files()

    async def index(request: Request) -> Response:
        return files["index.html"].answer(request.headers.get("if-none-match", ""))

    async def part(name: str, request: Request) -> Response:
        if name not in files or name == "index.html":
            raise ApiError(404, "the page has no such file.")
        return files[name].answer(request.headers.get("if-none-match", ""))

    for path, endpoint in (("/", index), (f"{PREFIX}{{name:path}}", part)):
        app.add_api_route(path, endpoint, methods=["GET", "HEAD"], response_model=None, include_in_schema=False)
