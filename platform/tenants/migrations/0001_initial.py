import django.core.serializers.json
import django.db.models.deletion
import django.utils.timezone
from django.conf import settings
from django.db import migrations, models

import tenants.api_keys
import tenants.models


class Migration(migrations.Migration):
    initial = True

    dependencies = [
        ("auth", "0012_alter_user_first_name_max_length"),
    ]

    operations = [
        migrations.CreateModel(
            name="User",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("password", models.CharField(max_length=128)),
                ("last_login", models.DateTimeField(blank=True, null=True)),
                ("is_superuser", models.BooleanField(default=False)),
                ("username", models.CharField(max_length=150, unique=True)),
                ("first_name", models.CharField(blank=True, max_length=150)),
                ("last_name", models.CharField(blank=True, max_length=150)),
                ("email", models.EmailField(blank=True, max_length=254)),
                ("is_staff", models.BooleanField(default=False)),
                ("is_active", models.BooleanField(default=True)),
                ("date_joined", models.DateTimeField(default=django.utils.timezone.now)),
                ("operator_by_sign_on", models.BooleanField(default=False, editable=False)),
                ("session_epoch", models.PositiveIntegerField(default=0, editable=False)),
                (
                    "groups",
                    models.ManyToManyField(
                        blank=True,
                        related_name="user_set",
                        related_query_name="user",
                        to="auth.group",
                    ),
                ),
                (
                    "user_permissions",
                    models.ManyToManyField(
                        blank=True,
                        related_name="user_set",
                        related_query_name="user",
                        to="auth.permission",
                    ),
                ),
            ],
            options={
                "verbose_name": "user",
                "verbose_name_plural": "users",
                "abstract": False,
            },
        ),
        migrations.CreateModel(
            name="ServiceAccount",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("name", models.CharField(max_length=100)),
                ("role", models.CharField(default="member", max_length=10)),
                ("active", models.BooleanField(default=True)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
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
            ],
            options={
                "ordering": ["name", "pk"],
            },
        ),
        migrations.CreateModel(
            name="ApiKey",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("name", models.CharField(blank=True, max_length=100)),
                ("public_id", models.CharField(editable=False, max_length=16, unique=True)),
                ("digest", models.CharField(editable=False, max_length=64)),
                ("scopes", models.JSONField(default=tenants.api_keys.default_scopes)),
                ("requests_per_minute", models.PositiveBigIntegerField(blank=True, null=True)),
                ("tokens_per_minute", models.PositiveBigIntegerField(blank=True, null=True)),
                ("media_per_minute", models.PositiveBigIntegerField(blank=True, null=True)),
                ("media_bytes_per_minute", models.PositiveBigIntegerField(blank=True, null=True)),
                ("media_seconds_per_minute", models.PositiveBigIntegerField(blank=True, null=True)),
                ("max_running_requests", models.PositiveIntegerField(blank=True, null=True)),
                ("max_context_tokens", models.PositiveIntegerField(blank=True, null=True)),
                ("allowed_models", models.JSONField(blank=True, default=list)),
                ("endpoints", models.JSONField(blank=True, default=list)),
                ("addresses", models.JSONField(blank=True, default=list)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("expires_at", models.DateTimeField(blank=True, null=True)),
                ("revoked_at", models.DateTimeField(blank=True, editable=False, null=True)),
                ("last_used_at", models.DateTimeField(blank=True, editable=False, null=True)),
                (
                    "created_by",
                    models.ForeignKey(
                        blank=True,
                        editable=False,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "first",
                    models.ForeignKey(
                        blank=True,
                        editable=False,
                        null=True,
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="successors",
                        to="tenants.apikey",
                    ),
                ),
                (
                    "service_account",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="api_keys",
                        to="tenants.serviceaccount",
                    ),
                ),
            ],
            options={
                "verbose_name": "API key",
                "ordering": ["-created_at", "-pk"],
            },
        ),
        migrations.CreateModel(
            name="Tenant",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("slug", models.CharField(max_length=63, unique=True)),
                ("name", models.CharField(max_length=200)),
                ("active", models.BooleanField(default=True)),
                ("weight", models.FloatField(default=1.0)),
                ("kv_reserved_fraction", models.FloatField(default=0.0)),
                ("kv_max_fraction", models.FloatField(default=1.0)),
                ("max_priority", models.PositiveIntegerField(default=0)),
                ("requests_per_minute", models.PositiveBigIntegerField(blank=True, null=True)),
                ("tokens_per_minute", models.PositiveBigIntegerField(blank=True, null=True)),
                ("media_per_minute", models.PositiveBigIntegerField(blank=True, null=True)),
                ("media_bytes_per_minute", models.PositiveBigIntegerField(blank=True, null=True)),
                ("media_seconds_per_minute", models.PositiveBigIntegerField(blank=True, null=True)),
                ("max_running_requests", models.PositiveIntegerField(blank=True, null=True)),
                ("max_context_tokens", models.PositiveIntegerField(blank=True, null=True)),
                ("allowed_models", models.JSONField(blank=True, default=list)),
                ("time_zone", models.CharField(default="UTC", max_length=64)),
                ("keep_usage_days", models.PositiveIntegerField(blank=True, null=True)),
                ("keep_content_days", models.PositiveIntegerField(blank=True, null=True)),
                ("store_prompts", models.BooleanField(default=False)),
                ("keep_conversations", models.BooleanField(default=True)),
                (
                    "salt",
                    models.CharField(
                        default=tenants.models.new_salt, editable=False, max_length=64
                    ),
                ),
                ("erase_requested_at", models.DateTimeField(blank=True, editable=False, null=True)),
                ("erased_at", models.DateTimeField(blank=True, editable=False, null=True)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
            ],
            options={
                "ordering": ["slug"],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(("weight__gt", 0)), name="tenant_weight_positive"
                    )
                ],
            },
        ),
        migrations.AddField(
            model_name="serviceaccount",
            name="tenant",
            field=models.ForeignKey(
                on_delete=django.db.models.deletion.PROTECT,
                related_name="service_accounts",
                to="tenants.tenant",
            ),
        ),
        migrations.CreateModel(
            name="Membership",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("role", models.CharField(default="member", max_length=10)),
                ("by_sign_on", models.BooleanField(default=False, editable=False)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                (
                    "user",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="memberships",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "tenant",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="memberships",
                        to="tenants.tenant",
                    ),
                ),
            ],
            options={
                "ordering": ["created_at", "pk"],
            },
        ),
        migrations.CreateModel(
            name="Invitation",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("email", models.EmailField(max_length=254)),
                ("role", models.CharField(default="member", max_length=10)),
                ("digest", models.CharField(editable=False, max_length=64, unique=True)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("expires_at", models.DateTimeField()),
                ("accepted_at", models.DateTimeField(blank=True, null=True)),
                ("revoked_at", models.DateTimeField(blank=True, null=True)),
                (
                    "accepted_by",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "created_by",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "tenant",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="invitations",
                        to="tenants.tenant",
                    ),
                ),
            ],
            options={
                "ordering": ["-created_at", "-pk"],
            },
        ),
        migrations.CreateModel(
            name="AuditEntry",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("at", models.DateTimeField(auto_now_add=True, db_index=True)),
                ("actor_kind", models.CharField(default="system", max_length=10)),
                ("actor_label", models.CharField(max_length=200)),
                ("address", models.CharField(blank=True, max_length=45)),
                ("action", models.CharField(db_index=True, max_length=60)),
                ("target_type", models.CharField(max_length=60)),
                ("target_id", models.CharField(max_length=60)),
                ("target_label", models.CharField(max_length=250)),
                (
                    "details",
                    models.JSONField(
                        default=dict, encoder=django.core.serializers.json.DjangoJSONEncoder
                    ),
                ),
                (
                    "actor",
                    models.ForeignKey(
                        blank=True,
                        db_constraint=False,
                        null=True,
                        on_delete=django.db.models.deletion.DO_NOTHING,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "actor_key",
                    models.ForeignKey(
                        blank=True,
                        db_constraint=False,
                        null=True,
                        on_delete=django.db.models.deletion.DO_NOTHING,
                        related_name="+",
                        to="tenants.apikey",
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
                "verbose_name_plural": "audit entries",
                "ordering": ["-pk"],
            },
        ),
        migrations.AddField(
            model_name="apikey",
            name="tenant",
            field=models.ForeignKey(
                on_delete=django.db.models.deletion.PROTECT,
                related_name="api_keys",
                to="tenants.tenant",
            ),
        ),
        migrations.AddConstraint(
            model_name="serviceaccount",
            constraint=models.UniqueConstraint(
                fields=("tenant", "name"), name="one_service_account_a_name"
            ),
        ),
        migrations.AddConstraint(
            model_name="membership",
            constraint=models.UniqueConstraint(
                fields=("tenant", "user"), name="one_membership_a_tenant"
            ),
        ),
    ]
