"""kubectl's client dry run, against a server that answers which kinds of objects there are."""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.deploy.helm import KUBECTL

#: Kinds of a cluster with KEDA, the Prometheus Operator, LeaderWorkerSets and the Gateway API:
#: plural -> kind.
KINDS: dict[str, dict[str, str]] = {
    "v1": {
        "services": "Service",
        "serviceaccounts": "ServiceAccount",
        "persistentvolumeclaims": "PersistentVolumeClaim",
    },
    "apps/v1": {"deployments": "Deployment", "statefulsets": "StatefulSet"},
    "autoscaling/v2": {"horizontalpodautoscalers": "HorizontalPodAutoscaler"},
    "batch/v1": {"jobs": "Job"},
    "networking.k8s.io/v1": {"ingresses": "Ingress", "networkpolicies": "NetworkPolicy"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "monitoring.coreos.com/v1": {"servicemonitors": "ServiceMonitor"},
    "keda.sh/v1alpha1": {"scaledobjects": "ScaledObject"},
    "leaderworkerset.x-k8s.io/v1": {"leaderworkersets": "LeaderWorkerSet"},
    "gateway.networking.k8s.io/v1": {"httproutes": "HTTPRoute"},
    "inference.networking.k8s.io/v1": {"inferencepools": "InferencePool"},
}


def discovery() -> dict[str, Any]:
    """Path -> answer of an API server's discovery."""
    groups: dict[str, list[str]] = defaultdict(list)
    answers: dict[str, Any] = {"/api": {"kind": "APIVersions", "versions": ["v1"]}}
    for version, kinds in KINDS.items():
        root = "/api" if version == "v1" else "/apis"
        answers[f"{root}/{version}"] = {
            "kind": "APIResourceList",
            "groupVersion": version,
            "resources": [
                {"name": name, "kind": kind, "namespaced": True, "verbs": ["create"]}
                for name, kind in kinds.items()
            ],
        }
        if version != "v1":
            groups[version.partition("/")[0]].append(version)
    answers["/apis"] = {
        "kind": "APIGroupList",
        "groups": [
            {
                "name": group,
                "versions": [
                    {"groupVersion": version, "version": version.partition("/")[2]}
                    for version in versions
                ],
            }
            for group, versions in groups.items()
        ],
    }
    return answers


@contextmanager
def api_server() -> Iterator[str]:
    """The address of a server with discovery alone."""
    answers = discovery()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path.partition("?")[0])
            body = json.dumps(answer or {"kind": "Status", "code": 404}).encode()
            self.send_response(200 if answer else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def dry_run(server: str, documents: str) -> subprocess.CompletedProcess[str]:
    """`kubectl create --dry-run=client` of the documents; nothing is read of the user's."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(KUBECTL), f"--server={server}", f"--cache-dir={folder}"]
        command += ["create", "--dry-run=client", "--validate=false", "-f", "-", "-o", "name"]
        environment = {"KUBECONFIG": "/dev/null", "HOME": folder}
        return subprocess.run(
            command, input=documents, env=environment, capture_output=True, text=True, timeout=120
        )
