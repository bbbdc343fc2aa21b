#!/bin/sh
# Flags alone serve one model, as the images of vLLM do; anything else is the command to run.
case "$1" in
  -*) exec python -m engine.entrypoints.openai.api_server --host 0.0.0.0 "$@" ;;
  *) exec "$@" ;;
esac
