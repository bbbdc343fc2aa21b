"""The part of the form of keys that narrows a key: models, places, rates, spending."""

from __future__ import annotations

from typing import Any

from django import forms

from metering.models import Period

#: Whole numbers, as the form and the model call them.
AMOUNTS = {
    "requests_per_minute": "Requests a minute",
    "tokens_per_minute": "Tokens a minute",
    "max_running_requests": "Requests at a time",
    "max_context_tokens": "Tokens in one request, prompt and answer",
}
#: Lists, by commas or lines.
LISTS = {
    "allowed_models": ("Models", "small, large"),
    "endpoints": ("Paths", "/v1/embeddings"),
    "addresses": ("Addresses and networks", "10.0.0.0/8"),
}


class WordsField(forms.CharField):
    """Words between commas or on lines of their own; nothing is an empty list."""

    def clean(self, value: Any) -> list[str]:
        """The words."""
        text = super().clean(value).replace("\n", ",")
        return [word.strip() for word in text.split(",") if word.strip()]


class LimitsForm(forms.Form):
    """All empty: no more limits than the tenant's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, (label, example) in LISTS.items():
            attrs = {"class": "input", "autocomplete": "off", "placeholder": f"all, or {example}"}
            self.fields[name] = WordsField(
                required=False, max_length=4000, label=label, widget=forms.TextInput(attrs=attrs)
            )
        attrs = {"class": "input", "inputmode": "numeric", "autocomplete": "off"}
        attrs["placeholder"] = "no limit"
        for name, label in AMOUNTS.items():
            self.fields[name] = forms.IntegerField(
                required=False,
                min_value=1,
                max_value=2**31 - 1,
                label=label,
                widget=forms.TextInput(attrs=attrs),
            )
        self.fields["spending"] = forms.DecimalField(
            required=False,
            min_value=0,
            max_digits=16,
            decimal_places=9,
            label="Spending",
            widget=forms.TextInput(attrs={**attrs, "inputmode": "decimal"}),
        )
        self.fields["spending_period"] = forms.ChoiceField(
            required=False,
            choices=[(value, label.lower()) for value, label in Period.choices],
            initial=Period.MONTH,
            label="Per",
            widget=forms.Select(attrs={"class": "input"}),
        )

    def limits(self) -> dict[str, Any]:
        """For `create_key`: what was filled in alone."""
        data = self.cleaned_data
        return {name: data[name] for name in (*AMOUNTS, *LISTS) if data[name]}

    def budget(self) -> dict[str, Any] | None:
        """For `set_budget`; None without a limit of spending."""
        data = self.cleaned_data
        if data["spending"] is None:
            return None
        return {
            "amount": data["spending"],
            "period": data["spending_period"] or Period.MONTH,
        }

    def narrowing(self) -> list[forms.BoundField]:
        """The fields of this part, for the template."""
        return [self[name] for name in (*LISTS, *AMOUNTS, "spending", "spending_period")]

    def narrows(self) -> bool:
        """Whether this part of a form that was sent says anything, so that it's shown open."""
        return self.is_bound and any(self.data.get(name) for name in (*LISTS, *AMOUNTS, "spending"))
