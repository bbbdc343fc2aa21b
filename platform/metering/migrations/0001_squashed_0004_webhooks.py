"""The schema as it was built up to November 2026.

A database that went through the steps it replaces has it already.
"""

from decimal import Decimal

import django.core.validators
import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):
    replaces = [
        ("metering", "0001_initial"),
        ("metering", "0002_roll_ups"),
        ("metering", "0003_money"),
        ("metering", "0004_webhooks"),
    ]

    initial = True

    dependencies = [
        ("tenants", "0001_squashed_0006_sign_on"),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.CreateModel(
            name="Price",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "model",
                    models.CharField(
                        help_text="As clients name it; an adapter has a name of its own.",
                        max_length=200,
                    ),
                ),
                ("valid_from", models.DateTimeField()),
                (
                    "input_per_million",
                    models.DecimalField(
                        decimal_places=6,
                        help_text="A million prompt tokens that were computed.",
                        max_digits=14,
                        validators=[
                            django.core.validators.MinValueValidator(Decimal("0")),
                            django.core.validators.MaxValueValidator(Decimal("1000000")),
                        ],
                    ),
                ),
                (
                    "cached_per_million",
                    models.DecimalField(
                        decimal_places=6,
                        help_text="A million prompt tokens from the prefix cache.",
                        max_digits=14,
                        validators=[
                            django.core.validators.MinValueValidator(Decimal("0")),
                            django.core.validators.MaxValueValidator(Decimal("1000000")),
                        ],
                    ),
                ),
                (
                    "output_per_million",
                    models.DecimalField(
                        decimal_places=6,
                        help_text="A million output tokens.",
                        max_digits=14,
                        validators=[
                            django.core.validators.MinValueValidator(Decimal("0")),
                            django.core.validators.MaxValueValidator(Decimal("1000000")),
                        ],
                    ),
                ),
                ("created_at", models.DateTimeField(auto_now_add=True)),
            ],
            options={
                "ordering": ["model", "-valid_from"],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("model", "valid_from"), name="one_price_a_moment"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="Webhook",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("url", models.CharField(max_length=2000)),
                ("secret", models.CharField(editable=False, max_length=64)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                (
                    "tenant",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="webhook",
                        to="tenants.tenant",
                    ),
                ),
            ],
        ),
        migrations.CreateModel(
            name="Budget",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "model",
                    models.CharField(
                        blank=True, help_text="Empty: all models together.", max_length=200
                    ),
                ),
                (
                    "period",
                    models.CharField(
                        choices=[("day", "Day"), ("week", "Week"), ("month", "Month")], max_length=5
                    ),
                ),
                (
                    "tokens",
                    models.PositiveBigIntegerField(
                        blank=True,
                        help_text="Prompt and output together. Empty: no limit.",
                        null=True,
                        validators=[django.core.validators.MaxValueValidator(9007199254740992)],
                    ),
                ),
                (
                    "amount",
                    models.DecimalField(
                        blank=True,
                        decimal_places=9,
                        help_text="Money, at the models' prices. Empty: no limit.",
                        max_digits=16,
                        null=True,
                        validators=[
                            django.core.validators.MinValueValidator(Decimal("0")),
                            django.core.validators.MaxValueValidator(Decimal("9000000")),
                        ],
                    ),
                ),
                (
                    "alert_percent",
                    models.PositiveSmallIntegerField(
                        default=80,
                        help_text="The tenant is told once a period when so much is spent. 0: never.",
                        validators=[django.core.validators.MaxValueValidator(100)],
                    ),
                ),
                (
                    "alerted_for",
                    models.DateTimeField(
                        blank=True,
                        editable=False,
                        help_text="The period that was told of last.",
                        null=True,
                    ),
                ),
                (
                    "webhook_for",
                    models.DateTimeField(
                        blank=True, editable=False, help_text="The same, by webhook.", null=True
                    ),
                ),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                (
                    "api_key",
                    models.ForeignKey(
                        blank=True,
                        help_text="Empty: all keys and people of the tenant together.",
                        null=True,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="budgets",
                        to="tenants.apikey",
                        verbose_name="API key",
                    ),
                ),
                (
                    "tenant",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="budgets",
                        to="tenants.tenant",
                    ),
                ),
            ],
            options={
                "ordering": ["tenant", "pk"],
                "constraints": [
                    models.UniqueConstraint(
                        condition=models.Q(("api_key__isnull", False)),
                        fields=("tenant", "api_key", "model", "period"),
                        name="one_budget_of_a_key",
                    ),
                    models.UniqueConstraint(
                        condition=models.Q(("api_key__isnull", True)),
                        fields=("tenant", "model", "period"),
                        name="one_budget_of_a_tenant",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="UsageDay",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("key_id", models.BigIntegerField(default=0)),
                ("user_id", models.BigIntegerField(default=0)),
                ("model", models.CharField(max_length=200)),
                ("endpoint", models.CharField(max_length=100)),
                ("requests", models.PositiveBigIntegerField()),
                ("prompt_tokens", models.PositiveBigIntegerField()),
                ("cached_tokens", models.PositiveBigIntegerField()),
                ("completion_tokens", models.PositiveBigIntegerField()),
                (
                    "cost_nanos",
                    models.PositiveBigIntegerField(help_text="In 1e-9 of the currency."),
                ),
                ("start", models.DateTimeField()),
                (
                    "tenant",
                    models.ForeignKey(
                        db_constraint=False,
                        db_index=False,
                        on_delete=django.db.models.deletion.DO_NOTHING,
                        related_name="+",
                        to="tenants.tenant",
                    ),
                ),
            ],
            options={
                "indexes": [models.Index(fields=["start"], name="metering_us_start_93a1da_idx")],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("tenant", "start", "model", "key_id", "user_id", "endpoint"),
                        name="one_sum_a_day",
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="UsageEntry",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("request_id", models.CharField(max_length=200, unique=True)),
                ("endpoint", models.CharField(max_length=100)),
                ("model", models.CharField(max_length=200)),
                ("prompt_tokens", models.PositiveBigIntegerField()),
                (
                    "cached_tokens",
                    models.PositiveBigIntegerField(
                        help_text="Prompt tokens that came from the prefix cache; part of the prompt tokens."
                    ),
                ),
                ("completion_tokens", models.PositiveBigIntegerField()),
                (
                    "cost_nanos",
                    models.PositiveBigIntegerField(
                        default=0,
                        help_text="In 1e-9 of the currency, at the prices of its start.",
                        verbose_name="cost (1e-9)",
                    ),
                ),
                ("finish_reason", models.CharField(blank=True, max_length=40)),
                (
                    "status",
                    models.PositiveSmallIntegerField(
                        help_text="HTTP status, 499 when the client left."
                    ),
                ),
                ("started_at", models.DateTimeField()),
                ("ttft_ms", models.FloatField(blank=True, null=True, verbose_name="TTFT (ms)")),
                ("duration_ms", models.FloatField(verbose_name="duration (ms)")),
                ("stream", models.BooleanField()),
                ("recorded_at", models.DateTimeField(auto_now_add=True)),
                (
                    "api_key",
                    models.ForeignKey(
                        blank=True,
                        db_constraint=False,
                        null=True,
                        on_delete=django.db.models.deletion.DO_NOTHING,
                        related_name="usage",
                        to="tenants.apikey",
                        verbose_name="API key",
                    ),
                ),
                (
                    "tenant",
                    models.ForeignKey(
                        db_constraint=False,
                        db_index=False,
                        on_delete=django.db.models.deletion.DO_NOTHING,
                        related_name="usage",
                        to="tenants.tenant",
                    ),
                ),
                (
                    "user",
                    models.ForeignKey(
                        blank=True,
                        db_constraint=False,
                        null=True,
                        on_delete=django.db.models.deletion.DO_NOTHING,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
            ],
            options={
                "verbose_name_plural": "usage entries",
                "ordering": ["-started_at", "-pk"],
                "indexes": [
                    models.Index(
                        fields=["tenant", "started_at"], name="metering_us_tenant__efd0c9_idx"
                    ),
                    models.Index(fields=["started_at"], name="metering_us_started_db2228_idx"),
                    models.Index(
                        fields=["model", "started_at"], name="metering_us_model_0d29b2_idx"
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="UsageHour",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("key_id", models.BigIntegerField(default=0)),
                ("user_id", models.BigIntegerField(default=0)),
                ("model", models.CharField(max_length=200)),
                ("endpoint", models.CharField(max_length=100)),
                ("requests", models.PositiveBigIntegerField()),
                ("prompt_tokens", models.PositiveBigIntegerField()),
                ("cached_tokens", models.PositiveBigIntegerField()),
                ("completion_tokens", models.PositiveBigIntegerField()),
                (
                    "cost_nanos",
                    models.PositiveBigIntegerField(help_text="In 1e-9 of the currency."),
                ),
                ("start", models.DateTimeField()),
                (
                    "tenant",
                    models.ForeignKey(
                        db_constraint=False,
                        db_index=False,
                        on_delete=django.db.models.deletion.DO_NOTHING,
                        related_name="+",
                        to="tenants.tenant",
                    ),
                ),
            ],
            options={
                "indexes": [models.Index(fields=["start"], name="metering_us_start_610b7c_idx")],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("tenant", "start", "model", "key_id", "user_id", "endpoint"),
                        name="one_sum_an_hour",
                    )
                ],
            },
        ),
    ]
