import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies = [
        ("catalog", "0001_initial"),
        ("tenants", "0001_initial"),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.CreateModel(
            name="Adapter",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("name", models.CharField(max_length=100)),
                ("description", models.CharField(blank=True, max_length=300)),
                ("pinned", models.BooleanField(default=False)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("changed_at", models.DateTimeField(auto_now=True)),
                (
                    "served_model",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="adapters",
                        to="catalog.servedmodel",
                    ),
                ),
                (
                    "tenant",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="adapters",
                        to="tenants.tenant",
                    ),
                ),
            ],
            options={
                "ordering": ["name", "pk"],
            },
        ),
        migrations.CreateModel(
            name="AdapterUpload",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("public_id", models.CharField(max_length=64, unique=True)),
                ("name", models.CharField(max_length=100)),
                ("description", models.CharField(blank=True, max_length=300)),
                ("files", models.JSONField()),
                ("num_bytes", models.PositiveBigIntegerField()),
                ("promote", models.BooleanField(default=False)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("touched_at", models.DateTimeField(auto_now_add=True)),
                (
                    "created_by",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "served_model",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="catalog.servedmodel",
                    ),
                ),
                (
                    "tenant",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="+",
                        to="tenants.tenant",
                    ),
                ),
            ],
            options={
                "ordering": ["pk"],
            },
        ),
        migrations.CreateModel(
            name="AdapterVersion",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("number", models.PositiveIntegerField()),
                ("digest", models.CharField(blank=True, db_index=True, max_length=64)),
                ("state", models.CharField(db_index=True, default="uploaded", max_length=10)),
                ("report", models.JSONField(blank=True, default=dict)),
                ("num_bytes", models.PositiveBigIntegerField(default=0)),
                ("rank", models.PositiveIntegerField(blank=True, null=True)),
                ("source", models.CharField(max_length=1000)),
                ("promote_to", models.CharField(blank=True, max_length=100)),
                ("created_by", models.CharField(blank=True, max_length=200)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("worked_at", models.DateTimeField(auto_now_add=True)),
                (
                    "adapter",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="versions",
                        to="adapters.adapter",
                    ),
                ),
            ],
            options={
                "ordering": ["adapter", "-number"],
            },
        ),
        migrations.CreateModel(
            name="AdapterAlias",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("name", models.CharField(max_length=100)),
                ("canary_percent", models.PositiveSmallIntegerField(default=0)),
                ("changed_at", models.DateTimeField(auto_now=True)),
                (
                    "adapter",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="aliases",
                        to="adapters.adapter",
                    ),
                ),
                (
                    "served_model",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="catalog.servedmodel",
                    ),
                ),
                (
                    "tenant",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="+",
                        to="tenants.tenant",
                    ),
                ),
                (
                    "canary",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="canary_as",
                        to="adapters.adapterversion",
                    ),
                ),
                (
                    "previous",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="adapters.adapterversion",
                    ),
                ),
                (
                    "version",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="live_as",
                        to="adapters.adapterversion",
                    ),
                ),
            ],
            options={
                "verbose_name": "alias",
                "verbose_name_plural": "aliases",
                "ordering": ["pk"],
            },
        ),
        migrations.AddConstraint(
            model_name="adapter",
            constraint=models.UniqueConstraint(
                condition=models.Q(("tenant__isnull", False)),
                fields=("tenant", "served_model", "name"),
                name="one_adapter_a_name_of_a_tenant",
            ),
        ),
        migrations.AddConstraint(
            model_name="adapter",
            constraint=models.UniqueConstraint(
                condition=models.Q(("tenant__isnull", True)),
                fields=("served_model", "name"),
                name="one_shared_adapter_a_name",
            ),
        ),
        migrations.AddConstraint(
            model_name="adapterversion",
            constraint=models.UniqueConstraint(
                fields=("adapter", "number"), name="one_version_a_number"
            ),
        ),
        migrations.AddConstraint(
            model_name="adapterversion",
            constraint=models.UniqueConstraint(
                condition=models.Q(("digest", ""), _negated=True),
                fields=("adapter", "digest"),
                name="one_version_a_content",
            ),
        ),
        migrations.AddConstraint(
            model_name="adapteralias",
            constraint=models.UniqueConstraint(
                condition=models.Q(("tenant__isnull", False)),
                fields=("tenant", "served_model", "name"),
                name="one_alias_a_name_of_a_tenant",
            ),
        ),
        migrations.AddConstraint(
            model_name="adapteralias",
            constraint=models.UniqueConstraint(
                condition=models.Q(("tenant__isnull", True)),
                fields=("served_model", "name"),
                name="one_shared_alias_a_name",
            ),
        ),
    ]
