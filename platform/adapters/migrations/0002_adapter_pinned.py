"""Adapters that stay in memory."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("adapters", "0001_initial")]

    operations = [
        migrations.AddField(
            model_name="adapter",
            name="pinned",
            field=models.BooleanField(
                default=False,
                help_text="What answers under its names stays in every replica's memory.",
            ),
        ),
    ]
