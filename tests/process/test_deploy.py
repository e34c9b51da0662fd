"""What `deploy/` holds fits together, as far as that shows without a container engine; and the example works."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml

from cyclone import cli, config

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SERVICE = DEPLOY / "example_service"


def load(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


COMPOSE = load("compose.yaml")
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


def instructions(word: str) -> list[str]:
    joined = DOCKERFILE.replace("\\\n", " ")
    return [line.removeprefix(word).strip() for line in joined.splitlines() if line.startswith(f"{word} ")]


def test_the_image_copies_what_exists_and_what_is_not_ignored() -> None:
    ignore = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    copies = [line.split() for line in instructions("COPY") if not line.startswith("--from")]
    sources = {source for *sources, _ in copies for source in sources}
    assert sources and all((ROOT / source).exists() for source in sources)
    assert {f"!{source}" for source in sources} <= set(ignore)


def test_the_image_runs_as_nobody_in_particular() -> None:
    assert len(instructions("FROM")) == 2
    assert instructions("USER") and not {"root", "0"} & set(instructions("USER"))


def commands() -> list[list[str]]:
    found = [service["command"] for service in COMPOSE["services"].values() if "command" in service]
    found += [yaml.safe_load(line) for line in instructions("CMD")]
    parts: list[list[str]] = []
    for command in found:
        if command[:2] == ["sh", "-c"]:
            parts += [shlex.split(part.replace("exec ", "")) for part in command[2].split("&&")]
        else:
            parts.append(command)
    return parts


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_each_command_is_one_that_exists(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    if command[0] == "python":
        assert command[1:3] == ["-m", "shop"]
        return
    assert command[0] in scripts
    app = {"cyclone": cli.app, "cyclone-pool": cli._pool_app}[command[0]]
    # Without a database the command ends where its options have been read.
    monkeypatch.delenv("CYCLONE_DSN", raising=False)
    monkeypatch.chdir(SERVICE)
    assert cli.run(app, [*command[1:], "--help"]) == 0
    assert cli.run(app, command[1:]) == cli.USAGE


def test_every_file_that_compose_mounts_or_builds_exists() -> None:
    for name, service in COMPOSE["services"].items():
        if "build" in service:
            context = (DEPLOY / service["build"]["context"]).resolve()
            assert context == ROOT and (context / service["build"]["dockerfile"]).is_file(), name
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], volume
        for other in service.get("depends_on", ()):
            assert other in COMPOSE["services"]


def test_the_parts_find_each_other() -> None:
    services = COMPOSE["services"]
    (scrape,) = load("prometheus.yml")["scrape_configs"]
    (discovery,) = scrape["dns_sd_configs"]
    assert set(discovery["names"]) <= set(services)
    assert str(discovery["port"]) in instructions("EXPOSE") and f":{discovery['port']}/healthz" in DOCKERFILE
    (source,) = load("grafana/datasources.yaml")["datasources"]
    assert re.fullmatch(r"http://(\w+):9090", source["url"])[1] in services  # type: ignore[index]
    (provider,) = load("grafana/dashboards.yaml")["providers"]
    mounts = dict(volume.split(":")[:2][::-1] for volume in services["grafana"]["volumes"])
    assert mounts[provider["options"]["path"]] == "../grafana"
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (DEPLOY / home.replace("/dashboards", "../grafana")).is_file()
    dsn = services["pool"]["environment"]["CYCLONE_DSN"]
    assert re.search(r"@(\w+)/", dsn)[1] in services  # type: ignore[index]


def test_a_pool_has_time_to_drain() -> None:
    limit_s = config.parse_seconds("stop_grace_period", COMPOSE["services"]["pool"]["stop_grace_period"])
    assert limit_s > config.WorkerOptions().drain_timeout_s + 15


def test_the_readme_names_files_and_options_that_exist() -> None:
    text = (DEPLOY / "README.md").read_text()
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (DEPLOY / link).exists(), link
    known = {f"--{name.replace('_', '-')}" for name in config.WORKER_NAMES} | {"--metrics-host"}
    docker = {"--build", "--detach", "--scale", "--volumes"}
    assert set(re.findall(r"--[a-z][a-z-]+", text)) <= known | docker


def test_the_example_service(dsn: str, conn: psycopg.Connection) -> None:
    env = {**os.environ, "CYCLONE_DSN": dsn}
    shop = [sys.executable, "-m", "shop"]
    subprocess.run([*shop, "setup"], cwd=SERVICE, env=env, check=True)
    command = COMPOSE["services"]["pool"]["command"]
    options = [*command[1:-1], "--procs", "2", "--metrics-host", "127.0.0.1", "--metrics-port", "0", command[-1]]
    pool = subprocess.Popen(
        [sys.executable, "-c", "from cyclone import cli; cli.pool_main()", *options],
        cwd=SERVICE,
        env=env,
        stderr=subprocess.DEVNULL,
    )
    try:
        done = subprocess.run([*shop, "order", "50"], cwd=SERVICE, env=env, check=True, capture_output=True, text=True)
        assert re.fullmatch(r"placed 50 orders; the first charge is \d+:charge\n", done.stdout)
        while conn.execute("SELECT count(*) FROM cyclone_steps WHERE state <> 'completed'").fetchone() != (0,):
            conn.execute("SELECT pg_sleep(0.02)")
    finally:
        pool.terminate()
        assert pool.wait(60) == 0
    assert conn.execute("SELECT count(*), count(DISTINCT order_id) FROM shop_ledger").fetchone() == (50, 50)
