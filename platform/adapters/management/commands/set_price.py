from typing import Any

from django.core.management.base import CommandParser

from adapters.access import priceable_names, unknown_name_warning
from common.command_fields import add_field_options
from common.commands import QuireCommand, parse_expiry
from metering import actions
from metering.models import PRICE_FIELDS
from metering.serializers import PriceCreateSerializer
from tenants.actors import CLI_ACTOR


class Command(QuireCommand):
    help = (
        "Set a model's prices of tokens, images and audio. They apply from now or from a future "
        "time on; earlier usage keeps its price. Prices are in the currency of QUIRE_CURRENCY."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("model", help="model or adapter name in the API")
        add_field_options(
            parser,
            PriceCreateSerializer,
            input_per_million="input",
            cached_per_million="cached",
            output_per_million="output",
            per_image="image",
            per_audio_minute="audio_minute",
        )
        parser.add_argument(
            "--from",
            dest="valid_from",
            metavar="WHEN",
            help="start of validity: 30m, 12h or 90d from now, or a date (UTC; default: now)",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        moment = options["valid_from"]
        price = actions.set_price(
            actor=CLI_ACTOR,
            model=options["model"],
            **{name: options[name] for name in PRICE_FIELDS},
            valid_from=parse_expiry(moment, "--from") if moment else None,
        )
        self.stdout.write(f"{price} UTC.")
        if warning := unknown_name_warning(price.model, priceable_names()):
            self.stderr.write(warning)
