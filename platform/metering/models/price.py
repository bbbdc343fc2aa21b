"""What tokens of a model cost, from a moment on."""

from decimal import Decimal

from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models

from metering.money import MAX_PRICE, PRICE_PLACES, Rates


def _price(help_text: str) -> models.DecimalField:
    return models.DecimalField(
        max_digits=14,
        decimal_places=PRICE_PLACES,
        validators=[MinValueValidator(Decimal(0)), MaxValueValidator(MAX_PRICE)],
        help_text=help_text,
    )


class Price(models.Model):
    """A model's price until the next one. What was used before keeps the price that it had."""

    model = models.CharField(max_length=200, help_text="Model or adapter name in the API.")
    valid_from = models.DateTimeField()
    input_per_million = _price("A million prompt tokens that were computed.")
    cached_per_million = _price("A million prompt tokens from the prefix cache.")
    output_per_million = _price("A million output tokens.")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["model", "-valid_from"]
        constraints = [
            models.UniqueConstraint(fields=["model", "valid_from"], name="one_price_a_moment")
        ]

    def __str__(self) -> str:
        return f"{self.model} from {self.valid_from:%Y-%m-%d %H:%M}"

    @property
    def rates(self) -> Rates:
        """By the token."""
        return Rates.of_millions(
            self.input_per_million, self.cached_per_million, self.output_per_million
        )
