"""The manifests are what Kubernetes and Ray Serve take, and say what Cellar reads."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import ray
import torch
import yaml
from ray.serve.schema import ServeDeploySchema

from cellar.core.config import EngineConfig
from cellar.deploy.options import read_options
from cellar.deploy.ray import app, resources

DEPLOY = Path(__file__).parents[2] / "deploy"
VERSION = "1.31"
"""Of Kubernetes."""

RAY, PLAIN = DEPLOY / "kuberay" / "rayservice.yaml", DEPLOY / "kubernetes" / "cellar.yaml"
URLS = {"CELLAR_CONVERSATION_STORE": "postgresql://a:b@c/d", "CELLAR_KV_REMOTE": "rediss://:a@b"}


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def kinds(path: Path) -> dict[str, dict[str, Any]]:
    return {found["kind"]: found for found in documents(path)}


def serve_configs() -> dict[str, Any]:
    return {
        "ray": documents(DEPLOY / "ray" / "serve.yaml")[0],
        "kuberay": yaml.safe_load(kinds(RAY)["RayService"]["spec"]["serveConfigV2"]),
        "kubernetes": yaml.safe_load(kinds(PLAIN)["ConfigMap"]["data"]["serve.yaml"]),
    }


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every pod's template."""
    for found in documents(PLAIN):
        if "template" in found.get("spec", {}):
            yield found["metadata"]["name"], found["spec"]["template"]
    cluster = kinds(RAY)["RayService"]["spec"]["rayClusterConfig"]
    yield "kuberay-head", cluster["headGroupSpec"]["template"]
    for group in cluster["workerGroupSpecs"]:
        yield f"kuberay-{group['groupName']}", group["template"]


@pytest.mark.parametrize("found", [*documents(PLAIN), kinds(RAY)["NetworkPolicy"]], ids=lambda one: one["kind"])
def test_kubernetes_takes_what_is_its_own(found: dict[str, Any]) -> None:
    kubernetes_validate.validate(found, VERSION, strict=True)


@pytest.mark.parametrize(("name", "template"), list(pods()), ids=lambda one: one if isinstance(one, str) else "")
def test_pods_are_pods_and_send_no_usage_reports(name: str, template: dict[str, Any]) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": template["spec"]}
    kubernetes_validate.validate(pod, VERSION, strict=True)
    for container in template["spec"]["containers"]:
        said = {one["name"]: one["value"] for one in container["env"]}
        assert said["RAY_USAGE_STATS_ENABLED"] == "0"
        assert said["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
        assert int(said["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) >= 600  # as long as a front may drain
        assert "kuberay" in name or said["RAY_AUTH_MODE"] == "token"


@pytest.mark.parametrize("name", serve_configs())
def test_ray_serve_takes_the_application(name: str) -> None:
    config = serve_configs()[name]
    schema = ServeDeploySchema(**config)
    (application,) = schema.applications
    assert schema.http_options.keep_alive_timeout_s >= 3600  # no front ends an idle connection that HAProxy is using
    assert application.import_path == "cellar.deploy.ray:app"
    assert {one.name for one in application.deployments} == {"Front", "Engine"}
    # Ray passes over keys that it does not know.
    assert config.keys() <= ServeDeploySchema.model_fields.keys()
    for one in config["applications"]:
        assert one.keys() <= type(application).model_fields.keys()
        for deployment in one["deployments"]:
            assert deployment.keys() <= type(application.deployments[0]).model_fields.keys()


@pytest.mark.parametrize("name", serve_configs())
def test_cellar_takes_the_arguments(name: str) -> None:
    args = serve_configs()[name]["applications"][0]["args"]
    options = read_options(args, URLS if "kv_remote_size" in args else {})
    assert options.engine.model.model == "/models/my-model"


def test_the_manifests_of_kubernetes_deploy_the_same_application() -> None:
    """But for how it scales, and where a volume is mounted."""
    kuberay, kubernetes = serve_configs()["kuberay"], serve_configs()["kubernetes"]
    for config in (kuberay, kubernetes):
        (application,) = config["applications"]
        application["args"].pop("data_dir")
        engine = application["deployments"][1]
        engine.pop("num_replicas", None)
        engine.pop("autoscaling_config", None)
    assert kuberay == kubernetes


def test_kuberay_makes_a_token_without_which_nobody_speaks_to_ray() -> None:
    assert kinds(RAY)["RayService"]["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}


def test_ray_serves_autoscaling_finds_the_policy() -> None:
    config = ServeDeploySchema(**serve_configs()["kuberay"])
    scaling: Any = config.applications[0].deployments[1].autoscaling_config
    policy = scaling["policy"] if isinstance(scaling, dict) else scaling.policy.model_dump()
    module, _, name = policy["policy_function"].partition(":")
    assert callable(getattr(import_module(module), name)(**policy["policy_kwargs"]))


def test_an_application_is_made_before_there_is_a_cluster() -> None:
    """`serve run cellar.deploy.ray:app` makes it first, and joins or starts one then."""
    assert not ray.is_initialized()
    assert app({"max_num_seqs": "8"}) is not None
    taken = resources(EngineConfig.of())
    assert ("num_gpus" in taken) == torch.cuda.is_available()
    assert resources(EngineConfig.of(device="cpu", num_threads=3)) == {"num_cpus": 3.0}
    assert not ray.is_initialized()
