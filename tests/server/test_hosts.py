"""By which names a server answers."""

from __future__ import annotations

import pytest

from cellar.core.errors import ConfigError
from cellar.server.config import ServerConfig
from cellar.server.hosts import hosts_of
from tests.server.served import serve

OURS = ("localhost", "LocalHost:8000", "app.localhost:1", "127.0.0.1:80", "[::1]:8000", "[::1]", "localhost.:80")
FOREIGN = ("evil.example", "127.0.0.1.evil.example:8000", "localhost.evil.example", "[::2]:80", "", "evil:80@localhost")


@pytest.mark.long
def test_a_page_cannot_reach_an_open_server_by_a_name_of_its_own() -> None:
    with serve() as served, served.http() as http:
        for path in ("/health", "/", "/v1/models", "/engine/status"):
            for host in OURS:
                assert http.get(path, headers={"host": host}).status_code == 200, host
            for host in FOREIGN:
                answer = http.get(path, headers={"host": host})
                assert answer.status_code == 400, host
                assert answer.json()["error"]["code"] == "host_not_allowed"


def test_names_are_as_the_options_say() -> None:
    with serve({"allowed_hosts": "llm.example, *.inside.example,[::1]"}) as served, served.http() as http:
        for host, status in (
            *(("llm.example:443", 200), ("a.b.inside.example", 200), ("[::1]:1", 200)),
            *(("inside.example", 400), ("localhost", 400), ("xllm.example", 400)),
        ):
            assert http.get("/health", headers={"host": host}).status_code == status, host
    for options in ({"allowed_hosts": "*"}, {"host": "0.0.0.0"}, {"host": "::"}, {"api_key": "k"}):
        with serve(options) as served, served.http() as http:
            assert http.get("/health", headers={"host": "any.example"}).status_code == 200


def test_a_host_of_its_own_is_a_name() -> None:
    for host in ("127.0.0.7", "::1", "localhost", "box.localhost"):
        assert host in (hosts_of(ServerConfig(host=host), False) or ())
    assert hosts_of(ServerConfig(host="10.0.0.1"), False) is None
    assert hosts_of(ServerConfig(), True) is None


@pytest.mark.parametrize("names", ["", " , ", "http://a.example", "a.*.example", "a b", "user@a"])
def test_names_that_are_none(names: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts"):
        hosts_of(ServerConfig(allowed_hosts=names), False)
