"""The adapter that answered, by name and digest."""

from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("metering", "0001_squashed_0004_webhooks"),
        ("tenants", "0006_sign_on"),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.AddField(
            model_name="usageentry",
            name="adapter",
            field=models.CharField(blank=True, default="", max_length=100),
        ),
        migrations.AddField(
            model_name="usageentry",
            name="adapter_digest",
            field=models.CharField(
                blank=True,
                default="",
                help_text="Sha256 of the content that answered.",
                max_length=64,
            ),
        ),
        migrations.AddIndex(
            model_name="usageentry",
            index=models.Index(
                condition=models.Q(("adapter", ""), _negated=True),
                fields=["tenant", "model", "adapter", "started_at"],
                name="usage_of_adapters",
            ),
        ),
    ]
