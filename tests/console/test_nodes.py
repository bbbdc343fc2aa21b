"""The nodes page: hosts, what runs on them, and who sees it."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from datetime import timedelta

import pytest
from django.utils import timezone

from catalog.models import DesiredState, Replica, ReplicaState, ServedModel
from catalog.replica_rows import LOST
from console.views.home import this_host
from engine.contract.replica_state import Numerics, ProcessStats
from tests.console.beats import heartbeat
from tests.console.conftest import Beat, Login


def test_replicas_stand_under_their_hosts_with_their_device_and_load(
    login: Login, beat: Beat
) -> None:
    quill, now = ServedModel.objects.get(name="quill"), time.time()
    process = ProcessStats(resident_bytes=3 << 30, cpu_seconds=150.0, start_time=now - 100)
    beat(
        heartbeat(
            "quill-0",
            host="gpu-1",
            at=now,
            process=process,
            numerics=Numerics(weights="0" * 64, isa="NVIDIA H200"),
            stats={"num_requests_running": 7, "kv_cache_usage_perc": 0.25},
        )
    )
    beat(heartbeat("elsewhere-0", model="not-in-the-catalogue", host="gpu-2"))
    failed, stopped = ReplicaState.FAILED, ReplicaState.STOPPED
    for replica_id, state in (("quill-1", failed), ("quill-2", stopped)):
        Replica.objects.create(
            served_model=quill, replica_id=replica_id, host="gpu-1", state=state, detail="no memory"
        )
    page = login("root").get("/console/nodes/")
    nodes = {node.name: node for node in page.context["nodes"]}
    assert set(nodes) == {"gpu-1", "gpu-2", socket.gethostname()}
    running, broken = nodes["gpu-1"].replicas
    assert (running.replica_id, running.state, running.model) == ("quill-0", "ready", quill)
    assert (running.num_cores, running.kv_percent) == (1.5, 25.0)
    assert nodes["gpu-1"].resident_bytes == 3 << 30
    assert (broken.replica_id, broken.state, broken.beat) == ("quill-1", "failed", None)
    text = page.content.decode()
    for expected_text in (
        "NVIDIA H200",
        "no memory",
        "not-in-the-catalogue",
        f"/models/{quill.pk}/",
    ):
        assert expected_text in text
    assert "quill-2" not in text


def test_the_gateways_own_host_shows_its_hardware(login: Login) -> None:
    (node,) = login("root").get("/console/nodes/").context["nodes"]
    assert (node.name, node.replicas) == (socket.gethostname(), [])
    assert node.host.total_memory >= node.host.free_memory > 0


def test_others_are_refused_and_see_no_link(login: Login, beat: Beat) -> None:
    beat(heartbeat("quill-0", host="gpu-1"))
    ada = login("ada")
    page = ada.get("/console/nodes/")
    assert page.status_code == 403
    assert "gpu-1" not in page.content.decode()
    for path in ("/console/", "/console/models/"):
        assert "/console/nodes/" not in ada.get(path).content.decode()
        assert "/console/nodes/" in login("root").get(path).content.decode()


def test_one_line_says_whether_all_is_well_and_which_node_is_silent_or_full(
    login: Login, beat: Beat, monkeypatch: pytest.MonkeyPatch
) -> None:
    quill, now = ServedModel.objects.get(name="quill"), timezone.now()
    root = login("root")
    host = replace(this_host(), free_disk=50, total_disk=100, free_memory=50, total_memory=100)
    monkeypatch.setattr("console.views.nodes.this_host", lambda: host)
    beat(heartbeat("quill-0", host=host.name))
    page = root.get("/console/nodes/").content.decode()
    assert "All is well on 1 node." in page
    full = {"num_requests_waiting": 3, "kv_cache_usage_perc": 0.99}
    beat(heartbeat("quill-0", host=host.name, stats=full))
    monkeypatch.setattr("console.views.nodes.this_host", lambda: replace(host, free_disk=4))
    lost = {"served_model": quill, "state": ReplicaState.STOPPED, "detail": LOST}
    seen = now - timedelta(hours=1)
    Replica.objects.create(replica_id="quill-1", host="gpu-1", last_seen=seen, **lost)
    seen_earlier = now - timedelta(days=2)
    Replica.objects.create(replica_id="quill-2", host="gpu-2", last_seen=seen_earlier, **lost)
    page = root.get("/console/nodes/")
    problems = {
        node.name: [(problem.text, problem.since) for problem in node.problems]
        for node in page.context["nodes"]
    }
    assert problems == {
        host.name: [
            ("the KV cache of quill-0 is full, 3 waiting", None),
            ("4.0 % of the disk is free", None),
        ],
        "gpu-1": [("silent", seen)],
    }
    assert "2 of 2 nodes need attention." in page.content.decode()
    quill.desired_state = DesiredState.UNLOADED
    quill.save()
    assert len(root.get("/console/nodes/").context["nodes"]) == 1
