import django.core.validators
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
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "name",
                    models.CharField(
                        max_length=100,
                        validators=[
                            django.core.validators.RegexValidator(
                                "\\A(?!.*/\\.{0,2}/)[A-Za-z0-9](?:[A-Za-z0-9._@/-]*[A-Za-z0-9])?\\Z",
                                "Letters, digits and . _ @ / - inside, but neither //, /./ nor /../.",
                            )
                        ],
                    ),
                ),
                ("description", models.CharField(blank=True, max_length=300)),
                (
                    "pinned",
                    models.BooleanField(
                        default=False,
                        help_text="Whether the adapter stays in every replica's memory.",
                    ),
                ),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("changed_at", models.DateTimeField(auto_now=True)),
                (
                    "served_model",
                    models.ForeignKey(
                        help_text="The model that it was trained on.",
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="adapters",
                        to="catalog.servedmodel",
                        verbose_name="base model",
                    ),
                ),
                (
                    "tenant",
                    models.ForeignKey(
                        blank=True,
                        help_text="Empty: shared by all who may use the model.",
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
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("public_id", models.CharField(max_length=64, unique=True)),
                (
                    "name",
                    models.CharField(help_text="Name of the resulting adapter.", max_length=100),
                ),
                ("description", models.CharField(blank=True, max_length=300)),
                ("files", models.JSONField(help_text="File name -> bytes.")),
                ("num_bytes", models.PositiveBigIntegerField()),
                (
                    "promote",
                    models.BooleanField(default=False, help_text="Take it live once it's ready."),
                ),
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
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("number", models.PositiveIntegerField(help_text="1 for an adapter's first.")),
                (
                    "digest",
                    models.CharField(
                        blank=True,
                        db_index=True,
                        help_text="Sha256 of configuration and weights.",
                        max_length=64,
                    ),
                ),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("fetching", "Being fetched"),
                            ("uploaded", "Waiting for its check"),
                            ("validating", "Being checked"),
                            ("ready", "Ready"),
                            ("live", "Live"),
                            ("failed", "Refused"),
                            ("retired", "Retired"),
                        ],
                        db_index=True,
                        default="uploaded",
                        max_length=10,
                    ),
                ),
                (
                    "report",
                    models.JSONField(blank=True, default=dict, help_text="Result of the check."),
                ),
                ("num_bytes", models.PositiveBigIntegerField(default=0, verbose_name="bytes")),
                ("rank", models.PositiveIntegerField(blank=True, null=True)),
                (
                    "source",
                    models.CharField(
                        help_text="`upload`, a path, or `hub:` and the repository.", max_length=1000
                    ),
                ),
                (
                    "promote_to",
                    models.CharField(
                        blank=True,
                        help_text="The alias that it takes over once it's ready.",
                        max_length=100,
                    ),
                ),
                ("created_by", models.CharField(blank=True, max_length=200)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                (
                    "worked_at",
                    models.DateTimeField(
                        auto_now_add=True,
                        help_text="Last heartbeat of the worker that processes it.",
                    ),
                ),
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
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "name",
                    models.CharField(
                        max_length=100,
                        validators=[
                            django.core.validators.RegexValidator(
                                "\\A(?!.*/\\.{0,2}/)[A-Za-z0-9](?:[A-Za-z0-9._@/-]*[A-Za-z0-9])?\\Z",
                                "Letters, digits and . _ @ / - inside, but neither //, /./ nor /../.",
                            )
                        ],
                    ),
                ),
                (
                    "canary_percent",
                    models.PositiveSmallIntegerField(
                        default=0,
                        help_text="Percentage of the requests for the canary, 0 to 99.",
                        validators=[django.core.validators.MaxValueValidator(99)],
                    ),
                ),
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
                        help_text="Canary version, which gets a share of the requests.",
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
                        help_text="Version that a rollback returns to.",
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
