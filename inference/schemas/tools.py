"""Tools of a chat request, and which of them may be called, independently of the model."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from engine.contract.errors import InvalidRequest
from inference.parsers.custom_tools import as_template_function, parameters
from inference.parsers.tool_grammar import ToolFunction, escape_lark_for_json, regex_to_lark
from inference.schemas.base import RejectedRequest, StrictModel

TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
MAX_TOOLS = 128
#: Maximum length of a custom tool's grammar in characters.
MAX_DEFINITION = 65_536


def _checked_name(name: str) -> str:
    if not TOOL_NAME.fullmatch(name):
        raise ValueError("must be 1 to 64 letters, digits, '_', '-' or '.'.")
    return name


class FunctionDefinition(BaseModel):
    """A function that the model may call. `parameters` is a JSON schema."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: str = Field(description="Name by which the model calls the function.")
    description: str | None = Field(
        default=None, description="What the function does, for the model."
    )
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    _name = field_validator("name")(_checked_name)

    @field_validator("parameters")
    @classmethod
    def _of_an_object(cls, parameters: dict[str, Any] | None) -> dict[str, Any] | None:
        if parameters is not None and parameters.get("type", "object") != "object":
            raise ValueError("must be the schema of an object.")
        return parameters


class Tool(BaseModel):
    """A function."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"] = Field(description="Always `function`.")
    function: FunctionDefinition

    @property
    def name(self) -> str:
        """Name by which the model calls the tool."""
        return self.function.name

    @property
    def template_function(self) -> dict[str, Any]:
        """The tool in the format for chat templates."""
        formatted = self.model_dump(exclude_unset=True)
        if not self.function.strict:  # the default, which some clients send explicitly
            formatted["function"].pop("strict", None)
        return formatted

    @property
    def as_tool_function(self) -> ToolFunction:
        """The tool in the format for parsers and grammars."""
        spec = self.function
        return ToolFunction(spec.name, spec.parameters or {}, bool(spec.strict))


class CustomGrammar(StrictModel):
    """Constraint on a custom tool's input. `syntax` of the definition: Lark, or Rust's regex."""

    definition: Annotated[str, Field(min_length=1, max_length=MAX_DEFINITION)]
    syntax: Literal["lark", "regex"]

    @property
    def to_lark(self) -> str:
        """The grammar in Lark."""
        return self.definition if self.syntax == "lark" else regex_to_lark(self.definition)

    @model_validator(mode="after")
    def _check_grammar(self) -> Self:
        try:
            escape_lark_for_json(self.to_lark)
        except InvalidRequest as error:
            raise RejectedRequest(error) from None
        return self


class CustomFormat(StrictModel):
    """The form of a custom tool's input: any text, or one of a grammar."""

    type: Literal["text", "grammar"] = Field(
        description="`text` for any text, `grammar` for that of a grammar."
    )
    grammar: CustomGrammar | None = None

    @model_validator(mode="after")
    def _check_format(self) -> Self:
        if (self.type == "grammar") != (self.grammar is not None):
            raise ValueError("grammar goes with the type 'grammar', which needs it.")
        return self


class CustomDefinition(BaseModel):
    """A tool whose input is one text."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: str = Field(description="Name by which the model calls the tool.")
    description: str | None = Field(default=None, description="What the tool does, for the model.")
    format: CustomFormat | None = Field(default=None, description="Form of the tool's input.")

    _name = field_validator("name")(_checked_name)


class CustomTool(BaseModel):
    """A custom tool."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["custom"] = Field(description="Always `custom`.")
    custom: CustomDefinition

    @property
    def name(self) -> str:
        """Name by which the model calls the tool."""
        return self.custom.name

    @property
    def template_function(self) -> dict[str, Any]:
        """The tool in the format for chat templates: a function, as models know no other tools."""
        return as_template_function(self.custom.name, self.custom.description)

    @property
    def as_tool_function(self) -> ToolFunction:
        """The tool in the format for parsers and grammars."""
        form = self.custom.format
        lark = form.grammar.to_lark if form is not None and form.grammar is not None else ""
        return ToolFunction(self.name, parameters(), strict=bool(lark), grammar=lark)


AnyTool = Annotated[Tool | CustomTool, Field(discriminator="type")]
Tools = Annotated[list[AnyTool], Field(max_length=MAX_TOOLS)]


def named_tool(choice: Any) -> tuple[str, str] | None:
    """Return type and name of the tool that a `tool_choice`, or an entry of one, names."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind not in ("function", "custom"):
        return None
    tool = choice.get(kind)
    name = tool.get("name") if isinstance(tool, dict) else None
    return (kind, name) if isinstance(name, str) else None


class AllowedTools(StrictModel):
    """Tools that may be called now. `mode`: whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_TOOLS)]

    @property
    def named(self) -> frozenset[tuple[str, str] | None]:
        """Types and names; None for an entry that names no tool."""
        return frozenset(map(named_tool, self.tools))
