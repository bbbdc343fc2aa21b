"""Bytes and sockets before Django: handler, bodies, access log, load shedding."""
