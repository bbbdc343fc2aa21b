import django.core.validators
import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies = [
        ("tenants", "0001_initial"),
    ]

    operations = [
        migrations.CreateModel(
            name="ServedModel",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "name",
                    models.CharField(
                        help_text="Name that clients send as `model`.",
                        max_length=200,
                        unique=True,
                        validators=[
                            django.core.validators.RegexValidator(
                                "\\A[A-Za-z0-9](?:[A-Za-z0-9._:@/-]*[A-Za-z0-9])?\\Z",
                                "Letters, digits and . _ : @ / - inside.",
                            )
                        ],
                    ),
                ),
                (
                    "aliases",
                    models.JSONField(
                        blank=True,
                        default=list,
                        help_text="Other names that clients may send, a JSON list.",
                    ),
                ),
                (
                    "fallbacks",
                    models.JSONField(
                        blank=True,
                        default=list,
                        help_text="Models to use while no replica of this one serves, in this order.",
                    ),
                ),
                (
                    "idle_minutes",
                    models.PositiveIntegerField(
                        default=0,
                        help_text="Unload after N minutes without requests; the next request loads it again. 0: never.",
                        validators=[django.core.validators.MaxValueValidator(43200)],
                    ),
                ),
                ("idle_since", models.DateTimeField(blank=True, editable=False, null=True)),
                (
                    "source",
                    models.CharField(help_text="A folder, or an id on the hub.", max_length=1000),
                ),
                (
                    "settings",
                    models.JSONField(
                        blank=True,
                        default=dict,
                        help_text='Engine settings, such as {"max_model_len": 4096}.',
                    ),
                ),
                (
                    "desired_state",
                    models.CharField(
                        choices=[("loaded", "Loaded"), ("unloaded", "Unloaded")],
                        default="unloaded",
                        max_length=10,
                    ),
                ),
                (
                    "num_replicas",
                    models.PositiveSmallIntegerField(
                        default=1,
                        help_text="Replicas on each node that runs it.",
                        validators=[
                            django.core.validators.MinValueValidator(1),
                            django.core.validators.MaxValueValidator(64),
                        ],
                    ),
                ),
                (
                    "num_spares",
                    models.PositiveSmallIntegerField(
                        default=0,
                        help_text="Hot-standby replicas per node.",
                        validators=[django.core.validators.MaxValueValidator(64)],
                    ),
                ),
                (
                    "num_prefill",
                    models.PositiveSmallIntegerField(
                        default=0,
                        help_text="Of the replicas, those that only compute prompts for the others.",
                        validators=[django.core.validators.MaxValueValidator(63)],
                    ),
                ),
                (
                    "num_encode",
                    models.PositiveSmallIntegerField(
                        default=0,
                        help_text="Of the replicas, those that only encode pictures and sound for the others.",
                        validators=[django.core.validators.MaxValueValidator(63)],
                    ),
                ),
                (
                    "node",
                    models.CharField(
                        blank=True,
                        help_text="Host whose supervisor runs it. Empty: every node.",
                        max_length=200,
                    ),
                ),
                (
                    "managed",
                    models.BooleanField(
                        default=True,
                        help_text="Off: replicas are started manually with `quire engine`.",
                    ),
                ),
                (
                    "public",
                    models.BooleanField(
                        default=True, help_text="Off: for the tenants below alone."
                    ),
                ),
                (
                    "max_model_len",
                    models.PositiveIntegerField(
                        blank=True,
                        editable=False,
                        help_text="Context length, from its replicas.",
                        null=True,
                    ),
                ),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("changed_at", models.DateTimeField(auto_now=True)),
                (
                    "tenants",
                    models.ManyToManyField(
                        blank=True, related_name="served_models", to="tenants.tenant"
                    ),
                ),
            ],
            options={
                "ordering": ["name"],
            },
        ),
        migrations.CreateModel(
            name="Replica",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("replica_id", models.CharField(max_length=255, unique=True)),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("pending", "Pending"),
                            ("loading", "Loading"),
                            ("ready", "Ready"),
                            ("sleeping", "Sleeping"),
                            ("draining", "Draining"),
                            ("stopped", "Stopped"),
                            ("failed", "Failed"),
                        ],
                        default="pending",
                        max_length=10,
                    ),
                ),
                ("detail", models.TextField(blank=True)),
                ("pid", models.PositiveIntegerField(blank=True, null=True)),
                ("host", models.CharField(blank=True, max_length=255)),
                ("incarnation", models.CharField(blank=True, max_length=64)),
                ("restarts", models.PositiveIntegerField(default=0)),
                (
                    "exits_last_hour",
                    models.PositiveIntegerField(default=0, help_text="Unexpected exits."),
                ),
                (
                    "last_exit",
                    models.TextField(blank=True, help_text="Reason of the last unexpected exit."),
                ),
                ("last_seen", models.DateTimeField(blank=True, null=True)),
                ("last_ready_at", models.DateTimeField(blank=True, null=True)),
                ("changed_at", models.DateTimeField(auto_now=True)),
                (
                    "served_model",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="replicas",
                        to="catalog.servedmodel",
                    ),
                ),
            ],
            options={
                "ordering": ["replica_id"],
            },
        ),
        migrations.CreateModel(
            name="McpServer",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "name",
                    models.CharField(
                        help_text="Name that its tools' names begin with.",
                        max_length=32,
                        unique=True,
                        validators=[
                            django.core.validators.RegexValidator(
                                "\\A[a-z0-9](?:[a-z0-9-]*[a-z0-9])?\\Z",
                                "Lower-case letters, digits and - inside.",
                            )
                        ],
                    ),
                ),
                (
                    "url",
                    models.CharField(
                        help_text="Address of its streamable HTTP endpoint.", max_length=2000
                    ),
                ),
                (
                    "authorization",
                    models.CharField(
                        blank=True,
                        editable=False,
                        help_text="Value of the Authorization header, such as `Bearer ...`.",
                        max_length=4000,
                    ),
                ),
                (
                    "public",
                    models.BooleanField(
                        default=False,
                        help_text="On: for every tenant. Off: for the tenants below alone.",
                    ),
                ),
                ("tools", models.JSONField(blank=True, default=list, editable=False)),
                ("tested_at", models.DateTimeField(blank=True, editable=False, null=True)),
                ("error", models.TextField(blank=True, editable=False)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("changed_at", models.DateTimeField(auto_now=True)),
                (
                    "tenants",
                    models.ManyToManyField(
                        blank=True, related_name="mcp_servers", to="tenants.tenant"
                    ),
                ),
            ],
            options={
                "verbose_name": "MCP server",
                "ordering": ["name"],
            },
        ),
    ]
