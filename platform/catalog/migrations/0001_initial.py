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
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("name", models.CharField(max_length=200, unique=True)),
                ("aliases", models.JSONField(blank=True, default=list)),
                ("fallbacks", models.JSONField(blank=True, default=list)),
                ("idle_minutes", models.PositiveIntegerField(default=0)),
                ("idle_since", models.DateTimeField(blank=True, editable=False, null=True)),
                ("source", models.CharField(max_length=1000)),
                ("settings", models.JSONField(blank=True, default=dict)),
                ("desired_state", models.CharField(default="unloaded", max_length=10)),
                ("num_replicas", models.PositiveSmallIntegerField(default=1)),
                ("num_spares", models.PositiveSmallIntegerField(default=0)),
                ("num_prefill", models.PositiveSmallIntegerField(default=0)),
                ("num_encode", models.PositiveSmallIntegerField(default=0)),
                ("node", models.CharField(blank=True, max_length=200)),
                ("managed", models.BooleanField(default=True)),
                ("public", models.BooleanField(default=True)),
                (
                    "max_model_len",
                    models.PositiveIntegerField(blank=True, editable=False, null=True),
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
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("replica_id", models.CharField(max_length=255, unique=True)),
                ("state", models.CharField(default="pending", max_length=10)),
                ("detail", models.TextField(blank=True)),
                ("pid", models.PositiveIntegerField(blank=True, null=True)),
                ("host", models.CharField(blank=True, max_length=255)),
                ("incarnation", models.CharField(blank=True, max_length=64)),
                ("restart_of", models.CharField(blank=True, editable=False, max_length=64)),
                ("restarts", models.PositiveIntegerField(default=0)),
                ("exits_last_hour", models.PositiveIntegerField(default=0)),
                ("last_exit", models.TextField(blank=True)),
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
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("name", models.CharField(max_length=32, unique=True)),
                ("url", models.CharField(max_length=2000)),
                ("authorization", models.CharField(blank=True, editable=False, max_length=4000)),
                ("public", models.BooleanField(default=False)),
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
