import django.contrib.auth.validators
import django.core.serializers.json
import django.core.validators
import django.db.models.deletion
import django.utils.timezone
from django.conf import settings
from django.db import migrations, models

import tenants.api_keys
import tenants.models
import tenants.validators


class Migration(migrations.Migration):
    initial = True

    dependencies = [
        ("auth", "0012_alter_user_first_name_max_length"),
    ]

    operations = [
        migrations.CreateModel(
            name="User",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("password", models.CharField(max_length=128, verbose_name="password")),
                (
                    "last_login",
                    models.DateTimeField(blank=True, null=True, verbose_name="last login"),
                ),
                (
                    "is_superuser",
                    models.BooleanField(
                        default=False,
                        help_text="Designates that this user has all permissions without explicitly assigning them.",
                        verbose_name="superuser status",
                    ),
                ),
                (
                    "username",
                    models.CharField(
                        error_messages={"unique": "A user with that username already exists."},
                        help_text="Required. 150 characters or fewer. Letters, digits and @/./+/-/_ only.",
                        max_length=150,
                        unique=True,
                        validators=[django.contrib.auth.validators.UnicodeUsernameValidator()],
                        verbose_name="username",
                    ),
                ),
                (
                    "first_name",
                    models.CharField(blank=True, max_length=150, verbose_name="first name"),
                ),
                (
                    "last_name",
                    models.CharField(blank=True, max_length=150, verbose_name="last name"),
                ),
                (
                    "email",
                    models.EmailField(blank=True, max_length=254, verbose_name="email address"),
                ),
                (
                    "is_staff",
                    models.BooleanField(
                        default=False,
                        help_text="Designates whether the user can log into this admin site.",
                        verbose_name="staff status",
                    ),
                ),
                (
                    "is_active",
                    models.BooleanField(
                        default=True,
                        help_text="Designates whether this user should be treated as active. Unselect this instead of deleting accounts.",
                        verbose_name="active",
                    ),
                ),
                (
                    "date_joined",
                    models.DateTimeField(
                        default=django.utils.timezone.now, verbose_name="date joined"
                    ),
                ),
                (
                    "operator_by_sign_on",
                    models.BooleanField(
                        default=False,
                        editable=False,
                        help_text="Operator role granted by a group of the identity provider.",
                    ),
                ),
                ("session_epoch", models.PositiveIntegerField(default=0, editable=False)),
                (
                    "groups",
                    models.ManyToManyField(
                        blank=True,
                        help_text="The groups this user belongs to. A user will get all permissions granted to each of their groups.",
                        related_name="user_set",
                        related_query_name="user",
                        to="auth.group",
                        verbose_name="groups",
                    ),
                ),
                (
                    "user_permissions",
                    models.ManyToManyField(
                        blank=True,
                        help_text="Specific permissions for this user.",
                        related_name="user_set",
                        related_query_name="user",
                        to="auth.permission",
                        verbose_name="user permissions",
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
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("name", models.CharField(max_length=100)),
                (
                    "role",
                    models.CharField(
                        choices=[
                            ("owner", "Owner"),
                            ("admin", "Admin"),
                            ("member", "Member"),
                            ("viewer", "Viewer"),
                        ],
                        default="member",
                        max_length=10,
                    ),
                ),
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
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "name",
                    models.CharField(blank=True, help_text="Purpose of the key.", max_length=100),
                ),
                ("public_id", models.CharField(editable=False, max_length=16, unique=True)),
                ("digest", models.CharField(editable=False, max_length=64)),
                ("scopes", models.JSONField(default=tenants.api_keys.default_scopes)),
                (
                    "requests_per_minute",
                    models.PositiveBigIntegerField(
                        blank=True,
                        help_text="A limit of this key alone, within the tenant's.",
                        null=True,
                    ),
                ),
                ("tokens_per_minute", models.PositiveBigIntegerField(blank=True, null=True)),
                (
                    "media_per_minute",
                    models.PositiveBigIntegerField(
                        blank=True,
                        help_text="Images, videos, documents and audio files. Empty: no limit.",
                        null=True,
                        verbose_name="media per minute",
                    ),
                ),
                (
                    "media_bytes_per_minute",
                    models.PositiveBigIntegerField(
                        blank=True,
                        help_text="Bytes of those files. Empty: no limit.",
                        null=True,
                        verbose_name="media bytes per minute",
                    ),
                ),
                (
                    "media_seconds_per_minute",
                    models.PositiveBigIntegerField(
                        blank=True,
                        help_text="Seconds that decoding them takes. Empty: no limit.",
                        null=True,
                        verbose_name="media seconds per minute",
                    ),
                ),
                (
                    "max_running_requests",
                    models.PositiveIntegerField(
                        blank=True,
                        help_text="Maximum concurrent requests. Empty: no limit.",
                        null=True,
                    ),
                ),
                (
                    "max_context_tokens",
                    models.PositiveIntegerField(
                        blank=True,
                        help_text="Maximum tokens of prompt and output together. Empty: the model's limit.",
                        null=True,
                    ),
                ),
                (
                    "allowed_models",
                    models.JSONField(
                        blank=True,
                        default=list,
                        help_text='Models that it may use, such as ["small", "large"]. Empty: the tenant\'s.',
                        validators=[tenants.validators.validate_models],
                    ),
                ),
                (
                    "endpoints",
                    models.JSONField(
                        blank=True,
                        default=list,
                        help_text='Paths that it may ask, such as ["/v1/embeddings"]. Empty: all.',
                        validators=[tenants.validators.validate_endpoints],
                    ),
                ),
                (
                    "addresses",
                    models.JSONField(
                        blank=True,
                        default=list,
                        help_text='Client networks allowed to use the key, such as ["10.0.0.0/8"]. Empty: any.',
                        validators=[tenants.validators.validate_addresses],
                    ),
                ),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                (
                    "expires_at",
                    models.DateTimeField(blank=True, help_text="Empty: never.", null=True),
                ),
                ("revoked_at", models.DateTimeField(blank=True, editable=False, null=True)),
                (
                    "last_used_at",
                    models.DateTimeField(
                        blank=True,
                        editable=False,
                        help_text="Updated at most once a minute.",
                        null=True,
                    ),
                ),
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
                        help_text="First key of this rotation chain; limits and budgets are shared along it.",
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
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "slug",
                    models.CharField(
                        help_text="Short name for commands and addresses, such as `acme`.",
                        max_length=63,
                        unique=True,
                        validators=[
                            django.core.validators.RegexValidator(
                                "\\A[a-z0-9](?:[a-z0-9-]*[a-z0-9])?\\Z",
                                "Lower-case letters, digits and hyphens; a letter or digit first and last.",
                            )
                        ],
                    ),
                ),
                ("name", models.CharField(max_length=200)),
                (
                    "active",
                    models.BooleanField(
                        default=True,
                        help_text="Off: its keys and members are refused within seconds.",
                    ),
                ),
                (
                    "weight",
                    models.FloatField(
                        default=1.0,
                        help_text="Share of the engine when it's busy, relative to other tenants (0.01 to 1000).",
                        validators=[
                            tenants.models.check_finite,
                            django.core.validators.MinValueValidator(0.01),
                            django.core.validators.MaxValueValidator(1000.0),
                        ],
                    ),
                ),
                (
                    "kv_reserved_fraction",
                    models.FloatField(
                        default=0.0,
                        help_text="Part of each replica's KV cache that others leave free for this tenant (0 to 1).",
                        validators=[
                            tenants.models.check_finite,
                            django.core.validators.MinValueValidator(0.0),
                            django.core.validators.MaxValueValidator(1.0),
                        ],
                        verbose_name="KV cache reserved",
                    ),
                ),
                (
                    "kv_max_fraction",
                    models.FloatField(
                        default=1.0,
                        help_text="Part of each replica's KV cache that this tenant may use (0.01 to 1).",
                        validators=[
                            tenants.models.check_finite,
                            django.core.validators.MinValueValidator(0.01),
                            django.core.validators.MaxValueValidator(1.0),
                        ],
                        verbose_name="KV cache at most",
                    ),
                ),
                (
                    "max_priority",
                    models.PositiveIntegerField(
                        default=0,
                        help_text="Highest priority that requests may set: from -N (runs first) to 0.",
                        validators=[django.core.validators.MaxValueValidator(1000)],
                    ),
                ),
                (
                    "requests_per_minute",
                    models.PositiveBigIntegerField(
                        blank=True, help_text="Empty: the installation's default.", null=True
                    ),
                ),
                (
                    "tokens_per_minute",
                    models.PositiveBigIntegerField(
                        blank=True,
                        help_text="Prompt and output together. Empty: the default.",
                        null=True,
                    ),
                ),
                (
                    "media_per_minute",
                    models.PositiveBigIntegerField(
                        blank=True,
                        help_text="Images, videos, documents and audio files. Empty: no limit.",
                        null=True,
                        verbose_name="media per minute",
                    ),
                ),
                (
                    "media_bytes_per_minute",
                    models.PositiveBigIntegerField(
                        blank=True,
                        help_text="Bytes of those files. Empty: no limit.",
                        null=True,
                        verbose_name="media bytes per minute",
                    ),
                ),
                (
                    "media_seconds_per_minute",
                    models.PositiveBigIntegerField(
                        blank=True,
                        help_text="Seconds that decoding them takes. Empty: no limit.",
                        null=True,
                        verbose_name="media seconds per minute",
                    ),
                ),
                (
                    "max_running_requests",
                    models.PositiveIntegerField(
                        blank=True,
                        help_text="Maximum concurrent requests. Empty: no limit.",
                        null=True,
                    ),
                ),
                (
                    "max_context_tokens",
                    models.PositiveIntegerField(
                        blank=True,
                        help_text="Maximum tokens of prompt plus output. Empty: the model's limit.",
                        null=True,
                    ),
                ),
                (
                    "allowed_models",
                    models.JSONField(
                        blank=True,
                        default=list,
                        help_text='Restrict the tenant to these models, such as ["small"]. Empty: all it can access.',
                        validators=[tenants.validators.validate_models],
                    ),
                ),
                (
                    "time_zone",
                    models.CharField(
                        default="UTC",
                        help_text="Time zone of the tenant's budget periods, such as `Europe/Berlin`.",
                        max_length=64,
                        validators=[tenants.validators.validate_time_zone],
                    ),
                ),
                (
                    "keep_usage_days",
                    models.PositiveIntegerField(
                        blank=True,
                        help_text="Days to keep single requests in the usage ledger; hourly and daily sums stay. Empty: forever.",
                        null=True,
                        validators=[
                            django.core.validators.MinValueValidator(35),
                            django.core.validators.MaxValueValidator(36500),
                        ],
                    ),
                ),
                (
                    "keep_content_days",
                    models.PositiveIntegerField(
                        blank=True,
                        help_text="Days to keep files, batches and stored responses. Empty: each object's own expiry.",
                        null=True,
                        validators=[
                            django.core.validators.MinValueValidator(1),
                            django.core.validators.MaxValueValidator(36500),
                        ],
                    ),
                ),
                (
                    "store_prompts",
                    models.BooleanField(
                        default=False,
                        help_text="Store prompts and completions with request logs, for at most 30 days. Owners and admins of the tenant can read them.",
                        verbose_name="store prompts",
                    ),
                ),
                (
                    "keep_conversations",
                    models.BooleanField(
                        default=True,
                        help_text="Store playground conversations on the server. Off: only in the browser.",
                    ),
                ),
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
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "role",
                    models.CharField(
                        choices=[
                            ("owner", "Owner"),
                            ("admin", "Admin"),
                            ("member", "Member"),
                            ("viewer", "Viewer"),
                        ],
                        default="member",
                        max_length=10,
                    ),
                ),
                (
                    "by_sign_on",
                    models.BooleanField(
                        default=False,
                        editable=False,
                        help_text="Granted by a group of the identity provider.",
                    ),
                ),
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
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("email", models.EmailField(max_length=254)),
                (
                    "role",
                    models.CharField(
                        choices=[
                            ("owner", "Owner"),
                            ("admin", "Admin"),
                            ("member", "Member"),
                            ("viewer", "Viewer"),
                        ],
                        default="member",
                        max_length=10,
                    ),
                ),
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
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("at", models.DateTimeField(auto_now_add=True, db_index=True)),
                (
                    "actor_kind",
                    models.CharField(
                        choices=[
                            ("person", "Person"),
                            ("key", "API key"),
                            ("command", "Command"),
                            ("system", "System"),
                        ],
                        default="system",
                        max_length=10,
                    ),
                ),
                ("actor_label", models.CharField(max_length=200)),
                (
                    "address",
                    models.CharField(blank=True, help_text="Client IP address.", max_length=45),
                ),
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
