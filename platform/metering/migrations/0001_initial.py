import django.db.models.deletion
import django.db.models.functions.comparison
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies = [
        ("tenants", "0001_initial"),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.CreateModel(
            name="Price",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("model", models.CharField(max_length=200)),
                ("valid_from", models.DateTimeField()),
                ("input_per_million", models.DecimalField(decimal_places=6, max_digits=14)),
                ("cached_per_million", models.DecimalField(decimal_places=6, max_digits=14)),
                ("output_per_million", models.DecimalField(decimal_places=6, max_digits=14)),
                ("per_image", models.DecimalField(decimal_places=6, default=0, max_digits=14)),
                (
                    "per_audio_minute",
                    models.DecimalField(decimal_places=6, default=0, max_digits=14),
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
            name="RequestContent",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("request_id", models.CharField(max_length=200, unique=True)),
                ("prompt", models.TextField()),
                ("answer", models.TextField()),
                ("at", models.DateTimeField()),
                (
                    "tenant",
                    models.ForeignKey(
                        db_constraint=False,
                        on_delete=django.db.models.deletion.DO_NOTHING,
                        related_name="+",
                        to="tenants.tenant",
                    ),
                ),
            ],
            options={
                "verbose_name": "request's content",
                "ordering": ["-pk"],
            },
        ),
        migrations.CreateModel(
            name="Webhook",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("url", models.CharField(max_length=2000)),
                ("secret", models.CharField(editable=False, max_length=64)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                (
                    "tenant",
                    models.OneToOneField(
                        null=True,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="webhook",
                        to="tenants.tenant",
                    ),
                ),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(
                        django.db.models.functions.comparison.Coalesce("tenant", 0),
                        name="one_webhook_of_operators",
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="WebhookDelivery",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("event_id", models.CharField(max_length=36, unique=True)),
                ("kind", models.CharField(max_length=60)),
                ("url", models.CharField(max_length=2000)),
                ("body", models.TextField()),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("attempts", models.PositiveSmallIntegerField(default=0)),
                ("next_try_at", models.DateTimeField(blank=True, db_index=True, null=True)),
                ("status", models.PositiveSmallIntegerField(blank=True, null=True)),
                ("error", models.CharField(blank=True, max_length=300)),
                ("delivered_at", models.DateTimeField(blank=True, null=True)),
                (
                    "tenant",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="tenants.tenant",
                    ),
                ),
            ],
            options={
                "verbose_name_plural": "webhook deliveries",
                "ordering": ["-pk"],
            },
        ),
        migrations.CreateModel(
            name="Budget",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("model", models.CharField(blank=True, max_length=200)),
                ("period", models.CharField(max_length=5)),
                ("tokens", models.PositiveBigIntegerField(blank=True, null=True)),
                (
                    "amount",
                    models.DecimalField(blank=True, decimal_places=9, max_digits=16, null=True),
                ),
                ("alert_percent", models.PositiveSmallIntegerField(default=80)),
                ("alerted_for", models.DateTimeField(blank=True, editable=False, null=True)),
                ("webhook_for", models.DateTimeField(blank=True, editable=False, null=True)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                (
                    "api_key",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="budgets",
                        to="tenants.apikey",
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
            name="RequestEntry",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("request_id", models.CharField(max_length=200, unique=True)),
                ("header_id", models.CharField(blank=True, default="", max_length=200)),
                ("answer_id", models.CharField(blank=True, default="", max_length=200)),
                ("endpoint", models.CharField(max_length=100)),
                ("model", models.CharField(blank=True, default="", max_length=200)),
                ("adapter", models.CharField(blank=True, default="", max_length=100)),
                ("adapter_digest", models.CharField(blank=True, default="", max_length=64)),
                ("status", models.PositiveSmallIntegerField()),
                ("code", models.CharField(blank=True, default="", max_length=60)),
                ("times", models.PositiveIntegerField(default=1)),
                ("finish_reason", models.CharField(blank=True, default="", max_length=40)),
                ("stream", models.BooleanField(default=False)),
                ("started_at", models.DateTimeField()),
                ("duration_ms", models.FloatField()),
                ("ttft_ms", models.FloatField(blank=True, null=True)),
                ("queue_ms", models.FloatField(default=0.0)),
                ("prompt_tokens", models.PositiveBigIntegerField(default=0)),
                ("cached_tokens", models.PositiveBigIntegerField(default=0)),
                ("completion_tokens", models.PositiveBigIntegerField(default=0)),
                ("cost_nanos", models.PositiveBigIntegerField(default=0)),
                ("replica", models.CharField(blank=True, default="", max_length=200)),
                ("detail", models.TextField(blank=True, default="")),
                (
                    "api_key",
                    models.ForeignKey(
                        blank=True,
                        db_constraint=False,
                        db_index=False,
                        null=True,
                        on_delete=django.db.models.deletion.DO_NOTHING,
                        related_name="+",
                        to="tenants.apikey",
                    ),
                ),
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
                (
                    "user",
                    models.ForeignKey(
                        blank=True,
                        db_constraint=False,
                        db_index=False,
                        null=True,
                        on_delete=django.db.models.deletion.DO_NOTHING,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
            ],
            options={
                "verbose_name": "request",
                "ordering": ["-started_at", "-pk"],
                "indexes": [
                    models.Index(
                        fields=["tenant", "started_at"], name="metering_re_tenant__f45ba8_idx"
                    ),
                    models.Index(fields=["started_at"], name="metering_re_started_8b24ab_idx"),
                    models.Index(
                        condition=models.Q(("header_id", ""), _negated=True),
                        fields=["header_id"],
                        name="requests_by_header",
                    ),
                    models.Index(
                        condition=models.Q(("answer_id", ""), _negated=True),
                        fields=["answer_id"],
                        name="requests_by_answer",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="UsageDay",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("key_id", models.BigIntegerField(default=0)),
                ("user_id", models.BigIntegerField(default=0)),
                ("model", models.CharField(max_length=200)),
                ("adapter", models.CharField(default="", max_length=100)),
                ("endpoint", models.CharField(max_length=100)),
                ("requests", models.PositiveBigIntegerField()),
                ("prompt_tokens", models.PositiveBigIntegerField()),
                ("cached_tokens", models.PositiveBigIntegerField()),
                ("completion_tokens", models.PositiveBigIntegerField()),
                ("images", models.PositiveBigIntegerField(default=0)),
                ("audio_ms", models.PositiveBigIntegerField(default=0)),
                ("cost_nanos", models.PositiveBigIntegerField()),
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
                        fields=(
                            "tenant",
                            "start",
                            "model",
                            "adapter",
                            "key_id",
                            "user_id",
                            "endpoint",
                        ),
                        name="one_sum_a_day",
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="UsageEntry",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("request_id", models.CharField(max_length=200, unique=True)),
                ("endpoint", models.CharField(max_length=100)),
                ("model", models.CharField(max_length=200)),
                ("adapter", models.CharField(blank=True, default="", max_length=100)),
                ("adapter_digest", models.CharField(blank=True, default="", max_length=64)),
                ("in_place_of", models.CharField(blank=True, default="", max_length=200)),
                ("prompt_tokens", models.PositiveBigIntegerField()),
                ("cached_tokens", models.PositiveBigIntegerField()),
                ("image_tokens", models.PositiveBigIntegerField(default=0)),
                ("completion_tokens", models.PositiveBigIntegerField()),
                ("images", models.PositiveBigIntegerField(default=0)),
                ("audio_ms", models.PositiveBigIntegerField(default=0)),
                ("cost_nanos", models.PositiveBigIntegerField(default=0)),
                ("finish_reason", models.CharField(blank=True, max_length=40)),
                ("status", models.PositiveSmallIntegerField()),
                ("started_at", models.DateTimeField()),
                ("ttft_ms", models.FloatField(blank=True, null=True)),
                ("duration_ms", models.FloatField()),
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
                    models.Index(
                        condition=models.Q(("adapter", ""), _negated=True),
                        fields=["tenant", "model", "adapter", "started_at"],
                        name="usage_of_adapters",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="UsageHour",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("key_id", models.BigIntegerField(default=0)),
                ("user_id", models.BigIntegerField(default=0)),
                ("model", models.CharField(max_length=200)),
                ("adapter", models.CharField(default="", max_length=100)),
                ("endpoint", models.CharField(max_length=100)),
                ("requests", models.PositiveBigIntegerField()),
                ("prompt_tokens", models.PositiveBigIntegerField()),
                ("cached_tokens", models.PositiveBigIntegerField()),
                ("completion_tokens", models.PositiveBigIntegerField()),
                ("images", models.PositiveBigIntegerField(default=0)),
                ("audio_ms", models.PositiveBigIntegerField(default=0)),
                ("cost_nanos", models.PositiveBigIntegerField()),
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
                        fields=(
                            "tenant",
                            "start",
                            "model",
                            "adapter",
                            "key_id",
                            "user_id",
                            "endpoint",
                        ),
                        name="one_sum_an_hour",
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="SavedSearch",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("name", models.CharField(max_length=80)),
                ("query", models.CharField(max_length=2000)),
                (
                    "user",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
            ],
            options={
                "ordering": ["name"],
                "constraints": [
                    models.UniqueConstraint(fields=("user", "name"), name="one_saved_search_a_name")
                ],
            },
        ),
        migrations.CreateModel(
            name="RequestFeedback",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("request_id", models.CharField(max_length=200)),
                ("is_good", models.BooleanField()),
                ("comment", models.CharField(blank=True, max_length=2000)),
                ("changed_at", models.DateTimeField(auto_now=True)),
                (
                    "tenant",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="tenants.tenant",
                    ),
                ),
                (
                    "user",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
            ],
            options={
                "ordering": ["-changed_at", "-pk"],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("tenant", "request_id", "user"), name="one_feedback_a_reader"
                    )
                ],
            },
        ),
    ]
