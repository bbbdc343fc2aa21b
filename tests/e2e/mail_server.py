"""A mail server that delivers nothing and keeps all: SMTP with log-in, on a free port."""

from __future__ import annotations

import email
import email.policy
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.waiting import wait_until


@dataclass
class MailServer:
    """What came in, as text."""

    port: int = 0
    mails: list[str] = field(default_factory=list)

    def mail_to(self, address: str, word: str) -> str:
        """The text of one with this word, once it's there."""
        wait_until(lambda: self._texts(address, word))
        return self._texts(address, word)[0]

    def _texts(self, address: str, word: str) -> list[str]:
        bodies = []
        for mail in self.mails:
            message = email.message_from_string(mail, policy=email.policy.default)
            body = message.get_body(("plain",))
            assert body is not None
            bodies += [str(body.get_content())] if message["To"] == address else []
        return [text for text in bodies if word in text]


@contextmanager
def receiving() -> Iterator[MailServer]:
    """One that runs as long as the block."""
    mail_server = MailServer()

    class Session(socketserver.StreamRequestHandler):
        def say(self, line: str) -> None:
            self.wfile.write(f"{line}\r\n".encode())

        def handle(self) -> None:
            self.say("220 here")
            while line := self.rfile.readline():
                verb = line.split()[0].upper()
                if verb == b"EHLO":
                    self.say("250-here")
                    self.say("250 AUTH PLAIN")
                elif verb == b"AUTH":
                    self.say("235 welcome")
                elif verb == b"DATA":
                    self.say("354 go on")
                    lines = iter(self.rfile.readline, b".\r\n")
                    mail_server.mails.append(b"".join(lines).decode())
                    self.say("250 kept")
                elif verb == b"QUIT":
                    self.say("221 bye")
                    return
                else:
                    self.say("250 fine")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Session) as server:
        mail_server.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield mail_server
        server.shutdown()
        thread.join()
