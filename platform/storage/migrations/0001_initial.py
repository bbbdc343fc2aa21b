import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models

import storage.models


class Migration(migrations.Migration):
    initial = True

    dependencies = [
        ("tenants", "0001_initial"),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.CreateModel(
            name="ItemConversation",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("public_id", models.CharField(editable=False, max_length=64, unique=True)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("expires_at", models.DateTimeField(blank=True, db_index=True, null=True)),
                ("metadata", storage.models.JsonTextField(blank=True, default=dict)),
                ("size", models.PositiveBigIntegerField(default=0, editable=False)),
                ("changed_at", models.DateTimeField(db_index=True)),
                (
                    "key",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="tenants.apikey",
                    ),
                ),
                (
                    "tenant",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="+",
                        to="tenants.tenant",
                    ),
                ),
                (
                    "user",
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
                "verbose_name": "conversation of items",
                "verbose_name_plural": "conversations of items",
                "ordering": ["-created_at", "-pk"],
                "abstract": False,
            },
        ),
        migrations.CreateModel(
            name="StoredFile",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("public_id", models.CharField(editable=False, max_length=64, unique=True)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("expires_at", models.DateTimeField(blank=True, db_index=True, null=True)),
                ("filename", models.CharField(max_length=255)),
                ("purpose", models.CharField(max_length=40)),
                ("size", models.PositiveBigIntegerField()),
                (
                    "key",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="tenants.apikey",
                    ),
                ),
                (
                    "tenant",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="+",
                        to="tenants.tenant",
                    ),
                ),
                (
                    "user",
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
                "verbose_name": "file",
                "ordering": ["-created_at", "-pk"],
                "abstract": False,
            },
        ),
        migrations.CreateModel(
            name="Batch",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("public_id", models.CharField(editable=False, max_length=64, unique=True)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("expires_at", models.DateTimeField(blank=True, db_index=True, null=True)),
                ("lease_owner", models.CharField(blank=True, editable=False, max_length=64)),
                ("lease_until", models.DateTimeField(blank=True, editable=False, null=True)),
                ("endpoint", models.CharField(max_length=100)),
                ("completion_window", models.CharField(max_length=10)),
                ("status", models.CharField(db_index=True, default="validating", max_length=12)),
                ("metadata", storage.models.JsonTextField(blank=True, default=dict)),
                ("errors", storage.models.JsonTextField(blank=True, default=list)),
                ("usage", storage.models.JsonTextField(blank=True, default=dict)),
                ("input_file_id", models.CharField(max_length=64)),
                ("output_lifetime_s", models.PositiveBigIntegerField(blank=True, null=True)),
                ("total", models.PositiveIntegerField(default=0)),
                ("completed", models.PositiveIntegerField(default=0)),
                ("failed", models.PositiveIntegerField(default=0)),
                ("expired", models.PositiveIntegerField(default=0)),
                ("in_progress_at", models.DateTimeField(blank=True, null=True)),
                ("finalizing_at", models.DateTimeField(blank=True, null=True)),
                ("completed_at", models.DateTimeField(blank=True, null=True)),
                ("failed_at", models.DateTimeField(blank=True, null=True)),
                ("expired_at", models.DateTimeField(blank=True, null=True)),
                ("cancelling_at", models.DateTimeField(blank=True, null=True)),
                ("cancelled_at", models.DateTimeField(blank=True, null=True)),
                (
                    "key",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="tenants.apikey",
                    ),
                ),
                (
                    "tenant",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="+",
                        to="tenants.tenant",
                    ),
                ),
                (
                    "user",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "error_file",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="storage.storedfile",
                    ),
                ),
                (
                    "output_file",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="storage.storedfile",
                    ),
                ),
            ],
            options={
                "verbose_name_plural": "batches",
                "ordering": ["-created_at", "-pk"],
                "abstract": False,
            },
        ),
        migrations.CreateModel(
            name="StoredResponse",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("public_id", models.CharField(editable=False, max_length=64, unique=True)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("expires_at", models.DateTimeField(blank=True, db_index=True, null=True)),
                ("lease_owner", models.CharField(blank=True, editable=False, max_length=64)),
                ("lease_until", models.DateTimeField(blank=True, editable=False, null=True)),
                ("status", models.CharField(db_index=True, max_length=12)),
                ("background", models.BooleanField(default=False)),
                ("request", storage.models.JsonTextField()),
                ("input_items", storage.models.JsonTextField()),
                ("body", storage.models.JsonTextField()),
                ("previous_id", models.CharField(blank=True, max_length=64)),
                ("size", models.PositiveBigIntegerField(default=0, editable=False)),
                (
                    "key",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="tenants.apikey",
                    ),
                ),
                (
                    "tenant",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="+",
                        to="tenants.tenant",
                    ),
                ),
                (
                    "user",
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
                "verbose_name": "response",
                "ordering": ["-created_at", "-pk"],
                "abstract": False,
            },
        ),
        migrations.CreateModel(
            name="StoredUpload",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("public_id", models.CharField(editable=False, max_length=64, unique=True)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("expires_at", models.DateTimeField(blank=True, db_index=True, null=True)),
                ("filename", models.CharField(max_length=255)),
                ("purpose", models.CharField(max_length=40)),
                ("mime_type", models.CharField(max_length=255)),
                ("size", models.PositiveBigIntegerField()),
                ("lifetime_s", models.PositiveBigIntegerField(blank=True, null=True)),
                ("status", models.CharField(db_index=True, default="pending", max_length=10)),
                (
                    "file",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="storage.storedfile",
                    ),
                ),
                (
                    "key",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="tenants.apikey",
                    ),
                ),
                (
                    "tenant",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="+",
                        to="tenants.tenant",
                    ),
                ),
                (
                    "user",
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
                "verbose_name": "upload",
                "ordering": ["-created_at", "-pk"],
                "abstract": False,
            },
        ),
        migrations.CreateModel(
            name="UploadPart",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("public_id", models.CharField(editable=False, max_length=64, unique=True)),
                ("size", models.PositiveBigIntegerField()),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                (
                    "upload",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="parts",
                        to="storage.storedupload",
                    ),
                ),
            ],
            options={
                "ordering": ["pk"],
            },
        ),
        migrations.CreateModel(
            name="ConversationItem",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("public_id", models.CharField(editable=False, max_length=64)),
                ("item", storage.models.JsonTextField()),
                ("size", models.PositiveBigIntegerField(editable=False)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                (
                    "conversation",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="items",
                        to="storage.itemconversation",
                    ),
                ),
            ],
            options={
                "ordering": ["pk"],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("conversation", "public_id"), name="conversation_item_id"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="SavedConversation",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("public_id", models.CharField(editable=False, max_length=64, unique=True)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("expires_at", models.DateTimeField(blank=True, db_index=True, null=True)),
                ("title", models.CharField(max_length=200)),
                ("folder", models.CharField(blank=True, max_length=60)),
                ("document", storage.models.JsonTextField()),
                ("words", models.TextField(editable=False)),
                ("version", models.PositiveIntegerField(default=1, editable=False)),
                ("size", models.PositiveBigIntegerField(default=0, editable=False)),
                ("changed_at", models.DateTimeField(db_index=True)),
                ("shared_at", models.DateTimeField(blank=True, null=True)),
                (
                    "key",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="tenants.apikey",
                    ),
                ),
                (
                    "tenant",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT,
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
                "verbose_name": "conversation",
                "ordering": ["-created_at", "-pk"],
                "abstract": False,
                "indexes": [
                    models.Index(
                        fields=["user", "tenant", "-changed_at"], name="conversation_newest"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="PlaygroundPreset",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("public_id", models.CharField(editable=False, max_length=64, unique=True)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("expires_at", models.DateTimeField(blank=True, db_index=True, null=True)),
                ("name", models.CharField(max_length=100)),
                ("prompt", models.TextField(blank=True)),
                ("options", storage.models.JsonTextField(blank=True, default=dict)),
                (
                    "key",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="tenants.apikey",
                    ),
                ),
                (
                    "tenant",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="+",
                        to="tenants.tenant",
                    ),
                ),
                (
                    "user",
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
                "verbose_name": "preset",
                "ordering": ["name"],
                "abstract": False,
                "constraints": [
                    models.UniqueConstraint(fields=("tenant", "name"), name="preset_name")
                ],
            },
        ),
        migrations.CreateModel(
            name="StoredCompletion",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("public_id", models.CharField(editable=False, max_length=64, unique=True)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("expires_at", models.DateTimeField(blank=True, db_index=True, null=True)),
                ("model", models.CharField(max_length=256)),
                ("messages", storage.models.JsonTextField()),
                ("metadata", storage.models.JsonTextField(blank=True, default=dict)),
                ("body", storage.models.JsonTextField()),
                ("size", models.PositiveBigIntegerField(default=0, editable=False)),
                (
                    "key",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="tenants.apikey",
                    ),
                ),
                (
                    "tenant",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="+",
                        to="tenants.tenant",
                    ),
                ),
                (
                    "user",
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
                "verbose_name": "chat completion",
                "ordering": ["-created_at", "-pk"],
                "abstract": False,
                "indexes": [models.Index(fields=["tenant", "model"], name="completion_model")],
            },
        ),
        migrations.AddIndex(
            model_name="storedfile",
            index=models.Index(fields=["tenant", "-created_at", "-id"], name="file_newest"),
        ),
        migrations.AddIndex(
            model_name="batch",
            index=models.Index(fields=["tenant", "-created_at", "-id"], name="batch_newest"),
        ),
    ]
