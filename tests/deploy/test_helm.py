"""The Helm chart: helm and Kubernetes' schemas take it, and every value has its effect."""

from __future__ import annotations

import copy
import itertools
import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from django.core.management import get_commands, load_command_class

from tests.deploy import golden
from tests.deploy.helm import CHART, HELM, helm
from tests.deploy.kubectl import api_server, dry_run
from tests.deploy.restricted import violations
from tests.deploy.variables import DECLARED_VARIABLES
from tests.docs.commands import problems_with

pytestmark = pytest.mark.skipif(not HELM.exists(), reason="helm is missing: make install-test")

VERSIONS = [f"1.{minor}" for minor in range(31, 38)]
#: Kinds of other people's, whose schemas aren't Kubernetes'.
FOREIGN = {"ServiceMonitor", "ScaledObject", "InferencePool", "HTTPRoute", "LeaderWorkerSet"}
DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
#: A release in which everything is on, so that every value can have an effect.
FULL: dict[str, Any] = {
    "models": [
        {"name": "qwen", "source": "Qwen/Qwen3-0.6B", "args": ["--max-model-len=8192"]},
        {"name": "Org/Other.Model", "source": "/models/other", "autoscaling": {"enabled": True}},
    ],
    "modelDefaults": {"cache": {"size": "10Gi"}},
    "modelFiles": {"existingClaim": "weights"},
    "ingress": {"enabled": True, "tlsSecret": "certificate"},
    "serviceMonitor": {"enabled": True},
    "gatewayAPI": {"enabled": True},
}


def merged(*values: dict[str, Any]) -> dict[str, Any]:
    """The mappings merged into each other; of lists the last one counts."""
    result: dict[str, Any] = {}
    for value in values:
        for key, inner in value.items():
            existing = result.get(key)
            both = isinstance(inner, dict) and isinstance(existing, dict)
            result[key] = merged(existing, inner) if both else copy.deepcopy(inner)
    return result


def rendered(values: dict[str, Any], chart: Path = CHART) -> str:
    return _render(yaml.safe_dump(values), chart)


@cache
def _render(values: str, chart: Path) -> str:
    done = helm("template", "quire", str(chart), values=values)
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(values: dict[str, Any], chart: Path = CHART) -> list[dict[str, Any]]:
    documents = yaml.load_all(rendered(values, chart), Loader=yaml.CSafeLoader)
    return [document for document in documents if document]


