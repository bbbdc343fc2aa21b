"""No part of a name between two slashes is empty or dots alone; rows stay as they are."""

from django.core.validators import RegexValidator
from django.db import migrations, models

NAME = RegexValidator(
    r"\A(?!.*/\.{0,2}/)[A-Za-z0-9](?:[A-Za-z0-9._@/-]*[A-Za-z0-9])?\Z",
    "Letters, digits and . _ @ / - inside, with more than dots between two slashes.",
)


class Migration(migrations.Migration):
    dependencies = [("adapters", "0002_adapter_pinned")]

    operations = [
        migrations.AlterField(
            model_name=model,
            name="name",
            field=models.CharField(max_length=100, validators=[NAME]),
        )
        for model in ("adapter", "adapteralias")
    ]
