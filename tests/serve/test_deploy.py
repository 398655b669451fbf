"""The files under deploy/ and docker/: they parse, and name only metrics, flags and files that are there."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from outrider.cli import serve
from outrider.serve.metrics import Snapshot
from tests.engine.harness import make_engine
from tests.engine.test_metrics import TARGET
from tests.serve.test_metrics import numbers

ROOT = Path(__file__).resolve().parents[2]
DEPLOY, DOCKER = ROOT / "deploy", ROOT / "docker"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "outrider.json"
yaml = pytest.importorskip("yaml", reason="pyyaml is not installed: pip install 'outrider[dev]'")


def parsed(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def exported() -> set[str]:
    """Names of all samples, those that have no value yet among them."""
    text = generate_latest(Snapshot.of(make_engine(TARGET))).decode()
    declared = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    return declared | {name.partition("{")[0] for name in numbers(text)}


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    rules = [rule for group in parsed(DEPLOY / "prometheus" / "alerts.yml")["groups"] for rule in group["rules"]]
    return [t["expr"] for panel in panels for t in panel.get("targets", ())] + [rule["expr"] for rule in rules]


def test_every_metric_that_is_named_exists(exported: set[str]) -> None:
    found = {name for text in expressions() for name in re.findall(r"outrider:\w+", text)}
    assert len(found) > 20
    assert found <= exported, found - exported
    for text in expressions():
        for opening, closing in ("()", "[]", "{}"):
            assert text.count(opening) == text.count(closing), text


def test_the_dashboard_shows_what_matters() -> None:
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    text = " ".join(expressions())
    for name in (
        "spec_decode_num_accepted_tokens_per_pos_total",
        "spec_decode_draft_length",
        "spec_decode_estimated_speedup",
        "generation_tokens_total",
        "time_to_first_token_seconds_bucket",
        "time_per_output_token_seconds_bucket",
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
    ):
        assert f"outrider:{name}" in text
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, f"{panel['title']} covers another panel"
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_the_alerts() -> None:
    (group,) = parsed(DEPLOY / "prometheus" / "alerts.yml")["groups"]
    rules = {rule["alert"]: rule for rule in group["rules"]}
    assert {"OutriderNotReady", "OutriderAcceptanceDropped", "OutriderSpeculationSlowsDown"} <= rules.keys()
    for rule in rules.values():
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_the_files_that_compose_mounts_are_there() -> None:
    services = parsed(DOCKER / "compose.yaml")["services"]
    mounts = [m.split(":")[0] for each in services.values() for m in each["volumes"] if m.startswith("..")]
    assert mounts
    assert all((DOCKER / mount).is_dir() for mount in mounts)
    for file in DEPLOY.rglob("*.yml"):
        assert parsed(file)
    job = parsed(DEPLOY / "prometheus" / "prometheus.yml")["scrape_configs"][0]
    assert job["static_configs"][0]["targets"] == ["outrider:8000"]
    assert 'up{job="outrider"}' in " ".join(expressions())
    assert job["job_name"] == "outrider"
    assert all(port.startswith("127.0.0.1:") for each in services.values() for port in each["ports"])


def test_the_command_lines_are_understood() -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    command = parsed(DOCKER / "compose.yaml")["services"]["outrider"]["command"]
    entry = re.search(r"^ENTRYPOINT (\[.*\])$", (DOCKER / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert entry is not None
    assert json.loads(entry[1])[:2] == ["outrider", "serve"]
    args = parser.parse_args(json.loads(entry[1])[2:] + command)
    assert (args.model, args.host, args.log_format) == ("smollm2", "0.0.0.0", "json")
    unit = (DEPLOY / "outrider.service").read_text(encoding="utf-8")
    assert "bin/outrider serve $OUTRIDER_ARGS" in unit
    shown = re.search(r"OUTRIDER_ARGS=(.*)", unit)
    assert shown is not None
    parser.parse_args(shown[1].split())