def templates(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Name of a workload -> its pod's template."""
    kinds = ("Deployment", "StatefulSet", "Job")
    created = objects(values)
    return {
        one["metadata"]["name"]: one["spec"]["template"] for one in created if one["kind"] in kinds
    } | groups(created)


def groups(created: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Name of a LeaderWorkerSet and of a pod of it -> that pod's template."""
    return {
        f"{one['metadata']['name']} {role}": one["spec"]["leaderWorkerTemplate"][role]
        for one in created
        if one["kind"] == "LeaderWorkerSet"
        for role in ("leaderTemplate", "workerTemplate")
    }


def pods(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Name of a workload -> its pod's spec."""
    return {name: template["spec"] for name, template in templates(values).items()}


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of all values that aren't mappings with something in them."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    else:
        yield path


#: Another value than the default's, by the last part of the path or the whole of it.
OTHER: dict[str, Any] = {
    **{key: {"a": "b"} for key in ("podAnnotations", "annotations", "nodeSelector", "labels")},
    "tolerations": [{"key": "a", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "gatewayFrom": [{"namespaceSelector": {}}],
    "imagePullSecrets": [{"name": "registry"}],
    "args": ["--max-num-seqs=4"],
    "models": [{"name": "one", "source": "x"}],
    "hosts": ["other.example.org"],
    "pullPolicy": "Always",
    "service.type": "LoadBalancer",
    "schedules": [{"start": "0 8 * * 1-5", "end": "0 18 * * 1-5", "replicas": 2}],
    "prometheus": "http://elsewhere:9090",
    "interval": "5s",
    "mountPath": "/weights",
    "QUIRE_TLS": "off",
    "QUIRE_LOG_STYLE": "text",
    "FORWARDED_ALLOW_IPS": "10.0.0.1",
    **dict.fromkeys(("cpu", "memory", "sharedMemory"), "7Gi"),
    "storage.size": "7Gi",
    "modelDefaults.cache.size": "7Gi",
}


def other(path: tuple[str, ...], value: Any) -> Any:
    for key in (".".join(path), path[-1]):
        if key in OTHER:
            return OTHER[key]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return "another"


def with_value(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    nested: Any = value
    for key in reversed(path):
        nested = {key: nested}
    return merged(FULL, nested)


#: Of `modelDefaults.nodes` other values need models in folders.
LEAVES = [path for path in leaves(DEFAULTS) if path != ("modelDefaults", "nodes")]


@pytest.mark.parametrize("path", LEAVES, ids=".".join)
def test_every_value_changes_what_is_made(path: tuple[str, ...]) -> None:
    value: Any = merged(DEFAULTS, FULL)
    for key in path:
        value = value[key]
    base = FULL
    if path[-1] in ("minReplicas", "maxReplicas", "targetCPU"):
        base = merged(FULL, {"gateway": {"autoscaling": {"enabled": True}}})
    if path[-1] == "idleMinutes":
        base = merged(FULL, {"modelDefaults": {"autoscaling": {"minReplicas": 0}}})
    changed = merged(base, with_value(path, other(path, value)))
    assert rendered(changed) != rendered(base)


@pytest.mark.parametrize(
    "key", ["name", "source", *sorted({*DEFAULTS["modelDefaults"]} - {"nodes"})]
)
def test_every_key_of_a_model_changes_what_is_made(key: str) -> None:
    model = {"name": "qwen", "source": "Qwen/Qwen3-0.6B"}
    value: Any = {
        "cache": {"size": "7Gi"},
        "resources": {"limits": {"memory": "7Gi"}},
        "autoscaling": {"enabled": True},
    }.get(key) or other((key,), DEFAULTS["modelDefaults"].get(key, ""))
    assert rendered({"models": [{**model, key: value}]}) != rendered({"models": [model]})


def test_a_models_arguments_come_behind_those_of_all() -> None:
    preset = yaml.safe_load((CHART / "values-openvino.yaml").read_text())
    model = {"name": "qwen", "source": "x", "args": ["--max-num-seqs=4"]}
    spec = pods(merged(preset, {"models": [model]}))["quire-model-qwen"]
    assert spec["containers"][0]["args"][-2:] == ["--device=openvino", "--max-num-seqs=4"]


#: A model whose ranks cross machines.
ON_TWO_MACHINES: dict[str, Any] = {
    "name": "big",
    "source": "/models/big",
    "nodes": 2,
    "replicas": 3,
    "args": ["--pipeline-parallel-size=2"],
}


def test_a_model_on_two_machines_is_a_set_of_leaders_and_workers() -> None:
    created = objects(merged(FULL, {"models": [ON_TWO_MACHINES]}))
    (group,) = [one for one in created if one["kind"] == "LeaderWorkerSet"]
    assert "StatefulSet" not in {one["kind"] for one in created}
    template = group["spec"]["leaderWorkerTemplate"]
    assert (group["spec"]["replicas"], template["size"]) == (3, 2)
    leader, worker = (
        template[name]["spec"]["containers"][0]["args"]
        for name in ("leaderTemplate", "workerTemplate")
    )
    assert leader[2:4] == ["engine", "/models/big"]
    assert worker[2:5] == ["up", "--headless", "--node-rank=$(LWS_WORKER_INDEX)"]
    for shared in ("--nnodes=2", "--master-addr=$(LWS_LEADER_ADDRESS)", *ON_TWO_MACHINES["args"]):
        assert shared in leader
        assert shared in worker
    named = {one["kind"]: one for one in created if one["metadata"]["name"] == "quire-model-big"}
    # The first one's name is known before it's ready, and only it answers probes and requests.
    service = named["Service"]["spec"]
    assert service["publishNotReadyAddresses"] is True
    assert service["selector"]["leaderworkerset.sigs.k8s.io/worker-index"] == "0"
    policy = named["NetworkPolicy"]["spec"]
    assert policy["ingress"] == [{"from": [{"podSelector": policy["podSelector"]}]}]
    for pod in groups(created).values():
        for version in VERSIONS:
            kubernetes_validate.validate(
                {"apiVersion": "v1", "kind": "Pod", **pod}, version, strict=True
            )


@cache
def validate(text: str, version: str) -> None:
    """Raise if this version refuses the object. Sets of values have most objects in common."""
    kubernetes_validate.validate(yaml.safe_load(text), version, strict=True)


def sets_of_values() -> Iterator[dict[str, Any]]:
    """What operators choose from, in all combinations that touch each other, and the presets."""
    switches: list[list[dict[str, Any]]] = [
        [{}, {"ingress": {"enabled": True, "className": "nginx", "tlsSecret": "certificate"}}],
        [{}, {"serviceMonitor": {"enabled": True}, "networkPolicy": {"enabled": False}}],
        [
            {"gatewayAPI": {"enabled": True}},
            {"gateway": {"autoscaling": {"enabled": True}}, "service": {"type": "LoadBalancer"}},
        ],
        [{}, {"models": FULL["models"]}],
        [
            {"storage": {"size": ""}},
            {"storage": {"existingClaim": "files"}, "modelFiles": {"existingClaim": "weights"}},
        ],
    ]
    for chosen in itertools.product(*switches):
        yield merged(*chosen)
    for preset in sorted(CHART.glob("values-*.yaml")):
        for models in ([], FULL["models"]):
            yield merged(yaml.safe_load(preset.read_text()), {"models": models})
    for path in LEAVES[::8]:
        value: Any = merged(DEFAULTS, FULL)
        for key in path:
            value = value[key]
        yield with_value(path, other(path, value))

    for more in ({}, {"autoscaling": {"enabled": True}, "cache": {"size": "7Gi"}}):
        yield merged(FULL, {"models": [{**ON_TWO_MACHINES, **more}]})


SETS = list(sets_of_values())


def test_forty_sets_of_values_and_more_are_tried() -> None:
    assert len(SETS) >= 40


@pytest.mark.parametrize("number", range(0, len(SETS), 4))  # a slow test has all of them
def test_kubernetes_takes_what_is_made(number: int) -> None:
    rendered = objects(SETS[number])
    names = [(one["kind"], one["metadata"]["name"]) for one in rendered]
    assert len(set(names)) == len(names)
    assert all(len(name) <= 63 for _, name in names)
    # Every version for some of them; the schemas of neighbours hardly differ.
    versions = VERSIONS if number % 16 == 0 else (VERSIONS[0], VERSIONS[-1])
    for one, version in itertools.product(rendered, versions):
        if one["kind"] not in FOREIGN:
            validate(yaml.safe_dump(one), version)


def test_kubectls_dry_run_takes_what_is_made() -> None:
    with api_server() as server:
        done = dry_run(server, "---\n".join(rendered(values) for values in SETS))
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == sum(len(objects(values)) for values in SETS)
        # What no server knows is refused, so that the run above says something.
        unknown = dry_run(server, yaml.safe_dump({"apiVersion": "apps/v1", "kind": "Pool"}))
        assert 'no matches for kind "Pool"' in unknown.stderr


@pytest.mark.parametrize("preset", ["", *sorted(path.name for path in CHART.glob("values-*.yaml"))])
def test_helm_finds_nothing_wrong(preset: str) -> None:
    files = ["--values", str(CHART / preset)] if preset else []
    done = helm("lint", "--strict", str(CHART), *files, values=yaml.safe_dump(FULL))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"gatway": {}}, "gatway"),
        ({"gateway": {"replica": 3}}, "replica"),
        ({"gateway": {"workers": 0}}, "workers"),
        ({"hosts": []}, "hosts"),
        ({"models": [{"name": "a"}]}, "source"),
        ({"models": [{"name": "a/b", "source": "x"}, {"name": "A-b", "source": "x"}]}, "rename"),
        (
            {"models": [{"name": "qwen", "source": "x", "nodes": 2}]},
            'qwen: source must be a folder of modelFiles where nodes is above 1, got "x"',
        ),
        ({"modelDefaults": {"nodes": 0}}, "nodes"),
        ({"settings": {"REDIS_URL": "redis://:password@redis"}}, "REDIS_URL"),
        ({"settings": {"QUIRE_DRAIN_SECONDS": "soon"}}, "QUIRE_DRAIN_SECONDS"),
        ({"storage": {"size": "a lot"}}, "size"),
        ({"existingSecret": ""}, "existingSecret"),
    ],
)
def test_wrong_values_are_refused_by_name(values: dict[str, Any], words: str) -> None:
    done = helm("template", "quire", str(CHART), values=yaml.safe_dump(values))
    assert done.returncode != 0
    assert words in done.stderr


def test_every_pod_keeps_to_the_restricted_profile() -> None:
    for values in (FULL, *SETS[:32:8], *SETS[32:]):
        for name, template in templates(values).items():
            assert violations(template) == [], name
            spec = template["spec"]
            assert spec["automountServiceAccountToken"] is False, name
            claims = {"cache"} if "model" in name else set()
            mountable = {volume["name"] for volume in spec["volumes"]} | claims
            for container in spec["containers"]:
                assert container["securityContext"]["readOnlyRootFilesystem"] is True, name
                assert {mount["name"] for mount in container["volumeMounts"]} <= mountable, name


@pytest.mark.parametrize(
    ("path", "value", "rule"),
    [
        (["hostNetwork"], True, "hostNetwork"),
        (["securityContext", "runAsUser"], 0, "pod.runAsUser"),
        (["securityContext", "seccompProfile"], {"type": "Unconfined"}, "pod.seccompProfile"),
        (["volumes"], [{"name": "a", "hostPath": {"path": "/"}}], "volumes.hostPath"),
        (["containers", 0, "securityContext", "privileged"], True, "quire.privileged"),
        (["containers", 0, "securityContext", "capabilities"], {}, "quire.capabilities.drop"),
        (["containers", 0, "ports"], [{"containerPort": 1, "hostPort": 1}], "quire.hostPort"),
    ],
)
def test_a_pod_that_leaves_the_restricted_profile_is_noticed(
    path: list[Any], value: Any, rule: str
) -> None:
    template = copy.deepcopy(templates(FULL)["quire-gateway"])
    parent: Any = template["spec"]
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    assert violations(template) == [rule]


def test_no_secret_is_written_into_an_object() -> None:
    """Secrets are referred to: the chart makes none, and no setting may carry one."""
    for one in objects(FULL):
        assert one["kind"] != "Secret"
    for name, spec in pods(FULL).items():
        for container in spec["containers"]:
            assert container["envFrom"] == [{"secretRef": {"name": "quire"}}], name
            assert not {"QUIRE_SECRET_KEY", "DATABASE_URL", "REDIS_URL"} & {
                entry["name"] for entry in container["env"]
            }


def test_the_commands_and_the_variables_are_quires_own() -> None:
    containers = [
        (name, container) for name, spec in pods(FULL).items() for container in spec["containers"]
    ]
    assert len(containers) == 9
    for name, container in containers:
        python, manage, *words = container["args"]
        assert (python, manage) == ("python", "manage.py")
        assert problems_with(shlex.join(words)) == [], name
        variables = {entry["name"] for entry in container["env"]}
        ours = {variable for variable in variables if variable.startswith("QUIRE_")}
        assert ours <= DECLARED_VARIABLES, name
        assert ours >= {"QUIRE_DATA_DIR", "QUIRE_STORAGE_DIR", "QUIRE_CACHE_DIR"}, name


def test_the_commands_that_are_shown_after_an_installation_are_taken() -> None:
    notes = (CHART / "templates" / "NOTES.txt").read_text()
    commands = [line.split() for line in re.findall(r"manage\.py (.+)", notes)]
    assert len(commands) == 2
    for name, *words in commands:
        command: Any = load_command_class(get_commands()[name], name)
        command.create_parser("manage.py", name).parse_args(words)


def test_a_pool_has_the_pods_of_gateways_and_models_at_their_gateways_port() -> None:
    by_name = {(one["kind"], one["metadata"]["name"]): one for one in objects(FULL)}
    pool = by_name["InferencePool", "quire"]["spec"]
    expected = pool["selector"]["matchLabels"].items()
    members = {
        name
        for name, template in templates(FULL).items()
        if expected <= template["metadata"]["labels"].items()
    }
    assert members == {"quire-gateway", "quire-model-qwen", "quire-model-org-other-model"}
    (port,) = pool["targetPorts"]
    for name in members:
        ports = {
            port["name"]: port["containerPort"]
            for container in pods(FULL)[name]["containers"]
            for port in container["ports"]
        }
        assert ports["http"] == port["number"], name
    picker = by_name["Service", pool["endpointPickerRef"]["name"]]["spec"]
    assert picker["ports"][0]["port"] == pool["endpointPickerRef"]["port"]["number"]
    route = by_name["HTTPRoute", "quire"]["spec"]
    assert route["hostnames"] == DEFAULTS["hosts"]
    to_pool, to_gateway = (rule["backendRefs"][0] for rule in route["rules"])
    assert (to_pool["kind"], to_pool["name"]) == ("InferencePool", "quire")
    service = by_name["Service", to_gateway["name"]]["spec"]
    assert service["ports"][0]["port"] == to_gateway["port"]
    (container,) = pods(FULL)["quire-endpoint-picker"]["containers"]
    fallback = container["args"][container["args"].index("--gateways") + 1]
    host, _, number = fallback.partition(":")
    headless = by_name["Service", host]["spec"]
    assert headless["clusterIP"] == "None"
    assert headless["ports"][0]["port"] == int(number)
    labels = templates(FULL)["quire-gateway"]["metadata"]["labels"].items()
    assert headless["selector"].items() <= labels


def test_a_models_pod_has_a_gateway_that_prefers_its_replica() -> None:
    template = templates(FULL)["quire-model-qwen"]
    replica, gateway = (container["args"] for container in template["spec"]["containers"])
    assert replica[replica.index("--replica-id") + 1] == "$(POD_NAME)"
    assert gateway[gateway.index("--replica-id") + 1] == "$(POD_NAME)"
    assert f"--endpoint=$(POD_IP):{gateway[gateway.index('--port') + 1]}" in replica
    llmd = {
        key: value
        for key, value in template["metadata"]["labels"].items()
        if key.startswith("llm-d.ai/")
    }
    assert llmd == {
        "llm-d.ai/engine-type": "vllm",
        "llm-d.ai/inferenceServing": "true",
        "llm-d.ai/model": "qwen",
        "llm-d.ai/role": "prefill-decode",
    }
    without = templates(merged(FULL, {"gatewayAPI": {"enabled": False}}))["quire-model-qwen"]
    assert len(without["spec"]["containers"]) == 1
    assert not {key for key in without["metadata"]["labels"] if "llm-d" in key}


def test_writable_folders_are_those_of_the_image() -> None:
    """What the Dockerfile says is written, the read-only pods mount."""
    image = (CHART.parents[1] / "Dockerfile").read_text()
    written = {"/tmp", *re.findall(r"QUIRE_(?:DATA|CACHE)_DIR=(\S+)", image)}
    for name, spec in pods(FULL).items():
        paths = {mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
        assert written <= paths, name


def test_with_object_storage_no_pod_needs_a_claim() -> None:
    rendered = objects({"models": FULL["models"], "storage": {"size": ""}})
    assert not [one for one in rendered if one["kind"] == "PersistentVolumeClaim"]
    for name, spec in pods({"models": FULL["models"], "storage": {"size": ""}}).items():
        assert {key for volume in spec["volumes"] for key in volume} == {"name", "emptyDir"}, name
        for container in spec["containers"]:
            paths = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            assert paths["/var/lib/quire-storage"] == "scratch", name


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SETS)))
def test_helm_and_every_version_of_kubernetes_take_every_set_of_values(number: int) -> None:
    done = helm("lint", "--strict", str(CHART), values=yaml.safe_dump(SETS[number]))
    assert done.returncode == 0, done.stdout + done.stderr
    for one, version in itertools.product(objects(SETS[number]), VERSIONS):
        if one["kind"] not in FOREIGN:
            validate(yaml.safe_dump(one), version)


def test_a_pod_gets_longer_than_its_requests() -> None:
    for seconds in (0, 120):
        specs = pods(merged(FULL, {"settings": {"QUIRE_DRAIN_SECONDS": seconds}}))
        graces = {spec.get("terminationGracePeriodSeconds") for spec in specs.values()}
        assert graces - {None} == {(seconds or 30) + 30}


@pytest.mark.parametrize("name", golden.RELEASES)
def test_objects_are_those_that_were_reviewed(name: str) -> None:
    """`python -m tests.deploy.golden` writes them anew: look at the difference."""
    assert golden.render(name) == (golden.FOLDER / name).read_text()


def test_helm_is_the_release_that_was_pinned() -> None:
    done = subprocess.run([HELM, "version", "--short"], capture_output=True, text=True)
    assert done.stdout.startswith("v4.1.")
