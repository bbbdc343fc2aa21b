import signal
import time
from types import FrameType
from typing import Any

from django.core.management.base import CommandParser

from catalog.supervisor import TICK_S, Supervisor
from common.commands import QuireCommand
from common.installation import PROGRAM


class Command(QuireCommand):
    needs_database = False
    help = (
        "Run the replicas that the catalogue assigns to this node, and restart those that exit. "
        f"One per node; `{PROGRAM} up` has one built in."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--node", default="", help="name of this node (default: the host's name)"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        supervisor = Supervisor(node=options["node"])
        signals: list[int] = []

        def on_signal(number: int, frame: FrameType | None) -> None:
            signals.append(number)
            if len(signals) > 1:
                supervisor.kill()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, on_signal)
        self.print_hint(f"Supervising {supervisor.node}; Ctrl-C drains and ends its replicas.")
        try:
            while not signals:
                supervisor.tick()
                time.sleep(TICK_S)
        finally:
            supervisor.stop()
