"""Structured output: the output follows a JSON schema, a regex, a list of choices or a grammar.

`params` and `checks` are torch-free and load no backend; the rest loads `llguidance` when used.
"""
