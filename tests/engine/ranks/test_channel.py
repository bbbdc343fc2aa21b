"""`Channel`, whose two directions don't wait for each other."""

from __future__ import annotations

import socket
import threading
import time

from engine.distributed.channel import Channel, ChannelClosed, RankReply, encode_reply


def test_a_thread_that_receives_cuts_no_message_of_another_short() -> None:
    ours, theirs = (Channel(end) for end in socket.socketpair())
    finished_event = threading.Event()

    def receive() -> None:
        while not finished_event.is_set():
            ours.receive(0.01)

    failures: list[ChannelClosed] = []

    def send() -> None:
        try:
            ours.send(encode_reply(RankReply(result="x" * (4 << 20))))
        except ChannelClosed as error:
            failures.append(error)

    threads = [threading.Thread(target=run, daemon=True) for run in (receive, send)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)  # the other side is in a step
    message = theirs.receive(60.0) if not failures else None
    finished_event.set()
    for thread in threads:
        thread.join(60.0)
    ours.close()
    theirs.close()
    assert not failures
    assert message is not None
    assert len(message) > 4 << 20
