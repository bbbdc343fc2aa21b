from typing import Any

from django.core.management.base import CommandParser

from common.commands import QuireCommand
from common.effective_settings import in_force
from common.settings_environment import unknown_variables


class Command(QuireCommand):
    needs_database = False
    help = (
        "List settings that differ from their defaults, with value and source, as read from this "
        "command's environment; --all lists every setting. Secrets are shown only as set or not."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--all", action="store_true", help="include settings with default values"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        for sentence in unknown_variables():
            self.print_hint(sentence)
        rows = [
            (setting.name, setting.value or "-", setting.source)
            for setting in in_force()
            if options["all"] or setting.source != "default"
        ]
        if not rows:
            self.stdout.write("All settings have their defaults; --all lists them.")
            return
        self.table(("setting", "value", "from"), rows)
