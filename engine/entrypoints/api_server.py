"""`python -m engine.entrypoints.api_server --model MODEL`: `quire serve`, which has `/generate`."""

from engine.entrypoints.openai.api_server import main

if __name__ == "__main__":
    main()
