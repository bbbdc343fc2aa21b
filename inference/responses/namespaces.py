"""Tools in namespaces: the model knows each by one name, clients by two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.contract.errors import InvalidRequest
from inference.errors import UnsupportedField

if TYPE_CHECKING:
    from inference.responses.schemas import NamespacedTool, ResponsesTool

_SEPARATOR = "__"
KINDS = ("function", "custom")


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that the model is offered.

    Attributes:
        name: for the model; `own`, its client's name for it, behind its namespace's.
        namespace: "" for a tool that stands for itself. about: the namespace's description.
        place: of the tool among the request's fields.
    """

    tool: NamespacedTool
    name: str
    own: str
    place: str
    namespace: str = ""
    about: str = ""


def name_for_model(namespace: str | None, name: str) -> str:
    """The one name of a tool."""
    return f"{namespace}{_SEPARATOR}{name}" if namespace else name


def offered(tools: list[ResponsesTool] | None) -> list[OfferedTool]:
    """All tools, one after the other, those in namespaces too."""
    found = []
    for place, tool in enumerate(tools or ()):
        field, name = f"tools[{place}]", tool.name or ""
        if tool.type != "namespace":
            found.append(OfferedTool(tool, name, name, field))
            continue
        for inner, each in enumerate(tool.tools or ()):
            own = each.name or ""
            flat, within = name_for_model(name, own), f"{field}.tools[{inner}]"
            found.append(OfferedTool(each, flat, own, within, name, tool.description or ""))
    return found


def split_names(tools: list[ResponsesTool] | None) -> dict[str, tuple[str, str]]:
    """Namespace and own name of each tool in one, by its name for the model."""
    return {each.name: (each.namespace, each.own) for each in offered(tools) if each.namespace}


def check_tools(tools: list[ResponsesTool] | None) -> None:
    """Raise `InvalidRequest` for a tool that can't be offered."""
    for place, tool in enumerate(tools or ()):
        field = f"tools[{place}]"
        if tool.type != "namespace":
            _check(tool, field)
            continue
        if not tool.name:
            raise InvalidRequest("A namespace needs a name.", param=f"{field}.name")
        if not tool.tools:
            raise InvalidRequest("A namespace needs tools.", param=f"{field}.tools")
        for inner, each in enumerate(tool.tools):
            _check(each, f"{field}.tools[{inner}]")


def _check(tool: NamespacedTool, field: str) -> None:
    if tool.type not in KINDS:
        raise UnsupportedField(
            f"Tools of the type {tool.type[:50]!r} are not supported.", param=f"{field}.type"
        )
    if tool.name is None:
        raise InvalidRequest("A tool needs a name.", param=f"{field}.name")


def chosen(choice: Mapping[str, Any], tools: list[OfferedTool]) -> OfferedTool:
    """The tool that `{"type": ..., "name": ...}` means, perhaps with a `namespace`.

    Raises `InvalidRequest` when there is none, or one in several namespaces.
    """
    kind, name, namespace = choice.get("type"), choice.get("name"), choice.get("namespace")
    what = "function" if kind == "function" else "custom tool"
    ours = [each for each in tools if each.tool.type == kind]
    if namespace is not None:
        ours = [each for each in ours if each.namespace == namespace]
    found = [each for each in ours if each.name == name] or [
        each for each in ours if each.own == name
    ]
    if not found:
        raise InvalidRequest(
            f"{what.capitalize()} {str(name)[:100]!r} not found in tools.", param="tool_choice"
        )
    if len(found) > 1:
        names = " or ".join(each.name for each in found[:5])
        raise InvalidRequest(
            f"Several namespaces have a {what} {str(name)[:100]!r}: name it as {names}.",
            param="tool_choice",
        )
    return found[0]


def allowed(entry: Any, tools: list[OfferedTool]) -> list[dict[str, Any]]:
    """The tools that an entry of `allowed_tools` means, as chats name them: one, or a namespace's.

    What means none stays as it is, to be refused as a chat's.
    """
    if not isinstance(entry, dict):
        return [{}]
    if entry.get("type") == "namespace":
        inside = [each for each in tools if each.namespace and each.namespace == entry.get("name")]
        return [as_chat_names(each.tool.type, each.name) for each in inside] or [{}]
    kind = str(entry.get("type"))
    try:
        return [as_chat_names(kind, chosen(entry, tools).name)]
    except InvalidRequest:
        return [as_chat_names(kind, entry.get("name"))]


def as_chat_names(kind: str, name: Any) -> dict[str, Any]:
    """How a chat names a tool."""
    return {"type": kind, kind: {"name": name}}
