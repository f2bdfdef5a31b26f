"""The dashboard asks for metrics that the server has, and the Dockerfile for files that are there."""

from __future__ import annotations

import json
import re
from pathlib import Path

from cellar.server.fields import CHAT, COMPLETION
from cellar.server.metrics import Metrics
from cellar.server.requests import ChatRequest, CompletionRequest
from tests.server.served import serve
from tests.server.test_tier_metrics import WITH_HOST

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "dashboards" / "cellar.json"


def test_the_dashboard_knows_every_metric_it_asks_for() -> None:
    with serve() as served, served.http() as http:
        http.post("/v1/completions", json={"prompt": [1], "max_tokens": 2})
        names = {line.split()[2] for line in http.get("/metrics").text.splitlines() if line.startswith("# TYPE")}
        text = http.get("/metrics").text
    text += Metrics("m", lambda: WITH_HOST).text().decode()  # the server above has no tiers
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    asked = {name for expression in expressions for name in re.findall(r"cellar:[a-z0-9_]+", expression)}
    assert len(asked) > 15
    for name in asked:
        assert re.search(rf"^{name}\b", text, re.MULTILINE), name
    assert all(name.startswith(("cellar:", "vllm:")) for name in names)
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))


def test_the_dockerfile_copies_what_is_there() -> None:
    for line in (ROOT / "deploy" / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY "):
            *sources, _ = line.split()[1:]
            assert all((ROOT / source).exists() for source in sources), line


def test_the_documentation_lists_every_field() -> None:
    text = (ROOT / "docs" / "serving.md").read_text()
    shared = {"model", "messages", "prompt"}
    fields = {*CompletionRequest.model_fields, *ChatRequest.model_fields, *COMPLETION, *CHAT} - shared
    assert fields <= set(re.findall(r"`(\w+)`", text))
