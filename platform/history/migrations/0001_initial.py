import django.db.models.deletion
import django.utils.timezone
from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies = [
        ("catalog", "0001_initial"),
        ("tenants", "0001_initial"),
    ]

    operations = [
        migrations.CreateModel(
            name="PoolSample",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("width", models.PositiveIntegerField()),
                ("start", models.BigIntegerField()),
                ("model", models.CharField(max_length=200)),
                ("replicas", models.FloatField(default=0)),
                ("running", models.FloatField(default=0)),
                ("waiting", models.FloatField(default=0)),
                ("blocks", models.FloatField(default=0)),
                ("active_blocks", models.FloatField(default=0)),
                ("cached_blocks", models.FloatField(default=0)),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(
                        fields=("width", "start", "model"), name="one_pool_sample"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="TrafficSample",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("width", models.PositiveIntegerField()),
                ("start", models.BigIntegerField()),
                ("model", models.CharField(max_length=200)),
                ("adapter", models.CharField(default="", max_length=100)),
                ("requests", models.PositiveBigIntegerField(default=0)),
                ("errors", models.PositiveBigIntegerField(default=0)),
                ("refused", models.PositiveBigIntegerField(default=0)),
                ("prompt_tokens", models.PositiveBigIntegerField(default=0)),
                ("cached_tokens", models.PositiveBigIntegerField(default=0)),
                ("completion_tokens", models.PositiveBigIntegerField(default=0)),
                ("first_token", models.JSONField(default=dict)),
                ("gaps", models.JSONField(default=dict)),
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
                "indexes": [
                    models.Index(fields=["width", "tenant", "start"], name="traffic_of_tenant")
                ],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("width", "start", "tenant", "model", "adapter"),
                        name="one_traffic_sample",
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="Alert",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("rule", models.CharField(max_length=40)),
                ("subject", models.CharField(max_length=255)),
                ("text", models.TextField()),
                ("started_at", models.DateTimeField(default=django.utils.timezone.now)),
                ("finished_at", models.DateTimeField(blank=True, null=True)),
                ("mail_claimed_at", models.DateTimeField(blank=True, null=True)),
                ("mailed_at", models.DateTimeField(blank=True, null=True)),
                ("webhook_at", models.DateTimeField(blank=True, null=True)),
                ("webhook_finished_at", models.DateTimeField(blank=True, null=True)),
                ("silenced_until", models.DateTimeField(blank=True, null=True)),
            ],
            options={
                "ordering": ["-started_at", "-pk"],
                "constraints": [
                    models.UniqueConstraint(
                        condition=models.Q(("finished_at", None)),
                        fields=("rule", "subject"),
                        name="one_open_alert",
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="BenchmarkRun",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("public_id", models.CharField(max_length=64, unique=True)),
                ("status", models.CharField(default="queued", max_length=10)),
                ("levels", models.JSONField()),
                ("input_tokens", models.PositiveIntegerField()),
                ("output_tokens", models.PositiveIntegerField()),
                ("num_requests", models.PositiveIntegerField()),
                ("results", models.JSONField(default=list)),
                ("error", models.TextField(blank=True)),
                ("created_by", models.CharField(max_length=200)),
                ("created_at", models.DateTimeField(default=django.utils.timezone.now)),
                ("finished_at", models.DateTimeField(blank=True, null=True)),
                ("lease_owner", models.CharField(blank=True, default="", max_length=64)),
                ("lease_until", models.DateTimeField(blank=True, null=True)),
                (
                    "served_model",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="benchmarks",
                        to="catalog.servedmodel",
                    ),
                ),
            ],
            options={
                "ordering": ["-created_at", "-pk"],
                "constraints": [
                    models.UniqueConstraint(
                        condition=models.Q(("status__in", ["queued", "running"])),
                        fields=("served_model",),
                        name="one_open_benchmark",
                    )
                ],
            },
        ),
    ]
