"""The rules of the *restricted* Pod Security Standard, with those of *baseline* below it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim",
    "projected", "secret",
}  # fmt: skip
_SYSCTLS = {
    "kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range",
}  # fmt: skip
_PROFILES = ("RuntimeDefault", "Localhost")


def violations(template: dict[str, Any]) -> list[str]:
    """What a pod's template does that the profile forbids; fields as Kubernetes names them."""
    spec = template["spec"]
    names = ("initContainers", "containers", "ephemeralContainers")
    containers = [container for name in names for container in spec.get(name, [])]
    pod = spec.get("securityContext", {})
    result = [name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    annotations = template.get("metadata", {}).get("annotations", {})
    result += [key for key in annotations if key.startswith("container.apparmor.security")]
    for volume in spec.get("volumes", []):
        result += [f"volumes.{kind}" for kind in volume if kind not in {"name", *_VOLUMES}]
    result += [
        sysctl["name"] for sysctl in pod.get("sysctls", []) if sysctl["name"] not in _SYSCTLS
    ]
    result += [f"pod.{name}" for name in _of_any(pod)]
    for container in containers:
        result += [f"{container['name']}.{name}" for name in _of_container(container, pod)]
    return result


def _of_any(context: dict[str, Any]) -> Iterator[str]:
    """Rules of a pod's security context and a container's."""
    if context.get("runAsNonRoot") is False:
        yield "runAsNonRoot"
    if context.get("runAsUser") == 0:
        yield "runAsUser"
    if "seccompProfile" in context and context["seccompProfile"].get("type") not in _PROFILES:
        yield "seccompProfile"
    if "appArmorProfile" in context and context["appArmorProfile"].get("type") not in _PROFILES:
        yield "appArmorProfile"
    if {"user", "role"} & context.get("seLinuxOptions", {}).keys():
        yield "seLinuxOptions"
    if "hostProcess" in context.get("windowsOptions", {}):
        yield "windowsOptions"


def _of_container(container: dict[str, Any], pod: dict[str, Any]) -> Iterator[str]:
    context = container.get("securityContext", {})
    yield from _of_any(context)
    for name in ("runAsNonRoot", "seccompProfile"):
        if name not in context and name not in pod:
            yield name
    if context.get("privileged"):
        yield "privileged"
    if context.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation"
    capabilities = context.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", []):
        yield "capabilities.drop"
    if set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
        yield "capabilities.add"
    if context.get("procMount", "Default") != "Default":
        yield "procMount"
    if any(port.get("hostPort") for port in container.get("ports", [])):
        yield "hostPort"
    for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
        if container.get(probe, {}).get("httpGet", {}).get("host"):
            yield f"{probe}.host"
