"""Bodies of the management API from which commands take their options."""

from __future__ import annotations

from rest_framework import serializers

from metering.models import Period


class PriceCreateSerializer(serializers.Serializer):
    """Prices are decimals as text; `valid_from` defaults to now."""

    model = serializers.CharField(max_length=200, help_text="model or adapter name in the API")
    valid_from = serializers.DateTimeField(
        required=False, allow_null=True, help_text="start of validity (default: now)"
    )
    input_per_million = serializers.CharField(
        max_length=40, help_text="price of a million prompt tokens"
    )
    cached_per_million = serializers.CharField(
        max_length=40,
        required=False,
        allow_null=True,
        help_text="price of a million cached prompt tokens (default: as uncached)",
    )
    output_per_million = serializers.CharField(
        max_length=40, help_text="price of a million output tokens"
    )
    per_image = serializers.CharField(
        max_length=40,
        required=False,
        allow_null=True,
        help_text="price of an image, besides its tokens (default: as before, or 0)",
    )
    per_audio_minute = serializers.CharField(
        max_length=40,
        required=False,
        allow_null=True,
        help_text="price of a minute of audio in which somebody speaks (default: as before, or 0)",
    )


class BudgetCreateSerializer(serializers.Serializer):
    """Replaces a budget with the same key, model and period."""

    key = serializers.IntegerField(
        required=False, allow_null=True, default=None, help_text="id of the only key that it limits"
    )
    model = serializers.CharField(
        required=False,
        allow_blank=True,
        default="",
        max_length=200,
        help_text="limit this model only",
    )
    period = serializers.ChoiceField(
        choices=Period.choices, help_text="period after which spending starts at 0 again"
    )
    tokens = serializers.IntegerField(
        required=False, allow_null=True, help_text="maximum tokens, prompt plus output"
    )
    amount = serializers.CharField(
        required=False,
        allow_null=True,
        max_length=40,
        help_text="money, at the models' prices, such as 12.50",
    )
    alert_percent = serializers.IntegerField(
        required=False,
        allow_null=True,
        help_text="percentage at which the tenant's admins are alerted; 0: never (default: 80)",
    )
