"""HTTPS by real clients, in one process and by several fronts; what cannot be served is said before anything starts."""

from __future__ import annotations

import datetime
import ipaddress
import json
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from cellar import AsyncLLM
from cellar.core.errors import ConfigError
from cellar.server.app import build_app
from cellar.server.config import LimitConfig, ServerConfig
from cellar.server.host import SameProcess, ServedModel
from cellar.server.run import served_at
from cellar.server.tls import check_certificate
from tests.fake_front import open_fake
from tests.limits import SECONDS
from tests.server.served import TEXT, plain, running

ROOT = Path(__file__).parents[2]
IDS = TEXT.encode("Once upon a time")


def write_certificate(folder: Path, password: bytes | None = None) -> dict[str, str]:
    """A certificate of 127.0.0.1 that vouches for itself, and its key: options of the server."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "cellar test")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    how = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how)
    folder.mkdir(exist_ok=True)
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(private)
    return {"ssl_certfile": str(folder / "cert.pem"), "ssl_keyfile": str(folder / "key.pem")}


def trusting(options: dict[str, str]) -> httpx.Client:
    return httpx.Client(verify=ssl.create_default_context(cafile=options["ssl_certfile"]), timeout=SECONDS)


def test_the_official_client_over_tls(tmp_path: Path) -> None:
    options = write_certificate(tmp_path)
    opened, _ = open_fake()
    server, limits = ServerConfig(log_level="warning", **options), LimitConfig()  # type: ignore[arg-type]
    app = build_app(SameProcess(AsyncLLM.over(opened)), ServedModel.of(opened, ("fake",)), server, limits)
    with running(app, limits, server) as url, trusting(options) as http:
        assert url.startswith("https://")
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http)
        asked: dict[str, Any] = {"model": "fake", "prompt": IDS, "max_tokens": 40, "temperature": 0}
        asked["extra_body"] = {"ignore_eos": True}
        wanted = TEXT.decode(plain(IDS, 40))
        assert client.completions.create(**asked).choices[0].text == wanted
        streamed = client.completions.create(**asked, stream=True)
        assert "".join(chunk.choices[0].text for chunk in streamed) == wanted
        with pytest.raises(httpx.ConnectError, match=r"(?i)certificate"):
            httpx.get(f"{url}/health", timeout=SECONDS)  # who does not trust it does not talk to it
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url.replace('https', 'http')}/health", timeout=SECONDS)
        assert http.get(f"{url}/health").status_code == 200


@pytest.mark.long
def test_fronts_serve_it_as_well(tmp_path: Path) -> None:
    options = write_certificate(tmp_path)
    asked = json.dumps({"fronts": 2, "server": options})
    command = [sys.executable, "-m", "tests.server.fake_process", asked]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().rpartition(" at ")[2].strip()
            assert url.startswith("https://")
            for _ in range(8):
                with trusting(options) as http:
                    assert http.get(f"{url}/models").json()["data"][0]["id"] == "fake"
        finally:
            process.terminate()
        assert process.wait(SECONDS) == 0


def test_the_address_says_so(tmp_path: Path) -> None:
    server = ServerConfig(**write_certificate(tmp_path))  # type: ignore[arg-type]
    said = served_at(("m",), server, 8443)
    assert "https://127.0.0.1:8443/v1" in said
    assert "Open https://127.0.0.1:8443/ " in said


def test_what_cannot_be_served_is_said_at_once(tmp_path: Path) -> None:
    good, locked = write_certificate(tmp_path / "a"), write_certificate(tmp_path / "b", b"secret")
    both = tmp_path / "both.pem"
    both.write_bytes(Path(good["ssl_certfile"]).read_bytes() + Path(good["ssl_keyfile"]).read_bytes())
    check_certificate(ServerConfig(ssl_certfile=str(both)))
    check_certificate(ServerConfig(**good))  # type: ignore[arg-type]
    check_certificate(ServerConfig())
    wrong: list[dict[str, str]] = [
        {"ssl_certfile": str(tmp_path / "none.pem")},
        {"ssl_certfile": good["ssl_certfile"]},  # without its key
        {"ssl_certfile": good["ssl_certfile"], "ssl_keyfile": locked["ssl_keyfile"]},
        locked,
        {"ssl_certfile": __file__},
    ]
    for options in wrong:
        with pytest.raises(ConfigError, match=r"TLS cannot be served with ssl_certfile .*; give a certificate"):
            check_certificate(ServerConfig(**options))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="give ssl_certfile, too"):
        ServerConfig(ssl_keyfile="key.pem")
