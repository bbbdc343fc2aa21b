"""The form of a model: its own columns, and below them the engine's options."""

from __future__ import annotations

from typing import Any

from django.db import transaction
from django.http import QueryDict

from catalog import actions
from catalog.models import ServedModel
from console.models_page.options import SettingsForm
from engine.contract.errors import InvalidRequest, QuireError
from tenants.models import Tenant, User

#: (field, label, help, most). Whole numbers.
NUMBERS = (
    ("num_replicas", "Replicas", "On each node that runs it, 1 to 64.", 64),
    ("num_spares", "Spares", "Loaded and waiting, to take over when no other replica serves.", 64),
    (
        "idle_minutes",
        "Unload after minutes without requests",
        "The next request loads it again. 0: never.",
        43_200,
    ),
)
LISTS = ("aliases", "fallbacks")
MOST_NAMES = 50


class ModelForm:
    """What stands in the form. `errors`: by field; `values`: as text, or lists of it."""

    def __init__(self, values: dict[str, Any], settings: SettingsForm) -> None:
        self.values, self.settings = values, settings
        self.errors: dict[str, str] = {}
        self.engine_settings: dict[str, Any] = {}
        self.general = ""

    @classmethod
    def of(cls, model: ServedModel | None) -> ModelForm:
        """As the catalogue has it; for a new one the defaults."""
        row = model or ServedModel()
        values: dict[str, Any] = {
            "name": row.name,
            "source": row.source,
            "node": row.node,
            "public": row.public,
            "managed": row.managed,
            "tenants": [tenant.pk for tenant in row.tenants.all()] if model else [],
            **{name: str(getattr(row, name)) for name, *_ in NUMBERS},
            **{name: list(getattr(row, name)) for name in LISTS},
        }
        form = cls(values, SettingsForm(row.settings))
        form.engine_settings = dict(row.settings)
        return form

    @classmethod
    def sent(cls, data: QueryDict, model: ServedModel | None) -> ModelForm:
        """What came by POST, checked as far as a form can."""
        values: dict[str, Any] = {
            "name": model.name if model else data.get("name", "").strip(),
            "source": data.get("source", "").strip(),
            "node": data.get("node", "").strip(),
            "public": "public" in data,
            "managed": "managed" in data,
            "tenants": [int(pk) for pk in data.getlist("tenants") if pk.isdigit()][:MOST_NAMES],
            **{name: data.get(name, "").strip() for name, *_ in NUMBERS},
            "aliases": data.get("aliases", "").replace(",", " ").split(),
            "fallbacks": [name for name in data.getlist("fallbacks") if name],
        }
        form = cls(values, SettingsForm())
        form.engine_settings = form.settings.read(data)
        form._check()
        return form

    @property
    def wrong(self) -> bool:
        """Whether anything is."""
        return bool(self.errors or self.general) or self.settings.wrong

    @property
    def numbers(self) -> list[dict[str, str]]:
        """The fields of `NUMBERS`, for the template."""
        return [
            {
                "name": name,
                "label": label,
                "help": text,
                "value": self.values[name],
                "error": self.errors.get(name, ""),
                "most": str(most),
            }
            for name, label, text, most in NUMBERS
        ]

    @property
    def all_tenants(self) -> list[dict[str, Any]]:
        """To share a model with."""
        chosen = set(self.values["tenants"])
        found = Tenant.objects.filter(active=True).order_by("name")[:500]
        return [{"pk": each.pk, "name": each.name, "chosen": each.pk in chosen} for each in found]

    @property
    def other_models(self) -> list[dict[str, Any]]:
        """That may answer in its place: those that do, in their order, then the others."""
        chosen: list[str] = self.values["fallbacks"]
        names = ServedModel.objects.exclude(name=self.values["name"]).values_list("name", flat=True)
        others = [name for name in names[:500] if name not in chosen]
        return [{"name": name, "chosen": name in chosen} for name in [*chosen, *others]]

    def _check(self) -> None:
        for name, label, _, most in NUMBERS:
            text = self.values[name]
            if not (text.isascii() and text.isdigit() and int(text[:9]) <= most):
                self.errors[name] = f"{label} must be a whole number up to {most}."
        if not self.values["source"]:
            self.errors["source"] = "Enter a folder, a GGUF file or a model on the hub."
        if not self.values["name"]:
            self.errors["name"] = "Enter a name for clients."

    @transaction.atomic
    def save(self, user: User, model: ServedModel | None) -> ServedModel:
        """Load a new model, or change one. Raises what the actions raise."""
        columns: dict[str, Any] = {
            "source": self.values["source"],
            "settings": self.engine_settings,
            "node": self.values["node"],
            "managed": self.values["managed"],
            **{name: int(self.values[name]) for name, *_ in NUMBERS},
            **{name: self.values[name] for name in LISTS},
        }
        if model is None:
            if ServedModel.objects.filter(name=self.values["name"]).exists():
                raise InvalidRequest("A model with this name exists already.", param="name")
            saved = actions.load_model(actor=user, name=self.values["name"], **columns)
        else:
            saved = actions.update_model(actor=user, model=model, **columns)
        tenants = list(Tenant.objects.filter(pk__in=self.values["tenants"]))
        public = self.values["public"]
        before = {tenant.pk for tenant in saved.tenants.all()}
        if saved.public != public or before != {tenant.pk for tenant in tenants}:
            saved = actions.share_model(actor=user, model=saved, tenants=tenants, public=public)
        return saved

    def take_error(self, error: QuireError) -> None:
        """Put a refusal at the field that it names."""
        param = error.param or ""
        if param in self.values:
            self.errors[param] = error.message
        elif option := self.settings.options.get(param):
            option.error = error.message
        else:
            self.general = error.message
