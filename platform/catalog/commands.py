"""What the model commands have in common."""

from django.core.management.base import CommandError

from catalog.models import ServedModel


def find_model(name: str) -> ServedModel:
    """The model, or a `CommandError` that names those there are."""
    model = ServedModel.objects.filter(name=name).first()
    if model is None:
        known = ", ".join(ServedModel.objects.values_list("name", flat=True)[:20]) or "none yet"
        raise CommandError(f"Model {name!r} not found. Models: {known}.")
    return model
