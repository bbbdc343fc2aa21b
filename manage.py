#!/usr/bin/env python3
"""Quire's command line: `./manage.py help` lists the commands."""

from quire.command_line import main

if __name__ == "__main__":
    main()
