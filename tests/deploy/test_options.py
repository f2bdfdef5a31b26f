"""Options of a deployment: names of `cellar serve`, text as a command line gives it, secrets from the environment."""

from __future__ import annotations

import pytest

from cellar.core.errors import ConfigError
from cellar.deploy.options import CONVERSATION_STORE, KV_REMOTE, read_options
from cellar.server.config import LimitConfig, ServerConfig


def test_nothing_given_is_the_demo_model_as_it_is_served() -> None:
    options = read_options({}, {})
    assert options.engine.model.model is None
    assert options.engine.schedule.max_mixed_seconds == 0.1
    assert (options.server, options.limits) == (ServerConfig(), LimitConfig())


def test_text_of_a_command_line_is_what_a_yaml_says() -> None:
    text = {"max_num_seqs": "8", "kv_offloading_size": "1.5", "share_prefixes": "true", "max_queued_requests": "3"}
    typed = {"max_num_seqs": 8, "kv_offloading_size": 1.5, "share_prefixes": True, "max_queued_requests": 3}
    options = read_options(text, {})
    assert options == read_options(typed, {})
    assert options.engine.cache.kv_offloading_size == 1.5
    assert options.engine.schedule.max_num_seqs == 8
    assert options.server.share_prefixes
    assert options.limits.max_queued_requests == 3


def test_urls_come_from_the_environment_unless_they_are_given() -> None:
    environment = {CONVERSATION_STORE: "postgresql://u:p@db/x", KV_REMOTE: "rediss://:p@cache"}
    options = read_options({"kv_remote_size": 2}, environment)
    assert options.server.conversation_store == "postgresql://u:p@db/x"
    assert options.engine.cache.kv_remote == "rediss://:p@cache"
    given = read_options({"conversation_store": "postgresql://other/x"}, {CONVERSATION_STORE: "postgresql://u:p@db/x"})
    assert given.server.conversation_store == "postgresql://other/x"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"max_num_sequences": 3}, "did you mean max_num_seqs"),
        ({"max_num_seqs": "many"}, "max_num_seqs is 'many', which cannot be read"),
        ({"port": 8000}, "http_options"),
        ({"api_key": "secret"}, "CELLAR_API_KEY"),
        ({"api_server_count": 2}, "Front"),
        ({"kv_disk_path": "/disk"}, "kv_remote"),
        ({"device": "cuda:1"}, "Ray hands out GPUs"),
        ({"conversation_store": "postgresql://u:p@db/x"}, CONVERSATION_STORE),
        ({"kv_remote": "rediss://:p@cache", "kv_remote_size": 1}, KV_REMOTE),
        ({"max_num_seqs": 0}, "at least 1"),
    ],
)
def test_what_has_no_place_is_refused_by_name(args: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_options(args, {})


def test_a_password_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as error:
        read_options({"conversation_store": "postgresql://u:hunter2@db/x"}, {})
    assert "hunter2" not in str(error.value)
