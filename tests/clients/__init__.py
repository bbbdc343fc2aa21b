"""Programs as users write them, each with a client library, run against the running product.

Each prints one JSON object, which `tests/e2e/test_clients.py` judges. They run in an environment of
their own (`make test` installs it), for some of the libraries pin what Quire needs newer.
"""
