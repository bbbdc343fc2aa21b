from typing import Any

from django.core.management.base import CommandParser

from adapters.access import priceable_names, unknown_name_warning
from common.commands import QuireCommand, parse_expiry
from metering import actions
from tenants.actors import CLI_ACTOR


class Command(QuireCommand):
    help = (
        "Set a model's prices of tokens, images and audio. They apply from now or from a future "
        "time on; earlier usage keeps its price. Prices are in the currency of QUIRE_CURRENCY."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("model", help="model or adapter name in the API")
        parser.add_argument(
            "--input", required=True, metavar="X", help="price of a million prompt tokens"
        )
        parser.add_argument(
            "--cached",
            metavar="X",
            help="price of a million cached prompt tokens (default: as --input)",
        )
        parser.add_argument(
            "--output", required=True, metavar="X", help="price of a million output tokens"
        )
        parser.add_argument(
            "--image",
            metavar="X",
            help="price of an image, besides its tokens (default: as before, or 0)",
        )
        parser.add_argument(
            "--audio-minute",
            metavar="X",
            help="price of a minute of audio in which somebody speaks (default: as before, or 0)",
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
            input_per_million=options["input"],
            cached_per_million=options["cached"],
            output_per_million=options["output"],
            per_image=options["image"],
            per_audio_minute=options["audio_minute"],
            valid_from=parse_expiry(moment, "--from") if moment else None,
        )
        self.stdout.write(f"{price} UTC.")
        if warning := unknown_name_warning(price.model, priceable_names()):
            self.stderr.write(warning)
